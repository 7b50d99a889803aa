"""Checkpoints on disk: what is in them, which are kept, which one a resume takes, and what it refuses and says."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, session
from trainer.checkpoint import listed
from trainer.checkpoint import run_folder as run_folder_of
from trainer.files import problem, write_manifest
from trainer.hooks.base import Hook
from trainer.runtime import UserError
from trainer.state import Run

AUTO: dict[str, Any] = {"resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 96, 16)


@pytest.fixture(scope="module")
def finished(ids: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, 12 updates each, with a checkpoint after every fifth."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(ids, folder, checkpointing_steps=5, save_total_limit=None)
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def train(dataset: Path, folder: Path, stop: StopAt | None = None, more: tuple[Hook, ...] = (), **knobs: Any) -> Session:
    result: Session = alone(train_in, dataset, folder, stop, more, knobs)
    return result


def train_in(processes: Any, dataset: Path, folder: Path, stop: StopAt | None, more: tuple[Hook, ...], knobs: dict[str, Any]) -> Session:
    return session(processes, dataset, folder, stop, more, **knobs)


def names(folder: Path) -> list[str]:
    return [path.name for path in listed(folder / "checkpoints")]


def refusal(dataset: Path, folder: Path, **knobs: Any) -> str:
    with pytest.raises(UserError) as refused:
        train(dataset, folder, **knobs)
    return str(refused.value)


def test_every_n_updates_and_at_the_end(finished: Path) -> None:
    assert names(finished) == [f"step_{step:08d}" for step in (5, 10, 15, 20, 25, 30, 35, 36)]
    assert [problem(path) for path in listed(finished / "checkpoints")] == [None] * 8


def test_after_each_epoch_the_newest_are_kept(ids: Path, tmp_path: Path) -> None:
    train(ids, tmp_path / "run", save_total_limit=2)
    assert names(tmp_path / "run") == ["step_00000024", "step_00000036"]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file(), "the best is kept apart"


def test_what_is_in_it(finished: Path) -> None:
    folder = finished / "checkpoints" / "step_00000015"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rank_0.safetensors",
        "state.json",
    ]
    state = json.loads((folder / "state.json").read_text())
    assert (state["train"]["epoch"], state["train"]["step"], state["train"]["consumed"]) == (1, 15, 24)
    assert state["processes"] == 1
    assert state["config"]["epochs"] == 3
    assert state["hooks"]["Log"]["entries"] == 4
    optimizer = load_file(folder / "optimizer.safetensors")
    assert optimizer["step/net.fc.weight"] == 15
    assert optimizer["exp_avg/net.fc.weight"].shape == load_file(folder / "model.safetensors")["net.fc.weight"].shape


def test_a_newer_one_replaces_one_of_the_same_step(ids: Path, tmp_path: Path) -> None:
    """Stopped in the evaluation, then resumed: the same update, but the epoch is done."""
    folder = tmp_path / "run"
    assert train(ids, folder, StopAt(0, 12, evaluation=True)).interrupted
    state = folder / "checkpoints" / "step_00000012" / "state.json"
    assert json.loads(state.read_text())["train"]["epoch"] == 0
    train(ids, folder, StopAt(0, 12), **AUTO, epochs=1)
    assert json.loads(state.read_text())["train"]["epoch"] == 1
    assert problem(state.parent) is None
    assert not list(state.parent.parent.glob(".*"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 7), "model.safetensors has 7 bytes instead of "),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is broken"),
        (lambda folder: flip(folder / "optimizer.safetensors"), "optimizer.safetensors has changed since it was written"),
        (lambda folder: (folder / "best" / "config.json").write_text("{}"), "best/config.json has 2 bytes instead of "),
    ],
)
def test_a_broken_one_is_passed_over_and_named(ids: Path, run_folder: Path, spoil: Any, why: str) -> None:
    newest = listed(run_folder / "checkpoints")[-1]
    spoil(newest)
    resumed = train(ids, run_folder, **AUTO, checkpointing_steps=5, save_total_limit=None)
    assert resumed.state["step"] == 36
    assert any(note.startswith(f"step_00000036 is passed over: {why}") for note in resumed.notes)
    assert resumed.notes[0] == f"from {run_folder}/checkpoints/step_00000035, after update 35, epoch 3"
    assert problem(newest) is None, "written anew"
    # Named, it is refused: nobody asked for another one.
    spoil(newest)
    assert f"step_00000036: the checkpoint is broken, {why}" in refusal(ids, run_folder, resume_from_checkpoint=str(newest))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_numbers_are_compared_as_numbers(ids: Path, run_folder: Path) -> None:
    folder = run_folder / "checkpoints"
    (folder / "step_00000036").rename(folder / "step_100000000")
    write_manifest(folder / "step_100000000")
    assert names(run_folder)[-1] == "step_100000000"
    assert "step_100000000" in train(ids, run_folder, **AUTO, checkpointing_steps=5).notes[0]


def test_resume_by_path_sets_later_ones_aside(ids: Path, run_folder: Path) -> None:
    """They belong to a history that is left; nothing is deleted."""
    resumed = train(ids, run_folder, resume_from_checkpoint=str(run_folder / "checkpoints" / "step_00000010"), max_steps=12)
    assert names(run_folder) == ["step_00000005", "step_00000010", "step_00000012"]
    assert sorted(path.name for path in (run_folder / "checkpoints" / "set_aside").iterdir()) == [
        f"step_{step:08d}" for step in (15, 20, 25, 30, 35, 36)
    ]
    assert [entry["step"] for entry in resumed.metrics] == [4, 8, 12, 12], "later lines of metrics.jsonl are cut off"


def test_a_run_folder_is_a_path_too_and_the_run_goes_on_in_it(ids: Path, run_folder: Path) -> None:
    shutil.rmtree(run_folder / "checkpoints" / "step_00000036")
    resumed = train(ids, run_folder, resume_from_checkpoint=str(run_folder))
    assert resumed.state["step"] == 36
    assert (run_folder / "exit.json").exists() is False


def test_into_another_folder(ids: Path, run_folder: Path, tmp_path: Path) -> None:
    """A branch: it takes the history up to there and the best model along, and leaves the old run alone."""
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    start = run_folder / "checkpoints" / "step_00000020"
    branch = train(ids, tmp_path / "branch", resume_from_checkpoint=str(start), max_steps=22)
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before
    assert names(tmp_path / "branch") == ["step_00000022"]
    assert [entry["step"] for entry in branch.metrics] == [4, 8, 12, 12, 16, 20, 22, 22]
    assert (tmp_path / "branch" / "model" / "config.json").is_file()


def test_the_best_model_is_that_of_the_checkpoint(ids: Path, run_folder: Path) -> None:
    """model/ may be of a later epoch than the checkpoint: killed before the next, or resumed from an older one."""
    start = run_folder / "checkpoints" / "step_00000015"
    shutil.rmtree(run_folder / "model")
    train(ids, run_folder, resume_from_checkpoint=str(start), max_steps=16, epochs=2)
    best = json.loads((run_folder / "results.json").read_text())["best_epoch"]
    assert json.loads((run_folder / "model" / "config.json").read_text())["epoch"] == best


def test_more_epochs(ids: Path, run_folder: Path) -> None:
    """Two epochs, then resumed to three: only epoch 3 runs; --epochs is the total."""
    folder = run_folder.parent / "two"
    train(ids, folder, epochs=2, lr_scheduler="constant")
    resumed = train(ids, folder, **AUTO, epochs=3, lr_scheduler="constant")
    whole = train(ids, run_folder.parent / "three", epochs=3, lr_scheduler="constant")
    assert {epoch for epoch, _ in resumed.order} == {2}
    assert resumed.order == whole.order[24:]
    assert "changed: epochs 2 -> 3" in resumed.notes
    for name in whole.weights:
        assert torch.equal(resumed.weights[name], whole.weights[name])
    assert resumed.metrics == whole.metrics


def test_more_epochs_plan_the_rate_anew_and_say_so(ids: Path, tmp_path: Path) -> None:
    train(ids, tmp_path / "run", epochs=2)
    resumed = train(ids, tmp_path / "run", **AUTO, epochs=4)
    note = next(note for note in resumed.notes if note.startswith("updates "))
    assert note == "updates 24 -> 48: the learning rate is planned anew over all of them, and goes on with 0.00571"


def test_a_finished_run_has_nothing_left(ids: Path, run_folder: Path) -> None:
    before = json.loads((run_folder / "results.json").read_text())
    resumed = train(ids, run_folder, **AUTO)
    assert resumed.order == []
    assert any("nothing is left to train: raise --epochs" in note for note in resumed.notes)
    after = json.loads((run_folder / "results.json").read_text())
    times = {"seconds": 0, "train_seconds": 0, "startup_seconds": 0}
    assert after | times == before | times


def test_max_steps_inside_an_epoch_goes_on_inside_it(ids: Path, tmp_path: Path) -> None:
    train(ids, tmp_path / "parts", max_steps=7, lr_scheduler="constant")
    parts = train(ids, tmp_path / "parts", **AUTO, max_steps=20, lr_scheduler="constant")
    whole = train(ids, tmp_path / "whole", max_steps=20, lr_scheduler="constant")
    assert parts.order == whole.order[7:]
    for name in whole.weights:
        assert torch.equal(parts.weights[name], whole.weights[name])


@pytest.mark.parametrize(("name", "value", "old"), [("optimizer", "sgd", "adamw"), ("seed", 3, 0), ("normalize", "none", "dataset")])
def test_what_cannot_go_on_is_refused(ids: Path, run_folder: Path, name: str, value: Any, old: Any) -> None:
    text = refusal(ids, run_folder, **AUTO, **{name: value})
    assert text.startswith(f"--{name} {value}: the checkpoint ")
    assert f"was written with {old}: use that, or train anew in another --output_dir" in text


def test_other_data_are_refused(run_folder: Path, tmp_path: Path) -> None:
    other = write_ids(tmp_path / "other", 80, 16)
    assert "is not what the checkpoint" in refusal(other, run_folder, **AUTO)
    assert "train 96 -> 80" in refusal(other, run_folder, **AUTO)


def test_moved_data_are_the_same(ids: Path, run_folder: Path, tmp_path: Path) -> None:
    resumed = train(shutil.copytree(ids, tmp_path / "moved"), run_folder, **AUTO)
    changed = next(note for note in resumed.notes if note.startswith("changed: "))
    assert f"dataset {ids} -> {tmp_path / 'moved'}" in changed
    assert "checkpointing_steps 5 -> epoch, save_total_limit None -> 3" in changed


class Bomb:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rank_0.safetensors", "state.json"])
def test_a_hostile_pickle_is_refused_and_not_executed(ids: Path, run_folder: Path, tmp_path: Path, name: str) -> None:
    newest = listed(run_folder / "checkpoints")[-1]
    marker = tmp_path / "executed"
    (newest / name).write_bytes(pickle.dumps(Bomb(marker)))
    write_manifest(newest)
    assert "the checkpoint cannot be loaded" in refusal(ids, run_folder, **AUTO)
    assert not marker.exists()
    pickle.loads((newest / name).read_bytes())
    assert marker.exists(), "the pickle was harmless: the test proved nothing"


@pytest.mark.parametrize("killed", ["between the renames", "before the first", "after the second"])
def test_a_save_that_was_killed(ids: Path, run_folder: Path, killed: str) -> None:
    folder = run_folder / "checkpoints"
    newest = folder / "step_00000036"
    if killed == "between the renames":
        newest.rename(folder / ".step_00000036.old")
        shutil.copytree(folder / "step_00000035", folder / ".step_00000036.tmp")
    elif killed == "before the first":
        shutil.copytree(newest, folder / ".step_00000037.tmp")
    else:
        shutil.copytree(newest, folder / ".step_00000036.old")
    resumed = train(ids, run_folder, **AUTO)
    assert resumed.notes[0].startswith(f"from {newest}")


class Poison(Hook):
    """An overflow that only BatchNorm's statistics keep (pytorch#90342)."""

    def __init__(self, at: int = 14) -> None:
        self.at = at

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.at:
            run.module.get_buffer("net.layer1.1.running_var").fill_(torch.inf)


