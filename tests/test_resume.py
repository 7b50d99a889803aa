"""A training that was stopped and resumed equals the one that was not, to the bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, assert_equal, session

# 96 images, batch 8: 12 updates an epoch on one process, 6 on two.
CASES: dict[str, tuple[dict[str, Any], StopAt, dict[str, str]]] = {
    "inside an epoch": ({}, StopAt(0, 7), {}),
    "at an epoch's end": ({}, StopAt(0, 11), {}),
    "in the evaluation": ({}, StopAt(0, 12, evaluation=True), {}),
    "accumulation": ({"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}, StopAt(0, 4), {}),
    "workers": ({"num_workers": 2}, StopAt(0, 15), {}),
    "sgd, channels first": ({"optimizer": "sgd", "lr_scheduler": "constant", "channels_last": "off"}, StopAt(0, 2), {}),
    "bf16": ({"mixed_precision": "bf16"}, StopAt(0, 7), {}),
    "fp16": ({"mixed_precision": "fp16"}, StopAt(0, 7), {"TRAINER_FP16_ON_CPU": "1"}),
}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 96, 16)


@pytest.mark.parametrize("case", CASES)
def test_one_process(ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    knobs, stop, environment = CASES[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    whole = alone(session_with, ids, tmp_path / "whole", None, knobs)
    first = alone(session_with, ids, tmp_path / "parts", stop, knobs)
    second = alone(session_with, ids, tmp_path / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    check(whole, first, second, stop)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(two_ranks: Ranks, ids: Path, tmp_path: Path, case: str) -> None:
    knobs, stop, environment = CASES[case]
    stop = StopAt(1, max(1, stop.step // 2), stop.evaluation)
    whole = two_ranks.run(session_with, ids, tmp_path / "whole", None, knobs, environment=environment)
    first = two_ranks.run(session_with, ids, tmp_path / "parts", stop, knobs, environment=environment)
    again = knobs | {"resume_from_checkpoint": "auto"}
    second = two_ranks.run(session_with, ids, tmp_path / "parts", None, again, environment=environment)
    for rank in range(2):
        check(whole[rank], first[rank], second[rank], stop)


def session_with(processes: Any, dataset: Path, folder: Path, stop: StopAt | None, knobs: dict[str, Any]) -> Session:
    return session(processes, dataset, folder, stop, **knobs)


def check(whole: Session, first: Session, second: Session, stop: StopAt) -> None:
    assert whole.interrupted is None
    assert first.interrupted == "SIGTERM"
    assert first.state["step"] <= stop.step + (not stop.evaluation), "it stopped late"
    assert first.scaler is None or first.scaler["_growth_tracker"] > 0, "a scaler as new would do"
    assert second.interrupted is None
    assert second.order, "nothing was left to train: the stop came too late to test anything"
    assert_equal(second, whole)
    assert first.order + second.order == whole.order
