"""Another process of this host, by its number and when it started."""

from contextlib import suppress

import psutil


def find_process(pid: int, born: float) -> psutil.Process | None:
    """The process that had this number then; None when it is no more.

    Args:
        born: as psutil's `create_time` says it, which moves a little when the clock is set.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - born) < 2 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None