def test_no_checkpoint_of_what_is_not_finite(ids: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"layer1.1.running_var holds values that are not finite at update 24: no checkpoint is written"):
        train(ids, tmp_path / "run", more=(Poison(),))
    assert names(tmp_path / "run") == ["step_00000012"]
    assert problem(tmp_path / "run" / "checkpoints" / "step_00000012") is None


class Counter(Hook):
    """A hook with a state."""

    def __init__(self) -> None:
        self.updates = 0

    def on_step_end(self, run: Run) -> None:
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def test_states_of_hooks_are_theirs() -> None:
    from trainer.hooks.base import HookList

    counter = Counter()
    hooks = HookList((Hook(), counter))
    assert hooks.state_dict() == {"Counter": {"updates": 0}}
    hooks.load_state_dict({"Counter": {"updates": 7}})
    assert counter.updates == 7
    for wrong in ({}, {"Counter": {"updates": 1}, "Other": {"x": 1}}):
        with pytest.raises(ValueError, match="the checkpoint's hooks are not those of this run"):
            hooks.load_state_dict(wrong)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes(two_ranks: Ranks, ids: Path, tmp_path: Path, before: int, after: int) -> None:
    """--global_batch_size keeps the updates; the resumed epoch sees each sample once."""
    knobs = {"batch_size": None, "global_batch_size": 16}
    part: list[Session] = start(two_ranks, before, ids, tmp_path / "run", StopAt(0, 7), knobs)
    rest = start(two_ranks, after, ids, tmp_path / "run", None, knobs | AUTO)
    whole = start(two_ranks, after, ids, tmp_path / "whole", None, knobs)
    seen = [index for result in (*part, *rest) for epoch, batch in result.order for index in batch if epoch == 1]
    assert sorted(seen) == list(range(96)), "each sample once in the resumed epoch"
    assert rest[0].state["step"] == whole[0].state["step"] == 18
    assert rest[0].state["samples"] == whole[0].state["samples"] == 288
    note = next(note for note in rest[0].notes if note.startswith("processes"))
    left = 96 - part[0].state["consumed"]
    assert note.startswith(f"processes {before} -> {after}: the {left} samples that epoch 2 still has are dealt out anew, each once")
    theirs = [entry for entry in whole[0].metrics if entry["event"] == "train"]
    ours = [entry for entry in rest[0].metrics if entry["event"] == "train"]
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    # Not the same dropout; the same learning otherwise.
    assert abs(ours[-1]["loss"] - theirs[-1]["loss"]) < 0.35


