"""A Hub on this machine: the part of its interface through which `datasets` finds and reads a data set's files, for its real client."""

import http.server
import json
import re
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Serves `folder` as any data set, over HTTP with ranges.

    Attributes:
        url: for HF_ENDPOINT.
        ranges: (file, first byte, last byte) of each answered request for content, in order.
        delay: seconds before each of them.
    """

    daemon_threads = True

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.delay = folder, delay
        self.ranges: list[tuple[str, int, int]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "ETag": f'"{COMMIT}"', **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

    def entry(self, path: Path) -> dict[str, Any]:
        kind = {"type": "directory", "size": 0} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
        return {"path": str(path.relative_to(self.server.folder)), "oid": COMMIT, **kind}

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path, folder = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path), self.server.folder
        if found := re.fullmatch(r"/datasets/[^/]+/[^/]+/resolve/[^/]+/(.+)", path):
            self.resolve(folder / found[1])
        elif found := re.fullmatch(r"/api/datasets/[^/]+/[^/]+/tree/[^/]+(?:/(.*))?", path):
            place = folder / (found[1] or "")
            if place.is_dir():
                self.answer_json([self.entry(file) for file in sorted(place.iterdir())])
            else:
                self.answer(404, X_Error_Code="EntryNotFound")
        elif re.fullmatch(r"/api/datasets/[^/]+/[^/]+/paths-info/[^/]+", path):
            asked = json.loads(content)["paths"] if content.startswith("{") else urllib.parse.parse_qs(content)["paths"]
            self.answer_json([self.entry(folder / name) for name in asked if (folder / name).exists()])
        elif re.fullmatch(r"/api/datasets/[^/]+/[^/]+(/revision/[^/]+)?", path):
            siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            self.answer_json({"id": "some/digits", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        else:
            self.answer(404)

    do_POST = do_HEAD = do_GET

    def resolve(self, file: Path) -> None:
        if not file.is_file():
            self.answer(404, X_Error_Code="EntryNotFound")
            return
        content = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None:
            self.answer(200, content)
            return
        first, last = int(asked[1]), int(asked[2])
        time.sleep(self.server.delay)
        self.server.ranges.append((file.name, first, last))
        self.answer(206, content[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(content)}")

    def log_message(self, *arguments: Any) -> None:
        pass
