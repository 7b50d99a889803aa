"""All ranks agree at the same calls, as often as the slowest one's pace asks for."""

import time

import pytest

from tests.ranks import Ranks, alone
from trainer.pace import MEASURED, MOST, PAUSE, WARM_UP, Pace
from trainer.runtime import Processes


def paced(processes: Processes, seconds: tuple[float, ...]) -> tuple[int, list[bool]]:
    pace, due = Pace(), []
    for _ in range(WARM_UP + MEASURED + 2 * MOST):
        time.sleep(seconds[processes.rank])
        due.append(pace.due(processes))
    return pace.every, due


@pytest.mark.parametrize(("seconds", "least", "most"), [((0.0, 0.0), MOST, MOST), ((0.0, 0.01), 1, 5), ((PAUSE, 0.0), 1, 1)])
def test_all_ranks_keep_the_pace_of_the_slowest(two_ranks: Ranks, seconds: tuple[float, float], least: int, most: int) -> None:
    (every, due), other = two_ranks.run(paced, seconds)
    assert other == (every, due)
    assert least <= every <= most
    assert all(due[: WARM_UP + MEASURED - 1])
    assert due == [call < WARM_UP + MEASURED or call % every == 0 for call in range(1, len(due) + 1)]


def test_one_process_has_nobody_to_wait_for() -> None:
    assert alone(paced, (0.0,)) == (1, [True] * (WARM_UP + MEASURED + 2 * MOST))
