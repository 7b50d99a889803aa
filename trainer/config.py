"""Every knob, once: a field here is a flag on the command line and a key in a recipe.

The four groups are the sections of `--help`. Hardware, number of processes and precision are not knobs of the trainer: they belong
to `accelerate launch` and its config file (accelerate_configs/); `--mixed_precision` only overrides.
"""

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.runtime import Processes, UserError, env_int

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DATASET = "mnist5k"
RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    dataset: str = DATASET
    """mnist5k (embedded, no network), mnist (the Hub's ylecun/mnist), another id of the Hub, or a local folder or file: images in class
    folders, Parquet, Arrow, or CSV or JSON with a column of image paths; or package.module:function, a function of one's own that returns
    a datasets.DatasetDict, or a dict of datasets.Dataset by the names of the splits"""
    dataset_config: str | None = None
    """the configuration of a --dataset that has several; unset: its only one"""
    data_dir: str | None = None
    """instead of --dataset: a folder of class folders, FOLDER/train/CLASS and FOLDER/val/CLASS, or FOLDER/CLASS with --val_fraction; unset:
    --dataset"""
    train_split: str | None = None
    """the split to train on; unset: train"""
    eval_split: str | None = None
    """the split to evaluate on; unset: found among test, validation, valid, val, eval, dev"""
    val_fraction: float | None = None
    """share, within 0..1, of the training images of each class that is held out for evaluation, where there is no split for it; fixed by
    --seed; unset: none"""
    image_column: str | None = None
    """the column that holds images, or paths of images; unset: found by its name or type"""
    label_column: str | None = None
    """the column that holds classes: whole numbers or texts; unset: found by its name or type"""
    image_size: str | None = None
    """N or HEIGHTxWIDTH, pixels: what all images are cut and resized to; unset: the size that they have, all the same"""
    channels: Literal["auto", "1", "3"] = "auto"
    """1: grey, 3: colour; 'auto': grey when 64 training images, spread over the split, are all grey"""
    on_bad_image: Literal["error", "skip"] = "error"
    """an image that cannot be read ends the run ('error'), or another one is trained on instead, and it is left out of the evaluation, and
    counted ('skip'); the doctor names them all"""
    batch_size: int | None = None
    """images a process takes through the model at once; unset: 32, or what --global_batch_size asks for (short: -b)"""
    global_batch_size: int | None = None
    """images of one update = batch size x processes x accumulation; keeps training the same for any number of processes; unset:
    whatever the product is"""
    auto_batch_size: bool = False
    """where the batch does not fit into memory, take smaller ones, the same on all ranks, and more --gradient_accumulation_steps, so that
    an update has the same images"""
    eval_batch_size: int | None = None
    """images a process evaluates at once; unset: 125; of images up to 32 x 32 pixels 250, with fp16 or bf16 1000"""
    normalize: Literal["dataset", "none", "imagenet"] = "dataset"
    """pixels: 'dataset' subtracts the train split's mean and divides by its standard deviation, of at most 5,000 images spread over it,
    'imagenet' does so with ImageNet's, which published weights expect, 'none' only scales to 0..1"""
    augment: Literal["none", "light", "trivialaugment", "randaugment"] = "none"
    """of training images: 'light' mirrors, and shifts by up to an eighth of the side or, where images are resized, takes a random part of
    35 to 100 % of the area; 'trivialaugment' and 'randaugment' add torchvision's"""
    hflip: float = 0.5
    """probability, 0..1, that --augment mirrors an image left to right; 0 for digits and letters"""
    random_erasing: float = 0.0
    """probability, 0..1, that a box of 2 to 33 % of a training image is painted over with the mean colour"""
    cache: Literal["auto", "device", "ram", "none"] = "auto"
    """decoded images: kept on the training device ('device'; on a CPU the same as 'ram'), in memory ('ram'), decoded each time
    ('none'); 'auto': the first of these three that fits into a quarter of the GPU's free memory, or half of the host's"""
    streaming: bool = False
    """read the images from Parquet files, local or of the Hub, when they are needed, instead of copying the data set to this disk
    first: for sets larger than the disk"""
    shuffle_buffer: int = 1000
    """--streaming: images that the order of an epoch mixes at a time, beside those of the same row group; more of them take more memory"""
    num_workers: int = 0
    """worker processes that load data, for each training process; 0: the training process itself"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and numerics"""

    model: str = "convnet"
    """convnet (the tutorials'), a classification model of torchvision (resnet18, vit_b_16 ...), or package.module:factory, a function or
    class of one's own that takes any of in_channels, size (height, width) and num_classes by name"""
    weights: str = "none"
    """what the model starts from: none (random), a file (an exported model folder, .safetensors, or a state dict .pth), or a name of
    torchvision's for the model (DEFAULT, IMAGENET1K_V1 ...); a classifier for another number of classes is left out"""
    freeze: Literal["none", "backbone"] = "none"
    """'backbone': only the classifier is trained; all else, BatchNorm's statistics too, stays as it is"""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """memory format of images and convolutions; 'auto' is 'on' where it was measured or is known to be faster: on CPUs, and on GPUs
    with fp16, bf16 or --tf32"""
    compile: Literal["no", "default", "reduce-overhead", "max-autotune"] | None = None
    """torch.compile's mode; 'reduce-overhead' replays CUDA graphs; --compile alone is 'default'; unset: what the launcher says"""
    sync_bn: Literal["auto", "on", "off"] = "auto"
    """BatchNorm over the images of all processes; 'auto' is 'on' when there is more than one process"""
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None
    """overrides the launcher's precision; unset: what `accelerate launch` or its config file says; fp16 on a CPU only with the environment
    variable TRAINER_FP16_ON_CPU=1 (real, but slow: to debug)"""
    tf32: bool = False
    """TensorFloat-32 for fp32 matrix products and convolutions on CUDA: faster, with 10 bits of mantissa"""
    cpu_threads: int | None = None
    """threads of a process on the CPU; unset: the cores shared by the processes of the host"""
    find_unused_parameters: bool = False
    """DDP: search each backward pass for parameters without gradient; only for models that leave some out"""
    broadcast_buffers: bool = True
    """DDP: send rank 0's buffers to all ranks: BatchNorm statistics, if there are no others, before each evaluation, which is where they
    count; else at each forward pass"""
    gradient_as_bucket_view: bool = False
    """DDP: let gradients share memory with the communication buckets; saves one copy of the gradients"""
    static_graph: bool = False
    """DDP: promise that every iteration uses the same parameters"""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """what gradients become on their way between processes: rounded to fp16 or bf16 (half the bytes), or products of two thin matrices
    ('powersgd', a few hundredths of them); for slow networks: the gradients are not exact any more"""
    powersgd_rank: int = 1
    """--comm_hook powersgd: columns of the two matrices; more of them are nearer to the gradient, and take more bytes"""
    powersgd_start: int = 1000
    """--comm_hook powersgd: updates before it, with whole gradients, which move the most in the beginning"""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimisation"""

    epochs: int = 10
    """passes over the train split (short: -e)"""
    max_steps: int | None = None
    """end after this many updates, with an evaluation; unset: after all epochs"""
    optimizer: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta"] = "adamw"
    """torch.optim's class of that name, with its own defaults for what has no flag here"""
    lr: float = 5e-3
    """peak learning rate"""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """multiply the rate by processes x accumulation ('linear'), by its square root ('sqrt'), or not at all"""
    momentum: float = 0.9
    """of sgd and rmsprop, 0..1"""
    nesterov: bool = False
    """Nesterov's momentum, of sgd"""
    weight_decay: float = 0.5
    """as the optimizer defines it: decoupled from the gradient for adamw, an L2 penalty for the others"""
    weight_decay_1d: bool = True
    """weight decay for biases and normalisation weights too (all parameters of one dimension); false: only for the others"""
    lr_scheduler: Literal["constant", "linear", "cosine", "step", "one_cycle", "plateau"] = "cosine"
    """after warm-up the rate stays; falls to --min_lr over all updates, in a line or a half cosine; is multiplied by --lr_gamma, every
    --lr_step_epochs ('step') or when the test loss has stopped falling ('plateau'); or warm-up is a half cosine too, from 1/25 of the rate,
    and the fall goes to 1/10000 ('one_cycle')"""
    warmup_epochs: float = 0.3
    """epochs over which the rate rises from 0, in a line"""
    lr_step_epochs: int = 30
    """epochs between two falls of the rate, counted from the first one on, for 'step'"""
    lr_gamma: float = 0.1
    """what each fall multiplies the rate by, 0..1, for 'step' and 'plateau'"""
    plateau_patience: int = 10
    """epochs in a row without a lower test loss that make the rate fall, for 'plateau'"""
    min_lr: float = 0.0
    """learning rate that the fall ends at"""
    local_sgd_steps: int | None = None
    """each process updates by its own gradients, and after this many updates, and at an epoch's end, all take the mean of their weights,
    BatchNorm statistics and optimizer states; checkpoints and stops come then; unset: gradients are averaged at each update"""
    gradient_accumulation_steps: int = 1
    """forward and backward passes of a process for one update"""
    max_grad_norm: float | None = None
    """clip the gradient of an update to this L2 norm; unset: no clipping"""
    label_smoothing: float = 0.0
    """share of each training label that is spread evenly over all classes, 0..1; evaluation takes the labels as they are"""
    mixup: float = 0.0
    """blend training images and labels in pairs, with a share drawn from Beta(alpha, alpha), the same for all images of a process's batch;
    this is alpha; 0: off"""
    cutmix: float = 0.0
    """paste a box of one training image into another, with its share of the label; alpha as for --mixup; with both, each batch draws one of
    the two; 0: off"""
    ema_decay: float | None = None
    """keep an exponential moving average of the weights with this decay, 0..1 (for example 0.999), and evaluate and export it in their
    place; unset: none"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run"""

    seed: int = 0
    """the number that all randomness derives from"""
    output_dir: str | None = None
    """folder for everything the run writes; unset: runs/<dataset>-<time>"""
    log_interval: int = 50
    """updates between two log lines"""
    report: bool = True
    """make report.html and plots/*.png at the end: about a second"""
    profile: int | None = None
    """record this many updates with torch.profiler, after ten of warm-up, into output_dir/profile: a trace for a viewer, and a
    table of where the time goes; unset: none"""
    checkpointing_steps: int | Literal["epoch"] = "epoch"
    """write a checkpoint after this many updates, or after each epoch ('epoch'), and in any case at the end of the run"""
    save_total_limit: int | None = 3
    """how many checkpoints to keep, of the newest updates; null: all. The best epoch's model is kept apart, in output_dir/model"""
    resume_from_checkpoint: str | None = None
    """go on with a checkpoint: its folder, or a run's folder for its newest whole one, or 'auto' for that of --output_dir (starts anew
    where there is none); --epochs is the total; unset: start anew (short: --resume)"""
    max_time: str | None = None
    """stop with a checkpoint after this time, HH:MM:SS or seconds; unset: never"""
    early_stopping_patience: int | None = None
    """end after this many epochs without a better accuracy; unset: never"""
    push_to_hub: str | None = None
    """upload the model folder, with a model card, to this repository of the Hub (NAME or USER/NAME), when the training has ended; needs
    HF_TOKEN or `hf auth login`; unset: no upload"""
    hang_timeout: float = 300.0
    """limit for a rank that the others wait for, in seconds; then the run says which one is missing where, and ends; 0: none"""
    audit_interval: int = 200
    """updates after which all ranks compare their weights, rate and scale; each epoch's end is one more time; 0: never"""
    hooks: str | None = None
    """hooks of one's own, called after the trainer's: package.module:Class, a subclass of trainer.Hook, or a function that returns one;
    several separated by commas; unset: none"""
    report_to: str = "none"
    """trackers that get the numbers of metrics.jsonl too, separated by commas: tensorboard, wandb, trackio, mlflow, comet_ml, clearml, aim,
    dvclive, swanlab; or none"""
    tracker_project_name: str | None = None
    """the project or experiment of --report_to that the run belongs to; unset: the name of the data"""


