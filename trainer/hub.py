"""The Hub: an exported model as huggingface_hub's mixin loads it, its model card, and its upload."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData, PyTorchModelHubMixin, constants, get_token, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import Tensor, nn

from trainer.config import Config
from trainer.export import CONFIG_FILE, MODEL_FILES, contiguous, read_model, write_tensors
from trainer.files import write_json, write_text
from trainer.inference import preprocessing
from trainer.metrics import macro, per_class
from trainer.models.weights import WEIGHTS_FILE
from trainer.runtime import Processes, RunError, UserError

if TYPE_CHECKING:
    from trainer.state import Run

CARD = "README.md"
TAGS = ["image-classification", "accelerate-trainer"]
# Of the config, what concerns one machine only.
LOCAL = ("output_dir", "resume_from_checkpoint", "push_to_hub", "cpu_threads", "hang_timeout")


class Classifier(nn.Module, PyTorchModelHubMixin, library_name="pytorch", tags=TAGS, pipeline_tag="image-classification"):
    """An exported model with its preprocessing: `Classifier.from_pretrained(FOLDER_OR_REPO)`, in evaluation mode.

    `from_pretrained(…, factory="package.module:factory")` for a model of one's own, whose code is then run.

    Attributes:
        module: the plain model.
        config: its config.json.
        preprocess: images of any kind -> what it takes, see `inference.Preprocess`.
    """

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.preprocess = preprocessing(Path(str(config.get("architecture"))), config)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of normalised images (B, C, H, W), as `preprocess` makes them."""
        logits: Tensor = self.module(images)
        return logits

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        factory: str | None = None,
        **_: Any,
    ) -> "Classifier":
        folder = model_id
        if not os.path.isdir(model_id):
            folder = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
                allow_patterns=list(MODEL_FILES),
            )
        module, config = read_model(folder, factory)
        return cls(module.to(map_location), config).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        write_tensors(save_directory / WEIGHTS_FILE, contiguous(self.module))
        write_json(save_directory / CONFIG_FILE, self.config)


def check_upload(repo: str, processes: Processes) -> None:
    """Whether `--push_to_hub` can begin, before anything is trained: the name's form, and a token. A collective.

    Raises:
        UserError: it cannot.
    """
    with processes.together():
        if not processes.is_main:
            return
        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise UserError(f"--push_to_hub {repo} must be NAME or USER/NAME ({' '.join(str(error).split())})") from None
        if constants.is_offline_mode():
            raise UserError(f"--push_to_hub {repo}: HF_HUB_OFFLINE is set, which forbids the network: unset it, or leave --push_to_hub out")
        if get_token() is None:
            raise UserError(f"--push_to_hub {repo} needs a token of the Hub: log in by `hf auth login`, or set HF_TOKEN")


def push(run: "Run") -> None:
    """Upload output_dir/model with its model card to `--push_to_hub`, from the main process. A collective.

    Raises:
        RunError: that failed; nothing of the run is lost.
    """
    repo, folder = run.config.push_to_hub, run.output_dir / "model"
    assert repo is not None
    # The others wait here, however long it takes.
    run.watch.close()
    with run.processes.together():
        if not run.is_main:
            return
        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            write_text(folder / CARD, model_card(run, repo))
            api = HfApi()
            made = api.create_repo(repo, exist_ok=True)
            api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                allow_patterns=[*MODEL_FILES, CARD],
                commit_message=f"Epoch {run.state.best['epoch']}: {run.state.best['acc1']:.2f} % top-1",
            )
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RunError(
                f"--push_to_hub {repo}: the upload failed ({reason[:300]}); the run is whole in {run.output_dir}: upload the model "
                f"by `hf upload {repo} {folder}`"
            ) from None
        print(f"pushed to {made}", flush=True)


