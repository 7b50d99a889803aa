"""The README says what is there, and its commands and examples are run as they stand."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.launching import launch
from tests.ranks import free_port
from trainer.main import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CHANGES = {re.findall(r"# change: (\w+\.py)", block)[0]: block for block in BLOCKS if block.startswith("# change: ")}
PYTHON_BLOCKS = [block for block in BLOCKS if "inspect(" not in block and "load_model(" not in block and block not in CHANGES.values()]


def command(name: str) -> str:
    found = re.search(rf"<!-- command: {name} -->\n```sh\n(.*)\n```", README)
    assert found is not None
    return found[1]


def test_ci_takes_its_commands_from_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^command_of\(\).*?^}$", ci, re.DOTALL | re.MULTILINE)
    assert function is not None
    for name in ("train", "test"):
        assert f"$(command_of {name})" in ci
        found = subprocess.run(["bash", "-c", f"{function[0]}\ncommand_of {name}"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == command(name)
    assert "pip install" not in ci
    assert "pytest" not in ci


def test_the_commands_are_one_line_each() -> None:
    assert command("train").startswith("pip install -e .")
    assert command("train").endswith("accelerate launch trainer/main.py")
    assert command("test").endswith("pytest")


def test_every_file_is_in_its_table() -> None:
    for file in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"| `{file.name}` |" in README
        head = file.read_text(encoding="utf-8").splitlines()
        assert head[0].startswith("# ")
        assert head[1] == f"# accelerate launch --config_file accelerate_configs/{file.name} trainer/main.py"
    for file in (ROOT / "trainer" / "recipes").glob("*.yaml"):
        assert f"(trainer/recipes/{file.name})" in README
        assert f"--config {file.stem}" in file.read_text(encoding="utf-8"), "a recipe is headed by its command"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_examples_run_on_two_processes(tmp_path: Path, number: int) -> None:
    program = tmp_path / "example.py"
    program.write_text(PYTHON_BLOCKS[number], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("processes 2, backend gloo") == 1
    assert run.stdout.count("eval  epoch 1/1") == 1


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_there_are_examples() -> None:
    assert len(PYTHON_BLOCKS) == 2
    assert CHANGES.keys() == EXPECTED.keys()
    assert len(BLOCKS) == 4 + len(CHANGES)


def test_what_comes_after_training(tmp_path: Path) -> None:
    """As they stand, from a clone's root, on a run in runs/mine."""
    import datasets

    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    (tmp_path / "photos").mkdir()
    digits = datasets.Dataset.from_parquet(str(ROOT / "trainer" / "data" / "mnist5k" / "test.parquet")).cast_column(
        "image", datasets.Image(decode=False)
    )
    (tmp_path / "photos" / "seven.png").write_bytes(digits[0]["image"]["bytes"])
    main(["--max_steps", "20", "--output_dir", "runs/mine"])
    found = re.search(r"<!-- commands: after -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert found is not None
    outputs = []
    for line in found[1].splitlines():
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        run = subprocess.run(
            ["bash", "-c", line], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=180, check=False
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    accuracy = json.loads((tmp_path / "runs" / "mine" / "results.json").read_text())["acc1"]
    assert outputs[0].startswith(f"eval  runs/mine/model acc1 {accuracy:.2f} ")
    assert outputs[1].splitlines()[1].startswith("photos/seven.png")
    assert (tmp_path / "mine.onnx").is_file()
    (example,) = (block for block in BLOCKS if "load_model(" in block)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["probabilities"].shape == (1, 10)
    assert float(names["probabilities"].detach().sum()) == pytest.approx(1, abs=1e-5)


# What each example of "Change it" prints, once.
EXPECTED = {
    "worst.py": [r"worst class: \d"],
    "net.py": [r"model __main__:net, 51,018 parameters", r"eval  epoch 1/1 .*"],
    "shades.py": [r"data __main__:shades: 512 train / 512 test, 2 classes, images 1 x 8 x 8, .*", r"eval  epoch 1/1 .*"],
    "search.py": [r"0\.001 \d+\.\d+ runs/mnist5k-.*", r"0\.01 \d+\.\d+ runs/mnist5k-.*"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_changed_works_as_a_script(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(CHANGES[name], encoding="utf-8")
    lines = python(tmp_path, name)
    for pattern in EXPECTED[name]:
        assert len([line for line in lines if re.fullmatch(pattern, line.strip())]) == 1, (pattern, lines)


def test_what_is_changed_works_by_its_flags(tmp_path: Path) -> None:
    """All three at once, on two processes, as the examples' first lines say."""
    flags: list[str] = []
    for name, block in CHANGES.items():
        (tmp_path / name).write_text(block, encoding="utf-8")
        flags += re.findall(r"trainer/main.py (.*)", block.splitlines()[0])
    assert len(flags) == 3
    words = [*" ".join(flags).split(), "--epochs", "1"]
    port = ["--master_port", str(free_port())]
    lines = python(tmp_path, "-m", "torch.distributed.run", "--nproc_per_node", "2", *port, "-m", "trainer.main", *words)
    assert len([line for line in lines if re.fullmatch(r"worst class: (dark|light)", line)]) == 1
    assert len([line for line in lines if "model net:net, " in line]) == 1
    assert len([line for line in lines if "data shades:shades: 512 train" in line]) == 1
    assert "processes 2, backend gloo" in "\n".join(lines)


def python(folder: Path, *words: str) -> list[str]:
    """The output of `python WORDS` in `folder`."""
    run = subprocess.run([sys.executable, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("forgotten", ["", "        start_epoch=sampler.set_epoch,\n"], ids=["as it stands", "without set_epoch"])
def test_the_doctor_inspects_the_readmes_script(tmp_path: Path, forgotten: str) -> None:
    (example,) = (block for block in BLOCKS if "inspect(" in block)
    assert forgotten in example
    program = tmp_path / "script.py"
    program.write_text(example.replace(forgotten, ""), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), str(program)]
    run = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    assert (run.returncode == 0) == (not forgotten), run.stderr
    failed = [line.split()[0] for line in run.stdout.splitlines() if " FAIL " in line]
    assert failed == (["order"] if forgotten else [])
    assert re.search(rf"doctor: \d+ passed, {len(failed)} failed, 1 skipped in", run.stdout), run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_built_wheel_holds_recipes_and_data_and_trains(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy_of_the_sources(tmp_path))]
    subprocess.run(build, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("accelerate_trainer-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    for file in (
        "recipes/mnist.yaml",
        "recipes/mnist5k.yaml",
        "recipes/tutorial.yaml",
        "data/mnist5k/train.parquet",
        "data/mnist5k/test.parquet",
    ):
        assert f"trainer/{file}" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    done = launch(
        tmp_path,
        "python",
        "-m",
        "trainer.main",
        "--config",
        "mnist5k",
        "--max_steps",
        "2",
        variables={"PYTHONPATH": str(tmp_path / "installed")},
    )
    assert done.code == 0, done.errors
    assert done.json("results.json")["step"] == 2


def copy_of_the_sources(folder: Path) -> Path:
    """Building writes beside the sources; a clone's own must stay as they are."""
    copy = folder / "sources"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in files or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".git" not in path.parts]:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return copy