SECTIONS = (DataConfig, ModelConfig, OptimConfig, RunConfig)


@dataclass(frozen=True, kw_only=True)
class Config(DataConfig, ModelConfig, OptimConfig, RunConfig):
    """All knobs of a run, checked, never changed after parsing.

    Raises:
        UserError: a value out of its range, or two that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, str):
                continue
            if value is not None and not abs(value) < INFINITY:
                raise UserError(f"--{name} must be a finite number, but is {value}")
            if value is not None and not low <= value <= high:
                bound = f"at least {low}" if high == INFINITY else f"between {low} and {high}"
                raise UserError(f"--{name} must be {bound}, but is {value}")
        for name in ("lr", "max_grad_norm", "lr_gamma"):
            if getattr(self, name) == 0:
                raise UserError(f"--{name} must be above 0, but is 0")
        for name in TEXTS:
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise UserError(f"--{name} must not be empty: give it a value, or leave it out")
        self._check_data()
        for name in self.trackers:
            if name not in TRACKERS:
                raise UserError(
                    f"--report_to {self.report_to}: {name!r} is not a tracker{suggestion(name, TRACKERS) or ''}: name some of "
                    f"{', '.join(TRACKERS)}, separated by commas, or none"
                )
        if self.tracker_project_name in (".", "..") or {"/", "\\"} & set(self.tracker_project_name or ""):
            raise UserError(f"--tracker_project_name {self.tracker_project_name} must be a name, which is no path: choose another")
        if self.resume_from_checkpoint == "auto" and self.output_dir is None:
            raise UserError("--resume auto needs --output_dir, the folder of the run to go on with")
        if self.streaming and self.cache in ("device", "ram"):
            raise UserError(f"--streaming reads images when they are needed, and --cache {self.cache} keeps them: leave one of them out")
        if self.max_time is not None:
            seconds(self.max_time)
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise UserError("--nesterov needs --optimizer sgd and a --momentum above 0: change them, or leave it out")
        if self.min_lr > self.lr:
            raise UserError(f"--min_lr {self.min_lr:g} is above --lr {self.lr:g}, from which the rate falls: lower it")
        if self.auto_batch_size and self.scale_lr != "none":
            raise UserError(
                f"--scale_lr {self.scale_lr} contradicts --auto_batch_size, which may add accumulation to keep the batch, and so the rate, "
                "the same: leave one of them out"
            )
        if self.global_batch_size is not None and self.scale_lr != "none":
            raise UserError(
                f"--scale_lr {self.scale_lr} contradicts --global_batch_size, which keeps the batch, and so the rate, the same "
                "for any number of processes: leave one of them out"
            )

        if self.local_sgd_steps is not None:
            self._check_local_sgd(self.local_sgd_steps)

    def _check_local_sgd(self, steps: int) -> None:
        for name, asked in (
            (f"comm_hook {self.comm_hook}", self.comm_hook != "none"),
            ("find_unused_parameters", self.find_unused_parameters),
            ("static_graph", self.static_graph),
        ):
            if asked:
                raise UserError(f"--{name} is about gradients that --local_sgd_steps {steps} does not send: leave one of them out")
        if isinstance(self.checkpointing_steps, int) and self.checkpointing_steps % steps:
            raise UserError(
                f"--checkpointing_steps {self.checkpointing_steps} must be a multiple of --local_sgd_steps {steps}: "
                "only then do all processes have the same weights"
            )

    def _check_data(self) -> None:
        if self.data_dir is not None:
            if self.dataset != DATASET:
                raise UserError(f"--data_dir {self.data_dir} contradicts --dataset {self.dataset}: leave one of them out")
            for name in ("dataset_config", "image_column", "label_column"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} contradicts --data_dir, whose classes are folders: leave one of them out")
        if self.val_fraction in (0, 1):
            raise UserError(f"--val_fraction must be above 0 and below 1, but is {self.val_fraction:g}")
        if self.val_fraction is not None and self.eval_split is not None:
            raise UserError(f"--val_fraction {self.val_fraction:g} contradicts --eval_split {self.eval_split}: leave one of them out")
        if self.streaming and self.val_fraction is not None:
            raise UserError("--val_fraction cannot hold out a part of what --streaming reads: leave one of them out")
        if self.image_size is not None:
            pixels(self.image_size)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `report_to`, each once."""
        names = [name.strip().lower() for name in self.report_to.split(",")]
        return () if names == ["none"] else tuple(dict.fromkeys(names))

    @property
    def data_name(self) -> str:
        """What `data_dir` or `dataset` says."""
        return self.data_dir or self.dataset

    @property
    def data_flag(self) -> str:
        """The flag that names the data, with its value."""
        return f"--data_dir {self.data_dir}" if self.data_dir is not None else f"--dataset {self.dataset}"

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) that `image_size` asks for, pixels."""
        return pixels(self.image_size) if self.image_size is not None else None


def require_same(config: Config, processes: Processes) -> None:
    """Refuse a run whose ranks were given different flags or recipes, as several hosts can be; paths may differ. A collective.

    Raises:
        UserError: naming the flag and the two values; the same on all ranks.
    """
    own = {field.name: getattr(config, field.name) for field in fields(Config) if field.name not in OF_THE_HOST}
    everyone = processes.all_gather(own)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise UserError(
                    f"--{name} is {everyone[0][name]} on rank 0, but {value} on rank {rank}: give all hosts the same flags and recipe",
                    agreed=True,
                )


def pixels(text: str) -> tuple[int, int]:
    """`--image_size` as (height, width).

    Raises:
        UserError: it is neither N nor HEIGHTxWIDTH, of whole numbers in range.
    """
    sides = [int(side) if side.isdecimal() else 0 for side in text.strip().lower().split("x")]
    if len(sides) > 2 or not all(SMALLEST_SIDE <= side <= LARGEST_SIDE for side in sides):
        raise UserError(f"--image_size must be N or HEIGHTxWIDTH, of {SMALLEST_SIDE} to {LARGEST_SIDE} pixels, but is {text!r}")
    return sides[0], sides[-1]


def seconds(text: str) -> float:
    """`--max_time` in seconds.

    Raises:
        UserError: it is neither HH:MM:SS (or MM:SS) nor a number of seconds above 0.
    """
    total = 0.0
    for part in text.split(":"):
        if not re.fullmatch(r"\d+(\.\d+)?", part):
            total = 0.0
            break
        total = 60 * total + float(part)
    if not total or text.count(":") > 2:
        raise UserError(f"--max_time must be HH:MM:SS or seconds above 0, but is {text!r}")
    return total


# What may differ between hosts: where things lie, and what fits their hardware.
OF_THE_HOST = (
    "dataset",
    "data_dir",
    "weights",
    "output_dir",
    "resume_from_checkpoint",
    "cache",
    "num_workers",
    "cpu_threads",
)
# Two BatchNorm layers after two poolings need at least two values for each channel, also in a batch of one image.
SMALLEST_SIDE, LARGEST_SIDE = 4, 16384
TEXTS = (
    "dataset",
    "dataset_config",
    "data_dir",
    "train_split",
    "eval_split",
    "image_column",
    "label_column",
    "model",
    "weights",
    "output_dir",
    "resume_from_checkpoint",
    "push_to_hub",
    "hooks",
    "report_to",
    "tracker_project_name",
)
# Those of Accelerate; a test holds them equal.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "clearml", "aim", "dvclive", "swanlab")
INFINITY = float("inf")
RANGES: dict[str, tuple[float, float]] = {
    "batch_size": (1, INFINITY),
    "global_batch_size": (1, INFINITY),
    "eval_batch_size": (1, INFINITY),
    "val_fraction": (0, 1),
    "hflip": (0, 1),
    "random_erasing": (0, 1),
    "shuffle_buffer": (1, INFINITY),
    "num_workers": (0, INFINITY),
    "cpu_threads": (1, INFINITY),
    "powersgd_rank": (1, INFINITY),
    "powersgd_start": (0, INFINITY),
    "epochs": (1, INFINITY),
    "max_steps": (1, INFINITY),
    "lr": (0, INFINITY),
    "momentum": (0, 1),
    "weight_decay": (0, INFINITY),
    "warmup_epochs": (0, INFINITY),
    "lr_step_epochs": (1, INFINITY),
    "lr_gamma": (0, 1),
    "plateau_patience": (1, INFINITY),
    "min_lr": (0, INFINITY),
    "local_sgd_steps": (1, INFINITY),
    "gradient_accumulation_steps": (1, INFINITY),
    "max_grad_norm": (0, INFINITY),
    "label_smoothing": (0, 1),
    "mixup": (0, INFINITY),
    "cutmix": (0, INFINITY),
    "ema_decay": (0, 1),
    "seed": (0, 2**63 - 1),
    "log_interval": (1, INFINITY),
    "profile": (1, INFINITY),
    "checkpointing_steps": (1, INFINITY),
    "save_total_limit": (1, INFINITY),
    "early_stopping_patience": (1, INFINITY),
    "hang_timeout": (0, INFINITY),
    "audit_interval": (0, INFINITY),
}

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
# What a flag without a value stands for.
BARE = {"--compile": "default"}
SHORT_FLAGS = {"-e": "--epochs", "-b": "--batch_size", "--resume": "--resume_from_checkpoint"}


def parse(argv: Sequence[str]) -> Config:
    """The config that the flags, and the recipe named by `--config`, ask for. Flags beat the recipe, the recipe beats the defaults.

    Raises:
        UserError: an unknown flag or key, a value of the wrong type or out of range, an unreadable recipe.
        SystemExit: `--help` was asked for; the main process prints it.
    """
    from argparse import ArgumentError

    arguments = normalise(argv)
    parser = build_parser()
    if "--help" in arguments or "-h" in arguments:
        if env_int("RANK", 0) == 0:
            parser.print_help()
        raise SystemExit(0)
    recipe: list[str] = []
    while "--config" in arguments:
        position = arguments.index("--config")
        if position + 1 == len(arguments) or arguments[position + 1].startswith("--"):
            raise UserError("--config needs a value: a recipe")
        recipe += read_recipe(find_recipe(arguments[position + 1]))
        del arguments[position : position + 2]
    try:
        values = vars(parser.parse_args(recipe + arguments))
    except ArgumentError as error:
        raise UserError(explain(str(error))) from None
    del values["config"]
    # A flag beats a recipe; on one level the two contradict each other.
    if "--data_dir" in arguments and "--dataset" in arguments:
        raise UserError(f"--data_dir {values['data_dir']} contradicts --dataset {values['dataset']}: leave one of them out")
    if "--data_dir" in arguments:
        values["dataset"] = DATASET
    if "--dataset" in arguments:
        values["data_dir"] = None
    # The more explicit of the two wins; both on one level must agree, which loaders.py checks once the processes are counted.
    if "--global_batch_size" in arguments and "--batch_size" not in arguments:
        values["batch_size"] = None
    if "--batch_size" in arguments and "--global_batch_size" not in arguments:
        values["global_batch_size"] = None
    return Config(**values)


def build_parser() -> "ArgumentParser":
    """The parser of the flags: one section for each group of `Config`."""
    parser = empty_parser(
        "accelerate launch [launcher's options] trainer/main.py [--config RECIPE] [options]",
        "Train an image classifier on any number of processes. Hardware, number of processes and precision come from "
        "`accelerate launch` and its config file (accelerate_configs/).",
        "Flags may be written with hyphens too. A flag beats the recipe, the recipe beats the default.",
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        help=f"recipe: a YAML file, or the name of one of the trainer's own ({', '.join(recipe_names())})",
    )
    for section in SECTIONS:
        parser.add_class_arguments(section)
    return parser


def empty_parser(usage: str, description: str, epilog: str) -> "ArgumentParser":
    """A parser that takes its flags' help from the attributes' docstrings, and raises."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(usage=usage, description=description, epilog=epilog, exit_on_error=False, allow_abbrev=False)


