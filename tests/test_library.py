"""Training from Python: what it returns and raises, several times in the same processes, with hooks and data of one's own."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.helpers import ids_image, write_ids
from tests.ranks import Ranks
from trainer import Config, Hook, Run, Stopped, UserError, train
from trainer.config import parse
from trainer.main import main

KNOBS: dict[str, Any] = {"epochs": 1, "batch_size": 8, "eval_batch_size": 5, "cpu_threads": 1, "log_interval": 2}


def from_python() -> dict[str, datasets.Dataset]:
    """The splits of `write_ids`, made in memory."""
    return {
        split: datasets.Dataset.from_dict({"picture": [ids_image(i) for i in range(count)], "label": [str(i % 10) for i in range(count)]})
        for split, count in (("train", 96), ("test", 16))
    }


class Counter(Hook):
    """Counts its calls, over resumes."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: Run) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class FailAt(Hook):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            raise ZeroDivisionError("a hook's own")


class Press(Hook):
    """Ctrl-C, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step_end(self, run: Run) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
        self.times = 0


def several(ids: Path, folder: Path) -> dict[str, Any]:
    """On each rank: train, make a mistake, train again, fail, train again."""
    config: dict[str, Any] = {"dataset": str(ids), **KNOBS}
    counter = Counter()
    first = train(Config(output_dir=str(folder / "first"), **config), hooks=[counter])
    with pytest.raises(UserError, match="--dataset nowhere"):
        train(Config(dataset="nowhere"))
    second = train(Config(output_dir=str(folder / "second"), **{**config, "dataset": "tests.test_library:from_python"}))
    with pytest.raises(ZeroDivisionError, match="a hook's own"):
        train(Config(output_dir=str(folder / "failed"), **config), hooks=[FailAt(3)])
    third = train(Config(output_dir=str(folder / "third"), hooks="tests.test_library:Counter", **config))
    return {"results": [first, second, third], "steps": counter.steps}


def test_several_trainings_in_the_same_two_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    zero, one = two_ranks.run_apart(several, write_ids(tmp_path / "ids"), tmp_path)
    assert zero["results"] == one["results"]
    assert zero["steps"] == one["steps"] == 6
    for name, results in zip(("first", "second", "third"), zero["results"], strict=True):
        assert results["output_dir"] == str(tmp_path / name)
        assert results["acc1"] == json.loads((tmp_path / name / "results.json").read_text())["acc1"]
        assert (results["step"], results["evaluated_samples"]) == (6, 16)
    # The same images and classes, from a folder and from a function.
    assert len({results["loss"] for results in zero["results"]}) == 1
    assert json.loads((tmp_path / "failed" / "exit.json").read_text())["code"] == 1
    state = json.loads((next((tmp_path / "third" / "checkpoints").glob("step_*")) / "state.json").read_text())
    assert state["hooks"]["Counter"] == {"steps": 6}


def test_a_first_interrupt_stops_with_a_checkpoint_and_a_second_one_at_once(tmp_path: Path) -> None:
    config: dict[str, Any] = {"dataset": str(write_ids(tmp_path / "ids")), **KNOBS}
    with pytest.raises(Stopped, match=r"SIGINT at update \d, epoch 1; go on with --resume run"):
        train(Config(output_dir="run", **config), hooks=[Counter(), Press(1)])
    counter = Counter()
    results = train(Config(output_dir="run", resume_from_checkpoint="auto", **config), hooks=[counter, Press(0)])
    assert counter.steps == results["step"] == 12, "a hook's state goes on too"
    with pytest.raises(KeyboardInterrupt):
        train(Config(output_dir="other", **config), hooks=[Press(2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_hooks_exception_comes_out_and_a_missing_hook_is_named(tmp_path: Path) -> None:
    config: dict[str, Any] = {"dataset": str(write_ids(tmp_path / "ids")), "output_dir": "run", **KNOBS}
    with pytest.raises(ZeroDivisionError, match="a hook's own"):
        train(Config(**{**config, "checkpointing_steps": 2}), hooks=[Counter(), FailAt(3)])
    with pytest.raises(UserError, match="the checkpoint's hooks are not those of this run: Counter"):
        train(Config(resume_from_checkpoint="auto", **config))


def test_two_hooks_with_a_state_of_one_name_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {"dataset": str(write_ids(tmp_path / "ids")), "output_dir": "run", **KNOBS}
    log = type("Log", (Counter,), {})()
    for hooks in ([Counter(), Counter()], [log]):
        with pytest.raises(UserError, match=f"two hooks that have a state are called {type(hooks[0]).__name__}, and a checkpoint keeps"):
            train(Config(**config), hooks=hooks)
    train(Config(**config), hooks=[Press(0), Press(0)])


def test_a_fork_of_a_process_that_has_trained_is_refused(tmp_path: Path) -> None:
    """notebook_launcher's processes are forks; OpenMP's threads would be missing there, and waited for."""
    train(parse(["--dataset", str(write_ids(tmp_path / "ids")), "--max_steps", "1", "--cpu_threads", "2"]))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(Config())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert "forked from one that had trained already" in answer.read()
    assert os.waitpid(child, 0) == (child, 0)


def test_hooks_by_name_beside_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loud.py").write_text(
        "from trainer import Hook\n\n\nclass Loud(Hook):\n    def on_epoch_end(self, run):\n        print('EPOCH', run.state.epoch)\n"
    )
    flags = ["--dataset", str(write_ids(tmp_path / "ids")), "--epochs", "2", "--cpu_threads", "1", "--output_dir", "run"]
    main([*flags, "--hooks", "loud:Loud, tests.test_library:Counter"])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("EPOCH")] == ["EPOCH 1", "EPOCH 2"]
