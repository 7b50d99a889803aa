"""Writing beside the training: one thing at a time, in a thread of the main process."""

import threading
from collections.abc import Callable


class Writer:
    """Runs one piece of work at a time; what it raises is raised again by `wait`.

    Args:
        on_failure: called, in the thread, when the work has failed.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before it has been waited for."""
        assert self._thread is None
        # Not a daemon: a program that ends in order does not cut it off.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when the work is done.

        Raises:
            Exception: what it has raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
            self.on_failure()
