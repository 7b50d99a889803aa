"""Files that are whole or not there: written beside, flushed to the disk, renamed into place."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text`, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def beside(folder: Path) -> Path:
    """An empty folder next to `folder`, to be filled and given to `replace_folder`."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def replace_folder(temporary: Path, folder: Path, to_disk: bool = True) -> None:
    """Flush `temporary` to the disk, if it has to survive a power failure, and rename it to `folder`, whose earlier content goes.

    A folder cannot be renamed over a full one: killed between the two renames, the earlier one is `.NAME.old`, see `recover_folder`.
    """
    for path in (*sorted(temporary.rglob("*")), temporary) if to_disk else ():
        flush(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    if to_disk:
        flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Put things in order after a `replace_folder` that was killed: the earlier folder is back, or the new one stands alone."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    for leftover in (old, folder.with_name(f".{folder.name}.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)


def flush(path: Path) -> None:
    """Have a file's or folder's content on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path) -> None:
    """Name each file of `folder`, with its size in bytes and its SHA-256, in manifest.json: the last file to be written."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    write_json(folder / MANIFEST, {"files": files})


def problem(folder: Path) -> str | None:
    """Why the folder is not what its manifest says; None when it is."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
            if digest(path) != entry["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is broken"
    return None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """`target` with the content of the file `source`, which nobody changes in place: shared on the disk where that is possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
