"""How often all ranks agree whether to go on."""

import time

from trainer.runtime import Processes

# Calls before the clock is started, and those that it measures.
WARM_UP, MEASURED = 4, 12
# Seconds between two agreements, about, and the most calls that go by: updates that become slow later must not hold up a stop.
PAUSE, MOST = 0.05, 8


class Pace:
    """Each time at first; then some `PAUSE` apart by the slowest rank's clock, which all ranks are told once.

    Two small models' updates take 10 ms, and an agreement, however small, a twentieth of that from both.

    Attributes:
        every: calls from one agreement to the next; the same on all ranks.
    """

    def __init__(self) -> None:
        self.every = 1
        self._calls = 0
        self._start = 0.0

    def due(self, processes: Processes) -> bool:
        """Whether all ranks agree now. A collective: all ranks call it at the same places."""
        if processes.count == 1:
            return True
        self._calls += 1
        if self._calls == WARM_UP:
            self._start = time.perf_counter()
        if self._calls == WARM_UP + MEASURED:
            seconds = max(processes.all_gather((time.perf_counter() - self._start) / MEASURED))
            self.every = max(1, min(MOST, int(PAUSE / seconds)))
        return self._calls % self.every == 0