def parse_part(argv: Sequence[str], parser: "ArgumentParser", names: Sequence[str], switches: Sequence[str]) -> dict[str, Any]:
    """The values of a command that has some of the trainer's flags, and words and flags of its own.

    Args:
        parser: an `empty_parser` with the command's own arguments; gets the others.
        names: the fields of `Config` that are its flags.
        switches: its own flags that take no value.

    Raises:
        UserError: an unknown flag, one that is for training alone, or a wrong value.
        SystemExit: `--help` was asked for; the main process prints it.
    """
    from argparse import ArgumentError

    for section in SECTIONS:
        skipped = {field.name for field in fields(section)} - set(names)
        if len(skipped) < len(fields(section)):
            parser.add_class_arguments(section, skip=skipped)
    given, arguments = [word for word in argv if word not in switches], normalise([word for word in argv if word not in switches])
    if "--help" in given or "-h" in given:
        if env_int("RANK", 0) == 0:
            parser.print_help()
        raise SystemExit(0)
    for word in arguments:
        if word.startswith("--") and word[2:] in set(_field_names()) - set(names) and word not in parser._option_string_actions:
            raise UserError(f"{word} is for training: leave it out")
    try:
        values = vars(parser.parse_args([*arguments, *(word for word in argv if word in switches)]))
    except ArgumentError as error:
        raise UserError(explain(str(error))) from None
    return values


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def normalise(argv: Sequence[str]) -> list[str]:
    """Flags as the parser knows them: `--batch-size=32` and `-b 32` become `--batch_size 32`, a bare `--tf32` gets its `true`.

    `--local-rank`, which torch.distributed.launch appends, is dropped: the same number is in the environment.

    Raises:
        UserError: the first tutorial's `--gpu`.
    """
    booleans = {f"--{field.name}" for field in fields(Config) if field.type is bool}
    words: list[str] = []
    for word in argv:
        if word.startswith("-") and "=" in word:
            flag, _, value = word.partition("=")
            words += [flag, value]
        else:
            words.append(word)
    result: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        word = SHORT_FLAGS.get(word, word)
        if not word.startswith("--"):
            result.append(word)
            continue
        flag = "--" + word[2:].replace("-", "_")
        has_value = position < len(words) and (not words[position].startswith("-") or _is_number(words[position]))
        if flag == "--gpu":
            raise UserError("--gpu is not a flag of the trainer: choose GPUs with `accelerate launch --gpu_ids 0,1 trainer/main.py`")
        if flag == "--local_rank":
            position += has_value
            continue
        result.append(flag)
        if flag in booleans | BARE.keys() and not has_value:
            result.append(BARE.get(flag, "true"))
        elif has_value:
            result.append(words[position])
            position += 1
    return result


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def find_recipe(name: str) -> Path:
    """The file that `--config` names: a path, or the trainer's own recipe of that name.

    Raises:
        UserError: there is none.
    """
    own = RECIPES / f"{Path(name).stem}.yaml"
    if os.path.isfile(name):
        return Path(name)
    if own.is_file() and str(Path(name).parent) in (".", "recipes"):
        return own
    raise UserError(f"--config: there is no file {name}, and the trainer's own recipes are {', '.join(recipe_names())}")


