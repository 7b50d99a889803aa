"""Every way of launching in the README's table, with real processes: what was asked for is what runs, and is said once."""

import re
import shutil
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.helpers import ROOT
from tests.launching import ACCELERATE, CONFIGS, MAIN, Launch, Pick, answer_wizard, finish, launch, script, started
from tests.ranks import free_port
from trainer.accelerator import FP16_ON_CPU
from trainer.models.convnet import ConvNet

# The defaults may move; what these tests count may not.
STEPS = ("--epochs", "1", "--max_steps", "3", "--batch_size", "32")
IMPORTABLE = {"PYTHONPATH": str(ROOT)}

# file: processes of all hosts, hosts, precision, Accelerate's name for it, on the CPU
FILES: dict[str, tuple[int, int, str, str, bool]] = {
    "cpu": (1, 1, "no", "NO", True),
    "multi_cpu": (2, 1, "no", "MULTI_GPU", True),
    "single_gpu_fp16": (1, 1, "fp16", "NO", False),
    "multi_gpu_fp16": (2, 1, "fp16", "MULTI_GPU", False),
    "multi_gpu_bf16": (2, 1, "bf16", "MULTI_GPU", False),
    "multi_gpu_fp32": (2, 1, "no", "MULTI_GPU", False),
    "multi_node_fp16": (4, 2, "fp16", "MULTI_GPU", False),
}

# What `accelerate config` asks, on a machine without GPU.
THIS_MACHINE = ("In which compute environment", Pick("This machine"))
MULTI_GPU: Sequence[tuple[str, str | Pick]] = (
    THIS_MACHINE,
    ("Which type of machine", Pick("multi-GPU", "4")),
    ("How many different machines", ""),
    ("Should distributed operations be checked", ""),
    ("torch dynamo?", ""),
    ("use DeepSpeed?", ""),
)

SPAWN = """
import sys

import torch

from trainer.spawn import spawned

if __name__ == "__main__":
    torch.multiprocessing.spawn(spawned, args=(2, sys.argv[2:], int(sys.argv[1])), nprocs=2)
"""
NOTEBOOK = """
import sys

from accelerate import notebook_launcher

from trainer.main import main

notebook_launcher(main, (sys.argv[2:],), num_processes=2, use_port=sys.argv[1])
"""
DEBUG = """
import sys

from accelerate import debug_launcher

from trainer.main import main

# It has no choice of port: its processes meet through a file.
debug_launcher(main, (sys.argv[2:],), num_processes=2)
"""
PROGRAMS = {"spawn": SPAWN, "notebook_launcher": NOTEBOOK, "debug_launcher": DEBUG}


def launch_program(folder: Path, program: str, port: int) -> Launch:
    return launch(folder, "python", script(folder, program), str(port), *STEPS, variables=IMPORTABLE)


def config_file(name: str) -> tuple[str, str]:
    return "--config_file", str(CONFIGS / f"{name}.yaml")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(tmp_path_factory.mktemp("one"), "accelerate", "launch", MAIN, *STEPS)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(tmp_path_factory.mktemp("two"), "torchrun", "--nproc_per_node", "2", MAIN, *STEPS)


@pytest.fixture(scope="module")
def multi_cpu(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(tmp_path_factory.mktemp("multi_cpu"), *ACCELERATE, *config_file("multi_cpu"), MAIN, *STEPS)


def assert_ran(launched: Launch, processes: str, updates_an_epoch: int, global_batch: int) -> None:
    """It trained on so many processes, which knew of each other, and said everything once."""
    assert launched.code == 0, launched.errors
    assert launched.sentences() == []
    assert "terminate called" not in launched.errors
    assert launched.row("processes") == processes
    assert launched.row("updates") == f"3 ({updates_an_epoch} an epoch, 1 epochs)"
    results = launched.json("results.json")
    assert (results["step"], results["samples"], results["evaluated_samples"]) == (3, 3 * global_batch, 1000)
    assert launched.json("exit.json")["code"] == 0
    said = [line for line in launched.lines if not line.startswith("Launching training on")]
    assert said == (launched.output_dir / "train.log").read_text(encoding="utf-8").splitlines()
    assert set(Counter(said).values()) == {1}
    assert [line.split()[0] for line in said[-3:]] == ["train", "eval", "done"]


def assert_ran_alone(launched: Launch) -> None:
    assert_ran(launched, "1", 125, 32)


def assert_ran_on_two(launched: Launch) -> None:
    assert_ran(launched, "2, backend gloo", 63, 64)
    assert launched.row("sync_bn") == "on (2 layers)"
    assert launched.row("batch") == "32 a process x 2 processes x 1 accumulation = global batch 64"


def assert_same_training(launched: Launch, other: Launch) -> None:
    assert launched.json("results.json")["loss"] == pytest.approx(other.json("results.json")["loss"], rel=1e-4)


def assert_refused(launched: Launch, sentence: str, code: int) -> None:
    """One sentence, a failing exit code, no traceback through the trainer, and nothing written."""
    assert launched.code == code, launched.errors
    assert len(launched.sentences()) == 1, launched.errors
    assert launched.sentences()[0].startswith("error: ")
    assert sentence in launched.sentences()[0]
    assert launched.frames() == [], launched.errors
    assert launched.lines == []
    assert not launched.output_dir.exists()


def test_accelerate_launch_without_a_config_file_is_one_process(one_process: Launch) -> None:
    assert_ran_alone(one_process)
    assert one_process.row("device").startswith("cpu, ")
    assert one_process.row("precision") == "no (no autocast, no GradScaler)"
    assert one_process.row("compile") == "no"
    assert one_process.row("sync_bn") == "off"


def test_the_table_holds_every_config_file() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_accelerate_accepts_the_config_file(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))
    found = (config.num_processes, config.num_machines, config.mixed_precision, config.distributed_type.value, config.use_cpu)
    assert found == FILES[name]
    comment = path.read_text(encoding="utf-8").splitlines()[:2]
    assert comment[0].startswith("# For ")
    assert comment[1] == f"# accelerate launch --config_file accelerate_configs/{name}.yaml trainer/main.py"


