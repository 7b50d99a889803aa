"""The Accelerator: precision, threads and DDP's options, as asked for or refused, never silently something else."""

import os
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)

from trainer.comm_hooks import accelerates_hook
from trainer.config import Config
from trainer.cpu import cores
from trainer.runtime import Processes, UserError, env_int, env_true

if TYPE_CHECKING:
    from accelerate.utils import KwargsHandler

FP16_ON_CPU = "TRAINER_FP16_ON_CPU"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")


def build_accelerator(config: Config, processes: Processes) -> Accelerator:
    """The Accelerator of this run, on the process group already joined.

    Raises:
        UserError: a precision that cannot run here, TF32 without CUDA, a parallelism other than DDP, or a tracker that is not installed.
    """
    device = processes.state.device
    precision = requested_precision(config)
    check_precision(precision, device)
    check_launcher(config, processes)
    if config.local_sgd_steps is not None and precision == "fp16":
        raise UserError("--local_sgd_steps cannot go with fp16, whose loss scale would differ between processes: use bf16 or no")
    set_threads(config, processes)
    check_trackers(config)
    if config.tf32 and device.type != "cuda":
        raise UserError("--tf32 needs a CUDA GPU: leave it out")
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32

    handlers: list[KwargsHandler] = [
        DistributedDataParallelKwargs(
            find_unused_parameters=config.find_unused_parameters,
            broadcast_buffers=config.broadcast_buffers,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            comm_hook=accelerates_hook(config, device, scaler=precision == "fp16"),
        )
    ]
    accelerator = Accelerator(
        # An explicit value, 'no' included, would beat the launcher's.
        mixed_precision=config.mixed_precision,
        cpu=device.type == "cpu",
        # The loop accumulates by itself: Accelerate would divide each loss by this number, also in an epoch's short last update.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dataloader_config=DataLoaderConfiguration(non_blocking=device.type == "cuda"),
        dynamo_plugin=compiler(config),
        log_with=list(config.trackers) or None,
        # The output folder is known later.
        project_dir="." if config.trackers else None,
        kwargs_handlers=handlers,
    )
    if precision == "fp16" and device.type == "cpu":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def compiler(config: Config) -> TorchDynamoPlugin | None:
    """What `--compile` asks for; None leaves it to the launcher."""
    if config.compile is None:
        return None
    if config.compile == "no":
        return TorchDynamoPlugin(backend=DynamoBackend.NO)
    return TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, mode=config.compile)


def requested_precision(config: Config) -> str:
    """The flag, else the launcher's, else 'no'.

    Raises:
        UserError: the launcher's is none that Accelerate knows.
    """
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in PRECISIONS:
        raise UserError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, but the launcher says '{precision}'")
    return precision


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that Accelerate would silently replace, or that the hardware lacks.

    Raises:
        UserError: with the reason, and what to use instead.
    """
    if precision == "fp16" and device.type == "cpu" and not env_true(FP16_ON_CPU):
        raise UserError(
            "fp16 needs a GPU, and this run is on the CPU: use --mixed_precision bf16 or no "
            f"(or set {FP16_ON_CPU}=1 to debug fp16 with PyTorch's real but slow CPU arithmetic)"
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"bf16 is not supported by {torch.cuda.get_device_name()}: use --mixed_precision fp16 or no")
    if precision == "fp8":
        reason = "this run is on the CPU"
        if device.type == "cuda":
            reason = "the trainer's ConvNet has no layer that fp8 kernels take: they need linear layers with sizes divisible by 16"
        raise UserError(f"fp8 cannot run here, since {reason}: use --mixed_precision bf16{', fp16' * (device.type == 'cuda')} or no")


def check_launcher(config: Config, processes: Processes) -> None:
    """Refuse what the launcher's config file asks for and the trainer would ignore.

    Raises:
        UserError: another parallelism than DDP, an accumulation that is not the trainer's, or a compiler that Accelerate does not know.
    """
    kind = str(getattr(processes.state.distributed_type, "value", processes.state.distributed_type))
    if kind not in SUPPORTED:
        raise UserError(f"the launcher asks for {kind}, which is not supported: launch with a file of accelerate_configs/")
    if env_int("TORCHELASTIC_MAX_RESTARTS", 0) and config.resume_from_checkpoint is None:
        raise UserError("--max_restarts would begin the training anew after a failure: add --resume auto and --output_dir to go on with it")
    steps = env_int("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)
    if steps not in (1, config.gradient_accumulation_steps):
        raise UserError(
            f"the launcher asks for {steps} gradient accumulation steps, the trainer for {config.gradient_accumulation_steps}: "
            "give --gradient_accumulation_steps after trainer/main.py only"
        )
    backend, known = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"), [member.value.lower() for member in DynamoBackend]
    if backend.lower() not in known:
        raise UserError(
            f"the environment variable ACCELERATE_DYNAMO_BACKEND is '{backend}': it must be one of {', '.join(known)}, or unset"
        )


def check_trackers(config: Config) -> None:
    """Refuse trackers whose package is missing; Accelerate would go on without them, with a warning.

    Raises:
        UserError: with the command that installs them.
    """
    from accelerate.tracking import get_available_trackers

    missing = set(config.trackers) - {str(tracker) for tracker in get_available_trackers()}
    packages = " ".join(name for name in config.trackers if name in missing)
    if missing:
        raise UserError(f"--report_to {config.report_to} needs a package that is not installed: pip install {packages}, or leave it out")


def set_threads(config: Config, processes: Processes) -> None:
    """Give each process its share of the host's cores: `accelerate launch` exports OMP_NUM_THREADS=1, which would use one core."""
    torch.set_num_threads(config.cpu_threads or max(1, cores() // processes.local_count))


def memory_format(config: Config, accelerator: Accelerator) -> torch.memory_format:
    """How images and convolutions lie in memory: `--channels_last`.

    'auto' is a rule, not a measurement at the start of each run, so that a resumed run computes as the one before. On CPUs it was
    measured (benchmarks/speed.py); for GPUs it is what cuDNN's documentation says of tensor cores.
    """
    last = config.channels_last == "on"
    if config.channels_last == "auto":
        last = accelerator.device.type == "cpu" or config.tf32 or accelerator.native_amp
    return torch.channels_last if last else torch.contiguous_format


def describe_precision(accelerator: Accelerator) -> str:
    """What really runs: the autocast dtype that a forward pass sees, and whether a GradScaler is there."""
    with accelerator.autocast():
        kind = accelerator.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    autocast = f"autocast {str(dtype).removeprefix('torch.')}" if dtype else "no autocast"
    scaler = "GradScaler on" if accelerator.scaler is not None else "no GradScaler"
    return f"{accelerator.mixed_precision} ({autocast}, {scaler})"
