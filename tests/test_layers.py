"""Imports go one way, the flags are answered before anything heavy is loaded, and no module hides an installed package."""

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

# From low to high: a module imports lower layers and its own package only.
LAYERS = [
    {"stops", "cpu", "process"},
    {"shared_gather"},
    {"runtime"},
    {"files", "finite", "pace", "plot", "record", "watch", "writer"},
    {"config", "curves", "page", "seeding"},
    {"named", "comm_hooks"},
    {"data", "models", "accelerator", "metrics"},
    {"optim", "ema", "html_report"},
    {"auto_batch"},
    {"state"},
    {"agreement", "local_sgd"},
    {"export"},
    {"inference", "commands"},
    {"hub", "onnx_model"},
    {"checkpoint"},
    {"output"},
    {"hooks"},
    {"loop"},
    {"checks", "lr_finder"},
    {"main", "doctor", "find_lr", "report", "compare", "evaluate", "predict", "to_onnx"},
    {"spawn", "library"},
]
COMMANDS = ("doctor", "find_lr", "report", "compare", "evaluate", "predict", "to_onnx")
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted((ROOT / "trainer").rglob("*.py"))}
FILES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def imports(path: Path) -> set[str]:
    """The trainer's modules that a file imports anywhere, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else str(node.module) for name in names}
    assert found <= FILES.keys() | {name for name in found if name.partition(".")[0] != "trainer"}, "a module that does not exist"
    return {name for name in found if name in FILES}


GRAPH = {name: imports(path) for name, path in FILES.items()}


def layer(name: str) -> str:
    return name.split(".")[1]


def test_every_module_has_a_layer() -> None:
    assert {layer(name) for name in FILES if name != "trainer"} == HEIGHT.keys()


def test_the_graph_is_not_empty() -> None:
    assert GRAPH["trainer.config"] == {"trainer.runtime"}
    assert {"trainer.hooks.log", "trainer.loop", "trainer.state"} <= GRAPH["trainer.main"], "imports inside functions count"


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"trainer"}))
def test_imports_point_down(name: str) -> None:
    wrong = {other for other in GRAPH[name] if layer(other) != layer(name) and HEIGHT[layer(other)] >= HEIGHT[layer(name)]}
    assert not wrong


def test_no_cycles() -> None:
    order = list(TopologicalSorter(GRAPH).static_order())
    assert order.index("trainer.runtime") < order.index("trainer.state") < order.index("trainer.loop") < order.index("trainer.main")


def test_nobody_but_spawn_and_the_library_imports_a_command() -> None:
    assert [name for name, others in GRAPH.items() if "trainer.main" in others] == ["trainer.library", "trainer.spawn"]
    assert not [name for name, others in GRAPH.items() if {f"trainer.{name}" for name in ("spawn", *COMMANDS)} & others]
    assert [name for name, others in GRAPH.items() if "trainer.library" in others] == ["trainer"]


def test_hooks_do_not_know_each_other() -> None:
    for name, others in GRAPH.items():
        if layer(f"{name}.") == "hooks":
            assert {other for other in others if layer(other) == "hooks"} <= {"trainer.hooks.base"}, name


def test_checks_do_not_know_each_other() -> None:
    """They share the base and the ways to read a loader; only the table in checks/__init__.py names them all."""
    shared = {f"trainer.checks.{name}" for name in ("base", "loaders", "preserve")}
    table = {name for name in GRAPH["trainer.checks"] if name not in shared}
    assert len(table) >= 14
    for name in table:
        assert {other for other in GRAPH[name] if layer(other) == "checks"} <= shared, name


@pytest.mark.parametrize("module", ["config", "main", "doctor", "find_lr"])
def test_flags_are_parsed_without_anything_heavy(module: str) -> None:
    code = (
        f"import sys, trainer.{module}\n"
        "from trainer.config import parse\n"
        "parse(['--config', 'mnist', '--epochs', '1'])\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "accelerate", "datasets", "PIL", "pyarrow", "rich"} & set(loaded)
    assert "jsonargparse" in loaded


def test_digits_are_trained_without_torchvision(tmp_path: Path) -> None:
    """It takes a second to import, and is needed for presets of augmentation and models that are asked for only."""
    code = (
        "import sys\n"
        "from trainer.main import main\n"
        f"main(['--max_steps', '1', '--augment', 'light', '--random_erasing', '0.1', '--output_dir', {str(tmp_path / 'run')!r}])\n"
        "print('torchvision' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


def test_no_module_hides_a_package() -> None:
    """`python trainer/main.py` starts with trainer/ at the head of sys.path."""
    for name in ("datasets", "trainer.loop", "trainer.output"):
        importlib.import_module(name)
    packages = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
    assert {"torch", "datasets", "logging", "types"} <= packages
    assert not {path.stem for path in (ROOT / "trainer").iterdir()} - {"__init__", "__pycache__"} & packages
