"""Evaluation of a trained model: `accelerate launch trainer/evaluate.py MODEL [--dataset …]`, under any launcher."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.config import Config, empty_parser, parse_part
from trainer.named import NAME
from trainer.runtime import Processes, RunError, UserError, run_command

# Those that say which data; where one of the first two is given, nothing of what the model was trained on counts.
DATA = ("dataset", "data_dir", "dataset_config", "eval_split", "image_column", "label_column")
FLAGS = (
    *DATA,
    "on_bad_image",
    "eval_batch_size",
    "num_workers",
    "channels_last",
    "compile",
    "mixed_precision",
    "tf32",
    "cpu_threads",
    "hang_timeout",
)


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        folder: a model folder, or a run's.
        factory: of a model of one's own; None: it is none.
        values: of the flags, by name.
        given: the names of those that stand on the command line.
        json: print one JSON object, and nothing else.
        output_json: the file to write it to; None: none.
    """

    folder: str
    factory: str | None
    values: dict[str, Any]
    given: frozenset[str]
    json: bool
    output_json: str | None


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a model on the processes that the launcher started, and print its figures.

    Args:
        argv: flags; None takes the command line's.

    Raises:
        SystemExit: 2 for a user's mistake, 1 for anything else.
    """
    run_command(lambda: read(sys.argv[1:] if argv is None else argv), measure)


def read(argv: Sequence[str]) -> Request:
    """The request that the flags stand for.

    Raises:
        UserError: an unknown flag, or a wrong value.
        SystemExit: `--help` was asked for.
    """
    parser = empty_parser(
        "accelerate launch [launcher's options] trainer/evaluate.py MODEL [options]",
        "Evaluate a trained model on any number of processes, with its own preprocessing; labels are those of its classes by their names.",
        "Without --dataset and --data_dir: on what the training evaluated on. A data set of one split only is taken as a whole.",
    )
    parser.add_argument("MODEL", help="a run's folder, or the model folder in it")
    parser.add_argument("--model", metavar="FACTORY", help="the package.module:factory of a model of one's own: its code is run")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--output_json", metavar="FILE", help="write that object to FILE")
    values = parse_part(argv, parser, FLAGS, ["--json"])
    words = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
    flags = {name: values[name] for name in FLAGS}
    request = Request(
        values["MODEL"], values["model"], flags, frozenset(words & set(FLAGS)), json=values["json"], output_json=values["output_json"]
    )
    # Out of range is out of range for any model.
    Config(**request.values)
    if "dataset" in words and "data_dir" in words:
        raise UserError(f"--data_dir {values['data_dir']} contradicts --dataset {values['dataset']}: leave one of them out")
    return request


def config_for(request: Request, model: dict[str, Any]) -> Config:
    """The flags, and what the model folder's config.json says of the rest.

    Raises:
        UserError: nothing says which data.
    """
    values = dict(request.values)
    if not {"dataset", "data_dir"} & request.given:
        recorded = model.get("data")
        if not isinstance(recorded, dict) or not recorded:
            raise UserError(f"the model folder {request.folder} does not say what it was trained on: name data by --dataset or --data_dir")
        if NAME.fullmatch(str(recorded.get("dataset"))):
            raise UserError(
                f"the model folder {request.folder} was trained on {recorded['dataset']}, which is code, and a folder alone has none run: "
                f"name it too (--dataset {recorded['dataset']}), or other data"
            )
        values |= {name: value for name, value in recorded.items() if name not in request.given}
        if "eval_split" in request.given:
            values["val_fraction"] = None
    try:
        return Config(**{**values, "model": model["architecture"], "normalize": "none"})
    except TypeError as error:
        raise UserError(f"the model folder {request.folder} cannot be used ({error}): name data by --dataset or --data_dir") from None


def measure(request: Request, processes: Processes) -> None:
    """request -> model -> accelerator -> data -> loop.evaluate -> figures."""
    from trainer.accelerator import build_accelerator
    from trainer.data.dataset import Shape
    from trainer.data.loaders import load_eval_data
    from trainer.export import find_model, read_model
    from trainer.files import write_json
    from trainer.hooks.base import HookList
    from trainer.hooks.gather_metrics import GatherMetrics
    from trainer.inference import preprocessing
    from trainer.loop import evaluate
    from trainer.metrics import named, table
    from trainer.output import report_end
    from trainer.state import build_evaluation

    with processes.together():
        folder = find_model(request.folder)
        module, model = read_model(folder, request.factory)
        preprocess = preprocessing(folder, model)
        config = config_for(request, model)
        if request.output_json is not None and not Path(request.output_json).absolute().parent.is_dir():
            raise UserError(f"--output_json {request.output_json}: its folder is not there: make it, or name another file")
        accelerator = build_accelerator(config, processes)
    try:
        data = load_eval_data(config, processes, preprocess.classes, Shape(preprocess.mode, preprocess.size, resize=True))
    except UserError as error:
        if {"dataset", "data_dir"} & request.given:
            raise
        raise UserError(
            f"{error} (that is what the model was trained on: name other data by --dataset or --data_dir)", error.agreed
        ) from None
    run = build_evaluation(config, processes, data, accelerator, module, preprocess.normalize)
    # For the stacks of a hang alone: nothing is written into the model's folder.
    run.output_dir = processes.broadcast(Path(tempfile.mkdtemp(prefix="evaluate-")) if processes.is_main else Path())
    report_end(run, exit_file=False)
    processes.at_last.append(lambda: remove_empty(run.output_dir))
    run.watch.start(run.output_dir)
    processes.stops.training = True
    evaluate(run, HookList((GatherMetrics(),)))
    if run.state.interrupted is not None:
        raise RunError(f"{run.state.interrupted} before the evaluation had ended: start it again", agreed=True)
    metrics = run.state.metrics
    figures = {
        "model": str(folder),
        "data": config.data_name,
        "split": data.test_split,
        **{name: metrics[name] for name in ("acc1", "acc5", "loss", "samples", "bad_images")},
        **named(metrics, data.classes),
    }
    with processes.together():
        if processes.is_main:
            if request.output_json is not None:
                write_json(Path(request.output_json), figures)
            show(figures, request.json, table(data.classes, metrics["confusion"]))


def remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def show(figures: dict[str, Any], as_json: bool, rows: list[str]) -> None:
    """Print the figures: one JSON object, or a line like the training's and a row for each class."""
    import json

    if as_json:
        print(json.dumps(figures, ensure_ascii=False), flush=True)
        return
    bad, macro = figures["bad_images"], figures["macro"]
    print(
        f"eval  {figures['model']} acc1 {figures['acc1']:.2f} acc5 {figures['acc5']:.2f} loss {figures['loss']:.4f} "
        f"ece {figures['ece']:.4f} macro f1 {macro['f1']:.4f} samples {figures['samples']}/{figures['samples'] + bad} "
        f"({figures['data']}, split '{figures['split']}')" + f" bad {bad}" * bool(bad)
    )
    print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