def test_torchrun_starts_two_ranks(two_processes: Launch, one_process: Launch) -> None:
    assert_ran_on_two(two_processes)
    assert two_processes.row("precision") == "no (no autocast, no GradScaler)"
    losses = [launched.json("results.json")["loss"] for launched in (one_process, two_processes)]
    assert abs(losses[0] - losses[1]) > 1e-2, "twice the images an update train a different model"


def test_multi_cpu_file_starts_two_ranks(multi_cpu: Launch, two_processes: Launch) -> None:
    assert_ran_on_two(multi_cpu)
    assert_same_training(multi_cpu, two_processes)


@pytest.mark.parametrize("options", [(), ("--use-env",)], ids=["local-rank", "use-env"])
def test_torch_distributed_launch_starts_two_ranks(options: tuple[str, ...], tmp_path: Path, two_processes: Launch) -> None:
    command = ("python", "-m", "torch.distributed.launch", "--nproc_per_node=2", *options)
    launched = launch(tmp_path, *command, MAIN, *STEPS)
    assert_ran_on_two(launched)
    assert_same_training(launched, two_processes)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_start_two_ranks(program: str, tmp_path: Path, two_processes: Launch) -> None:
    launched = launch_program(tmp_path, program, free_port())
    assert_ran_on_two(launched)
    assert_same_training(launched, two_processes)


def test_cpu_file_is_one_process(tmp_path: Path, one_process: Launch) -> None:
    """Word for word as in the README, from the clone's root."""
    command = ("accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml", "trainer/main.py")
    launched = launch(tmp_path, *command, *STEPS, cwd=ROOT)
    assert_ran_alone(launched)
    assert launched.row("device").startswith("cpu, ")
    assert_same_training(launched, one_process)


def test_the_gpu_files_differ_in_precision_alone() -> None:
    files = [yaml.safe_load((CONFIGS / f"multi_gpu_{name}.yaml").read_text(encoding="utf-8")) for name in ("fp32", "bf16", "fp16")]
    assert [file.pop("mixed_precision") for file in files] == ["no", "bf16", "fp16"]
    assert files[0] == files[1] == files[2]


def with_precision(folder: Path, precision: str) -> Launch:
    """A launch with the two-process file of a machine without GPU, where only `mixed_precision` is another."""
    text = (CONFIGS / "multi_cpu.yaml").read_text(encoding="utf-8")
    assert text.count("mixed_precision: 'no'") == 1
    file = folder / "changed.yaml"
    file.write_text(text.replace("mixed_precision: 'no'", f"mixed_precision: '{precision}'"), encoding="utf-8")
    return launch(folder, *ACCELERATE, "--config_file", file, MAIN, *STEPS)


