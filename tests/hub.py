"""A Hub on this machine, for its real client: what it takes to find and read a data set, and to make and fill a model's repository."""

import base64
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
TOKEN = "hf_" + "t" * 34


class Hub(http.server.ThreadingHTTPServer):
    """Serves `folder` as any data set, over HTTP with ranges.

    Attributes:
        url: for HF_ENDPOINT.
        ranges: (file, first byte, last byte) of each answered request for content, in order.
        delay: seconds before each of them.
        models: files of the models' repositories that were made here: repository -> path -> content. A commit needs `TOKEN`.
        refuses_commits: answers them with an error.
    """

    daemon_threads = True

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.delay = folder, delay
        self.ranges: list[tuple[str, int, int]] = []
        self.models: dict[str, dict[str, bytes]] = {}
        self.refuses_commits = False
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
        length = int(self.headers.get("Content-Length") or 0)
        content = (
            self.rfile.read(length) if length or "chunked" not in self.headers.get("Transfer-Encoding", "") else self.chunks()
        ).decode()
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
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401)
        else:
            self.model(path, content)

    def model(self, path: str, content: str) -> None:
        """What concerns a model's repository."""
        models, url = self.server.models, self.server.url
        if path == "/api/repos/create":
            asked = json.loads(content)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            models.setdefault(repo, {})
            self.answer_json({"url": f"{url}/{repo}", "name": repo, "id": COMMIT})
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path)) and found[1] in models:
            names = [file["path"] for file in json.loads(content)["files"]]
            self.answer_json({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path)) and found[1] in models:
            if self.server.refuses_commits:
                self.answer(403, b'{"error": "this repository is read-only today"}', Content_Type="application/json")
                return
            for entry in map(json.loads, content.splitlines()):
                if entry["key"] == "file":
                    models[found[1]][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer_json({"commitUrl": f"{url}/{found[1]}/commit/{COMMIT}", "commitOid": COMMIT})
        elif (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)) and found[2] in models.get(found[1], {}):
            body = models[found[1]][found[2]]
            # The client keeps files by this tag.
            self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"')
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path)) and found[1] in models:
            siblings = [{"rfilename": name} for name in models[found[1]]]
            self.answer_json({"id": found[1], "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path)) and found[1] in models:
            files = models[found[1]].items()
            self.answer_json([{"type": "file", "path": name, "size": len(body), "oid": COMMIT} for name, body in files])
        else:
            self.answer(404)

    def chunks(self) -> bytes:
        """A body whose length was not said beforehand."""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

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