def model_card(run: "Run", repo: str) -> str:
    """The README.md of the best epoch's model: YAML for the Hub, figures, settings, and how to load it."""
    config, best, classes = run.config, run.state.best, run.data.classes
    name, hub = data_name(config)
    means = macro(best["confusion"])
    figures = {
        "accuracy": ("top-1 accuracy", best["acc1"] / 100),
        "top_5_accuracy": ("top-5 accuracy", best["acc5"] / 100),
        "precision": ("macro precision", means["precision"]),
        "recall": ("macro recall", means["recall"]),
        "f1": ("macro F1", means["f1"]),
    }
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=name if hub else "imagefolder",
            dataset_name=name,
            metric_type=kind,
            metric_value=round(value, 6),
            metric_name=title,
            dataset_split=run.data.test_split,
        )
        for kind, (title, value) in figures.items()
    ]
    head = ModelCardData(
        model_name=repo.rpartition("/")[2],
        eval_results=results,
        library_name="pytorch",
        pipeline_tag="image-classification",
        tags=[*TAGS, "model_hub_mixin", "pytorch_model_hub_mixin"],
        datasets=[name] if hub else None,
        metrics=["accuracy", "precision", "recall", "f1"],
    )
    rows = [
        f"| {cell(label)} | {figure(row['precision'])} | {figure(row['recall'])} | {figure(row['f1'])} | {row['support']} |"
        for label, row in zip(classes, per_class(best["confusion"]), strict=True)
    ]
    channels, height, width = run.data.train.shape
    settings = {field: value for field, value in vars(config).items() if field not in LOCAL}
    settings |= {"data_dir": name} if config.data_dir is not None else {"dataset": name}
    factory = f', factory="{config.model}"' if ":" in config.model else ""
    return "\n".join(
        (
            "---",
            head.to_yaml().strip(),
            "---",
            "",
            f"# {repo.rpartition('/')[2]}",
            "",
            f"`{config.model}` for {channels} x {height} x {width} images of {len(classes)} classes, trained on `{name}` "
            f"({len(run.data.train):,} images) with accelerate-trainer.",
            "",
            "## Figures",
            "",
            f"Of epoch {best['epoch']}, the best of {run.state.epoch}, on the {best['samples']:,} images of the split "
            f"'{run.data.test_split}', on which that epoch was picked too.",
            "",
            "| top-1 | top-5 | loss | expected calibration error | macro F1 |",
            "|---|---|---|---|---|",
            f"| {best['acc1']:.2f} % | {best['acc5']:.2f} % | {best['loss']:.4f} | {best['ece']:.4f} | {means['f1']:.4f} |",
            "",
            "| class | precision | recall | F1 | images |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## Use",
            "",
            "```python",
            "from trainer import Classifier",
            "",
            f'model = Classifier.from_pretrained("{repo}"{factory})',
            'probabilities = model(model.preprocess("image.jpg")).softmax(1)',
            "```",
            "",
            "`model.preprocess.classes` names the columns. The weights are in `model.safetensors`, the classes, size and normalisation in "
            "`config.json`.",
            "",
            "## Training",
            "",
            f"{run.state.step:,} updates on {run.processes.count} {'process' if run.processes.count == 1 else 'processes'}, global batch "
            f"{run.plan.global_batch_size}, precision {run.accelerator.mixed_precision}; torch {version('torch')}, accelerate "
            f"{version('accelerate')}. All settings:",
            "",
            "```yaml",
            yaml.safe_dump(settings, sort_keys=False).strip(),
            "```",
            "",
        )
    )


def data_name(config: Config) -> tuple[str, bool]:
    """The data set's name, without the folders above a local one; and whether it is an id of the Hub."""
    hub = {"mnist": "ylecun/mnist"}.get(config.dataset, config.dataset)
    if config.data_dir is None and hub.count("/") == 1 and not os.path.exists(hub):
        return hub, True
    return Path(config.data_name).name or config.data_name, False


def figure(value: float | int | None) -> str:
    return f"{value:.4f}" if value is not None else "–"


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")