def test_only_mixed_precision_changed(tmp_path: Path, multi_cpu: Launch) -> None:
    bf16 = with_precision(tmp_path, "bf16")
    assert_ran_on_two(bf16)
    changed = [pair for pair in zip(multi_cpu.block(), bf16.block(), strict=True) if pair[0] != pair[1]]
    assert changed == [(" precision no (no autocast, no GradScaler)", " precision bf16 (autocast bfloat16, no GradScaler)")]
    assert (multi_cpu.output_dir / "config.yaml").read_bytes() == (bf16.output_dir / "config.yaml").read_bytes()
    assert [run.json("model/config.json")["precision"] for run in (multi_cpu, bf16)] == ["no", "bf16"]
    losses = [run.json("results.json")["loss"] for run in (multi_cpu, bf16)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


NO_FP16 = "fp16 needs a GPU, and this run is on the CPU: use --mixed_precision bf16 or no"


def test_mixed_precision_changed_to_fp16_is_refused(tmp_path: Path) -> None:
    assert_refused(with_precision(tmp_path, "fp16"), NO_FP16, 1)


def test_the_file_of_one_fp16_gpu_is_refused(tmp_path: Path) -> None:
    assert_refused(launch(tmp_path, "accelerate", "launch", *config_file("single_gpu_fp16"), MAIN, *STEPS), NO_FP16, 1)


def test_the_headline_file_trains_in_real_fp16(tmp_path: Path) -> None:
    """Slow arithmetic, so tiny batches; the first scale overflows on them, which costs updates that count as skipped."""
    command = (*ACCELERATE, *config_file("multi_gpu_fp16"), MAIN, "--max_steps", "1", "--batch_size", "2")
    launched = launch(tmp_path, *command, variables={FP16_ON_CPU: "1"})
    assert launched.code == 0, launched.errors
    assert launched.row("processes") == "2, backend gloo"
    assert launched.row("precision") == "fp16 (autocast float16, GradScaler on)"
    results = launched.json("results.json")
    assert (results["step"], results["samples"], results["evaluated_samples"]) == (1, 4, 1000)
    assert results["scale"] == 65536 / 2 ** results["skipped"]
    assert launched.json("model/scaler.json")["scale"] == results["scale"]


def test_two_hosts(tmp_path: Path, two_processes: Launch) -> None:
    """The multi-node file with both launchers on this machine: one process each, its address, and no fp16."""
    options = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--num_processes", "2", "--mixed_precision", "no")
    command = ("accelerate", "launch", *config_file("multi_node_fp16"), *options)
    # As many as two processes of one host have: another number adds in another order.
    flags = (MAIN, *STEPS, "--output_dir", "run", "--cpu_threads", "1")
    with (
        started(*command, "--machine_rank", "0", *flags, cwd=tmp_path) as first,
        started(*command, "--machine_rank", "1", *flags, cwd=tmp_path) as second,
    ):
        launched, other = finish(first, tmp_path / "run"), finish(second, tmp_path / "run")
    assert_ran_on_two(launched)
    assert_same_training(launched, two_processes)
    assert other.code == 0, other.errors
    assert other.lines == []


def test_wizard_for_two_gpus_and_bf16(tmp_path: Path) -> None:
    answers = (
        *MULTI_GPU,
        ("use FullyShardedDataParallel?", ""),
        ("use Megatron-LM ?", ""),
        ("How many GPU(s) should be used", "2"),
        ("What GPU(s) (by id)", ""),
        ("numa efficiency", ""),
        ("Do you wish to use mixed precision?", Pick("bf16", "2")),
    )
    written = yaml.safe_load(answer_wizard(tmp_path, answers).read_text(encoding="utf-8"))
    assert (written["distributed_type"], written["num_processes"], written["mixed_precision"]) == ("MULTI_GPU", 2, "bf16")
    assert written == yaml.safe_load((CONFIGS / "multi_gpu_bf16.yaml").read_text(encoding="utf-8"))
    launched = launch(tmp_path, *ACCELERATE, MAIN, *STEPS, variables={"HF_HOME": str(tmp_path)})
    assert_ran_on_two(launched)
    assert launched.row("precision") == "bf16 (autocast bfloat16, no GradScaler)"


def test_wizard_for_two_cpus_and_dynamo(tmp_path: Path, one_process: Launch) -> None:
    """Accelerate starts one process for multi-CPU, whatever was answered: what counts is that the trainer says 1."""
    answers: Sequence[tuple[str, str | Pick]] = (
        THIS_MACHINE,
        ("Which type of machine", Pick("multi-CPU", "1")),
        ("How many different machines", ""),
        ("Should distributed operations be checked", ""),
        ("launch mpirun?", ""),
        ("torch dynamo?", "yes"),
        ("Which dynamo backend", Pick("eager", "0")),
        ("customize the defaults sent to torch.compile?", ""),
        ("How many processes should be used", "2"),
        ("Do you wish to use mixed precision?", Pick("no")),
    )
    written = yaml.safe_load(answer_wizard(tmp_path, answers).read_text(encoding="utf-8"))
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_CPU", 2)
    assert written["dynamo_config"] == {"dynamo_backend": "EAGER"}
    launched = launch(tmp_path, "accelerate", "launch", MAIN, *STEPS, variables={"HF_HOME": str(tmp_path)})
    assert_ran_alone(launched)
    assert launched.row("compile") == "dynamo backend eager"
    assert_same_training(launched, one_process)
    assert load_file(launched.output_dir / "model" / "model.safetensors").keys() == plain_keys()


def plain_keys() -> Any:
    return ConvNet(1, (28, 28), 10).state_dict().keys()


def test_dynamo_on_two_ranks(tmp_path: Path, two_processes: Launch) -> None:
    launched = launch(tmp_path, *ACCELERATE, *config_file("multi_cpu"), "--dynamo_backend", "eager", MAIN, *STEPS)
    assert_ran_on_two(launched)
    assert launched.row("compile") == "dynamo backend eager"
    assert_same_training(launched, two_processes)
    assert load_file(launched.output_dir / "model" / "model.safetensors").keys() == plain_keys()


def test_wizard_for_fsdp_is_refused_by_name(tmp_path: Path) -> None:
    answers = (
        *MULTI_GPU,
        ("use FullyShardedDataParallel?", "yes"),
        ("What should be your FSDP version?", Pick("2")),
        ("resharding after forward?", ""),
        ("offload parameters and gradients to CPU?", ""),
        ("What should be your auto wrap policy?", Pick("SIZE_BASED_WRAP", "1")),
        ("minimum number of parameters", ""),
        ("state dict type?", Pick("SHARDED_STATE_DICT")),
        ("CPU RAM efficient model loading?", ""),
        ("FSDP activation checkpointing?", ""),
        ("use the parallelism config?", ""),
        ("How many GPU(s) should be used", "2"),
        ("Do you wish to use mixed precision?", Pick("no")),
    )
    written = yaml.safe_load(answer_wizard(tmp_path, answers).read_text(encoding="utf-8"))
    assert (written["distributed_type"], written["num_processes"]) == ("FSDP", 2)
    assert_refused(launch(tmp_path, *ACCELERATE, MAIN, variables={"HF_HOME": str(tmp_path)}), "FSDP is not supported", 1)


@pytest.mark.parametrize(
    ("variable", "engine"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
    ],
)
def test_another_engine_is_refused_by_name(variable: str, engine: str, tmp_path: Path) -> None:
    assert_refused(launch(tmp_path, "python", MAIN, variables={variable: "true"}), f"{engine} is not supported", 2)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A clone that is nowhere installed: it says on stderr that it, and no installed one, is imported."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "trainer", root / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    package = root / "trainer" / "__init__.py"
    package.write_text(package.read_text(encoding="utf-8") + "\nimport sys\n\nprint('the copy', file=sys.stderr)\n", encoding="utf-8")
    return root


def test_python_from_another_folder(copy: Path, tmp_path: Path, one_process: Launch) -> None:
    launched = launch(tmp_path, "python", copy / "trainer" / "main.py", *STEPS)
    assert_ran_alone(launched)
    assert launched.errors.count("the copy") == 1, launched.errors
    assert_same_training(launched, one_process)


def test_python_m_from_the_root(copy: Path, tmp_path: Path, one_process: Launch) -> None:
    launched = launch(tmp_path, "python", "-m", "trainer.main", *STEPS, cwd=copy)
    assert_ran_alone(launched)
    assert launched.errors.count("the copy") == 1, launched.errors
    assert_same_training(launched, one_process)


def test_spawn_names_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched = launch_program(tmp_path, SPAWN, port)
    assert_refused(launched, f"the port of 127.0.0.1:{port} is in use by another program", 1)


def test_a_world_that_nobody_started_is_refused(tmp_path: Path) -> None:
    """Waiting for its other process would last half an hour."""
    launched = launch(tmp_path, "python", MAIN, variables={"WORLD_SIZE": "2"})
    assert_refused(launched, "WORLD_SIZE is 2, but RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not set", 2)


def test_the_tutorials_gpu_flag_is_answered(tmp_path: Path) -> None:
    launched = launch(tmp_path, "python", MAIN, "--gpu", "0,1")
    assert_refused(launched, "`accelerate launch --gpu_ids 0,1 trainer/main.py`", 2)


def test_two_ranks_refuse_a_bad_flag_once(tmp_path: Path) -> None:
    launched = launch(tmp_path, "torchrun", "--nproc_per_node", "2", MAIN, "--epohcs", "1")
    assert_refused(launched, "unknown flag --epohcs: did you mean --epochs?", 1)
    # The last entry of torchrun's own table of failures is the first rank that failed: there stands the code that it turned into 1.
    assert re.findall(r"exitcode\s*: (-?\d+)", launched.errors)[-1] == "2", launched.errors