def read_recipe(path: Path) -> list[str]:
    """A recipe as the flags it stands for, `["--lr", "3e-3", ...]`, so that flags and keys are read by the same rules.

    Raises:
        UserError: the file is unreadable, not a mapping, or has an unknown key; named with the nearest known one.
    """
    import yaml

    try:
        # BaseLoader leaves every scalar a text: YAML 1.1 would read `sync_bn: on` as true and `lr: 1e-4` as a text.
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the recipe {path} cannot be read: {reason}: give a YAML file of lines 'key: value'") from None
    if not isinstance(content, dict):
        raise UserError(f"the recipe {path} must be lines of 'key: value', as in {RECIPES / 'mnist5k.yaml'}")
    flags: list[str] = []
    for key, value in content.items():
        if key not in _field_names():
            raise UserError(f"the recipe {path} has an unknown key '{key}'{suggestion(str(key), _field_names()) or ': see --help'}")
        if not isinstance(value, str):
            raise UserError(f"the recipe {path}: {key} must be one value")
        flags += [f"--{key}={value or 'null'}"]
    return flags


def _field_names() -> list[str]:
    return [field.name for field in fields(Config)]


def suggestion(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def explain(message: str) -> str:
    """A parser's error message as one sentence that says what to write instead."""
    unrecognized = re.match(r"unrecognized arguments: (\S+)", message)
    if unrecognized:
        word = unrecognized[1]
        if word.startswith("-"):
            return f"unknown flag {word}{suggestion(word, ['--config', *(f'--{name}' for name in _field_names())]) or ': see --help'}"
        return f"unexpected word '{word}': every setting is a flag, see --help"
    no_value = re.match(r"argument (\S+): expected one argument", message)
    if no_value:
        return f"{no_value[1]} needs a value{_expected(no_value[1].removeprefix('--'))}"
    key = re.match(r'Parser key "(\w+)"', message)
    if key:
        value = re.search(r"Given value: (.*)\Z", message, re.DOTALL) or re.search(r"Got value: (.*)\Z", message, re.DOTALL)
        return f"--{key[1]} must be{_expected(key[1], '')}" + (f", but is {value[1].strip()!r}" if value else "")
    return " ".join(message.split())


def _expected(name: str, before: str = ":") -> str:
    from typing import get_args, get_type_hints

    hint = get_type_hints(Config).get(name)
    if hint is None:
        return ""
    kinds: list[str] = []
    choices: list[str] = []
    for part in (hint, *get_args(hint)):
        kinds += [TYPE_NAMES[part]] if part in TYPE_NAMES else []
        choices += [word for word in get_args(part) if isinstance(word, str)]
    if kinds:
        return f"{before} {' or '.join((*kinds, *choices))}"
    return f"{before} one of {', '.join(choices)}"
