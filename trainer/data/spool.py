"""Row groups that a rank's data workers have fetched from the Hub, shared by them through files, so that each is fetched once."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

# Row groups that can be fetched at once, about.
LOCKS = 64


class Spool:
    """A temporary folder (TMPDIR rules where) of the newest row groups as Arrow files, mapped into memory by every process that reads them.

    Args:
        nbytes: how many may lie there, beside the newest row group.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.folder = Path(tempfile.mkdtemp(prefix="trainer-stream-"))
        # In this process only, and when multiprocessing has ended the workers.
        Finalize(self, shutil.rmtree, (self.folder, True), exitpriority=-1)

    def table(self, number: int, fetch: Callable[[], Any]) -> Any:
        """Row group `number` as a `pyarrow.Table`; `fetch` gets it where no process has done so, while the others wait."""
        from filelock import FileLock

        file = self.folder / f"{number}.arrow"
        with FileLock(self.folder / f"{number % LOCKS}.lock"):
            try:
                return mapped(file)
            except FileNotFoundError:
                write(file, fetch())
            found = mapped(file)
        self.trim()
        return found

    def trim(self) -> None:
        """Remove the files that were not asked for the longest; who has mapped one keeps it."""
        files = []
        for file in self.folder.glob("*.arrow"):
            # Another process may be doing the same.
            with suppress(FileNotFoundError):
                status = file.stat()
                files.append((status.st_mtime_ns, status.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files)[:-1]:
            if total <= self.nbytes:
                break
            file.unlink(missing_ok=True)
            total -= size

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def mapped(file: Path) -> Any:
    import pyarrow  # type: ignore[import-untyped]

    # The newest ones are those that were asked for last.
    os.utime(file)
    with pyarrow.memory_map(str(file)) as source:
        return pyarrow.ipc.open_file(source).read_all()


def write(file: Path, table: Any) -> None:
    import pyarrow

    temporary = file.with_suffix(".tmp")
    with pyarrow.OSFile(str(temporary), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    os.replace(temporary, file)