def start(ranks: Ranks, count: int, dataset: Path, folder: Path, stop: StopAt | None, knobs: dict[str, Any]) -> list[Session]:
    if count == 1:
        return [train(dataset, folder, stop, **knobs)]
    return ranks.run(train_in, dataset, folder, stop, (), knobs)


def test_more_processes_at_an_epochs_end(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    """Only the main process has sums since the last log line then; all ranks must write that line together all the same."""
    knobs = {"batch_size": None, "global_batch_size": 16, "log_interval": 4}
    start(two_ranks, 1, ids, tmp_path / "run", StopAt(0, 6, evaluation=True), knobs)
    rest = start(two_ranks, 2, ids, tmp_path / "run", None, knobs | AUTO)
    assert rest[0].state["step"] == 18
    assert [entry["step"] for entry in rest[0].metrics if entry["event"] == "train"] == [4, 6, 8, 12, 16, 18]


def test_a_plan_of_its_own_survives_the_next_resume(ids: Path, tmp_path: Path) -> None:
    """The global batch changes in the middle: the updates that are left are what the second leg has planned, not epochs x updates."""
    folder = tmp_path / "run"
    train(ids, folder, StopAt(0, 6))
    second = train(ids, folder, StopAt(0, 8), **AUTO, batch_size=24)
    # 48 of 96 images were left: 2 updates of 24; two more epochs of 4.
    assert any("10 updates are left" in note for note in second.notes)
    third = train(ids, folder, **AUTO, batch_size=24)
    assert third.state["step"] == 16
    assert not any("planned anew" in note or "nothing is left" in note for note in third.notes)
    rates = [entry["lr"] for entry in third.metrics if entry["event"] == "train"]
    assert rates[-1] > 0


@pytest.mark.parametrize("steps", [12, 7])
def test_a_run_that_max_steps_ended_counts_no_epoch_twice(ids: Path, tmp_path: Path, steps: int) -> None:
    folder = tmp_path / "run"
    train(ids, folder, max_steps=steps)
    before = json.loads((listed(folder / "checkpoints")[-1] / "state.json").read_text())["train"]
    for _ in range(2):
        again = train(ids, folder, **AUTO, max_steps=steps)
        assert again.state["epoch"] == 1
        assert len([entry for entry in again.metrics if entry["event"] == "eval"]) == 1
    after = json.loads((listed(folder / "checkpoints")[-1] / "state.json").read_text())["train"]
    assert after == before
    more = train(ids, folder, **AUTO, max_steps=20)
    assert more.state["step"] == 20
    assert more.state["samples"] == 160


def test_a_folder_of_the_users_is_not_taken_for_a_runs(ids: Path, tmp_path: Path) -> None:
    mine = tmp_path / "project" / "model" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert "holds a run already (model)" in refusal(ids, tmp_path / "project", **AUTO)
    (tmp_path / "project" / "config.yaml").write_text("mine: too")
    assert "holds a run already" in refusal(ids, tmp_path / "project", **AUTO)
    assert mine.read_text() == "precious"


def test_killed_before_the_first_checkpoint_begins_anew(ids: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(ids, folder, epochs=1)
    shutil.rmtree(folder / "checkpoints")
    (folder / "results.json").unlink()
    again = train(ids, folder, **AUTO, epochs=1)
    assert [entry["step"] for entry in again.metrics] == [4, 8, 12, 12]


def test_a_branch_that_stops_at_once_has_a_checkpoint_of_its_own(ids: Path, run_folder: Path, tmp_path: Path) -> None:
    begin = run_folder / "checkpoints" / "step_00000010"
    branch = tmp_path / "branch"
    stopped = train(ids, branch, more=(StopNow(),), resume_from_checkpoint=str(begin))
    assert stopped.interrupted == "SIGTERM"
    assert names(branch) == ["step_00000010"]
    assert train(ids, branch, **AUTO).state["step"] == 36


class StopNow(Hook):
    def on_fit_start(self, run: Run) -> None:
        run.processes.stops.request("SIGTERM")


def test_a_checkpoint_set_aside_knows_its_run(ids: Path, run_folder: Path) -> None:
    folder = run_folder / "checkpoints"
    train(ids, run_folder, resume_from_checkpoint=str(folder / "step_00000010"), max_steps=12)
    aside = folder / "set_aside" / "step_00000030"
    resumed = train(ids, run_folder, resume_from_checkpoint=str(aside), max_steps=31)
    assert resumed.state["step"] == 31
    assert names(run_folder)[-1] == "step_00000031"
    assert not (folder / "metrics.jsonl").exists()


def test_the_model_folder_is_the_users_to_edit(ids: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(ids, folder, epochs=1)
    with (folder / "model" / "config.json").open("a") as file:
        file.write("\n")
    (folder / "model" / ".cache").mkdir()
    assert problem(listed(folder / "checkpoints")[-1]) is None
    assert train(ids, folder, **AUTO, epochs=2).state["epoch"] == 2


def test_what_is_not_finite_is_not_exported_either(ids: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="running_var holds values that are not finite"):
        train(ids, tmp_path / "run", more=(Poison(at=3),))
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run").glob(".model*"))


def test_leftovers_of_killed_saves_go(ids: Path, run_folder: Path) -> None:
    shutil.copytree(run_folder / "checkpoints" / "step_00000035", run_folder / "checkpoints" / ".step_00000037.tmp")
    train(ids, run_folder, **AUTO)
    assert not list((run_folder / "checkpoints").glob(".*"))


def test_a_path_from_inside_the_run(ids: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder / "checkpoints")
    assert run_folder_of(Path("step_00000010")) == run_folder
    assert run_folder_of(Path("set_aside", "step_00000010")) == run_folder
    assert run_folder_of(Path("/somewhere/step_5")) is None
    monkeypatch.chdir(run_folder)
    assert run_folder_of(Path("checkpoints", "step_00000010")) == Path(".")
