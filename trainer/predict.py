"""Predictions: `python trainer/predict.py MODEL IMAGES … [--top_k N] [--json | --csv]`: one process, on a GPU where there is one."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.commands import Arguments, at_least_one, run_alone
from trainer.runtime import EXIT_DONE, EXIT_FAILURE, UserError, say

if TYPE_CHECKING:
    import argparse

    from torch import Tensor, nn

    from trainer.inference import Preprocess

# Of a file, its likeliest classes and their probabilities, the likeliest first.
Prediction = tuple[str, list[tuple[str, float]]]


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the model says of each image, in the order of their paths.

    Args:
        argv: flags; None takes the command line's.

    Raises:
        SystemExit: 2 for a user's mistake; 1 when an image cannot be read, after the others are printed, or for anything else.
    """
    run_alone("predict", lambda: predict(parse(argv)))


def parse(argv: Sequence[str] | None) -> "argparse.Namespace":
    parser = Arguments(
        "python trainer/predict.py MODEL IMAGES [IMAGES ...] [options]",
        "Print class names with probabilities, in the order of the images' paths. Exit code 1 when an image cannot be read: it is named on "
        "stderr, and the others are printed.",
    )
    parser.add_argument("folder", metavar="MODEL", help="a run's folder, or the model folder in it")
    parser.add_argument("images", metavar="IMAGES", nargs="+", help="image files, and folders that are searched for them at any depth")
    parser.add_argument("--top_k", type=at_least_one, default=1, help="classes of an image, the likeliest first (default: 1)")
    parser.add_argument("--batch_size", type=at_least_one, default=64, help="images that the model takes at once (default: 64)")
    parser.add_argument("--model", metavar="FACTORY", help="the package.module:factory of a model of one's own: its code is run")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print one JSON object a line: file, label, probability, with --top_k also top")
    kinds.add_argument("--csv", action="store_true", help="print CSV: file, label, probability, and with --top_k label_2, probability_2, …")
    return parser.read(argv)


def predict(arguments: "argparse.Namespace") -> int:
    """Print the predictions; returns the exit code.

    Raises:
        UserError: the model cannot be loaded, or there is no image.
    """
    files = find_images(arguments.images)
    import torch

    from trainer.inference import load_model

    model, preprocess = load_model(arguments.folder, arguments.model)
    top_k = min(arguments.top_k, len(preprocess.classes))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    preprocess.normalize.to(device)
    printer = print_json if arguments.json else print_csv if arguments.csv else print_table
    predictions = Predictions(model, preprocess, files, arguments.batch_size, top_k)
    printer(predictions, top_k)
    return EXIT_FAILURE if predictions.broken else EXIT_DONE


class Predictions:
    """Iterates over the predictions of the files that can be read; the others are named on stderr, and counted.

    Attributes:
        broken: files that could not be read so far.
    """

    def __init__(self, model: "nn.Module", preprocess: "Preprocess", files: list[str], batch_size: int, top_k: int) -> None:
        self.model, self.preprocess = model, preprocess
        self.files, self.batch_size, self.top_k = files, batch_size, top_k
        self.broken = 0

    def __iter__(self) -> Iterator[Prediction]:
        from concurrent.futures import ThreadPoolExecutor

        import torch

        # Pillow lets other threads run while it decodes.
        with ThreadPoolExecutor() as pool, torch.inference_mode():
            for start in range(0, len(self.files), self.batch_size):
                names = self.files[start : start + self.batch_size]
                read = [(name, pixels) for name, pixels in zip(names, pool.map(self.open, names), strict=True) if pixels is not None]
                self.broken += len(names) - len(read)
                if not read:
                    continue
                images = torch.stack([pixels for _, pixels in read]).to(self.preprocess.normalize.mean.device)
                top = self.model(self.preprocess.normalize(images)).float().softmax(1).topk(self.top_k)
                for (name, _), numbers, shares in zip(read, top.indices.tolist(), top.values.tolist(), strict=True):
                    yield name, [(self.preprocess.classes[number], share) for number, share in zip(numbers, shares, strict=True)]

    def open(self, name: str) -> "Tensor | None":
        try:
            return self.preprocess.pixels(name)
        except UserError as error:
            say(f"error: {error}")
            return None


def find_images(words: Sequence[str]) -> list[str]:
    """The files, and those that lie in the folders and have an image's ending, each once, in the order of their paths.

    Raises:
        UserError: one of `words` is not there, or a folder has no image.
    """
    from trainer.data.folders import images_below

    found: set[str] = set()
    for word in words:
        if not Path(word).exists():
            raise UserError(f"{word}: there is no such file or folder: name images, or a folder of images")
        if Path(word).is_dir():
            inside = images_below(word)
            if not inside:
                raise UserError(f"{word}: there is no image in this folder: name images, or a folder of images")
            found.update(inside)
        else:
            found.add(word)
    return sorted(found)


def print_table(predictions: Predictions, top_k: int) -> None:
    width = max(len("file"), *map(len, predictions.files))
    names = max(len("label"), *map(len, predictions.preprocess.classes))
    print(f"{'file':<{width}}", *([f"{'label':<{names}}  probability"] * top_k), sep="  ")
    for name, classes in predictions:
        print(f"{name:<{width}}", *(f"{label:<{names}}  {share:11.4f}" for label, share in classes), sep="  ")


def print_json(predictions: Predictions, top_k: int) -> None:
    import json

    for name, classes in predictions:
        line: dict[str, object] = {"file": name, "label": classes[0][0], "probability": classes[0][1]}
        if top_k > 1:
            line["top"] = [{"label": label, "probability": share} for label, share in classes]
        print(json.dumps(line, ensure_ascii=False))


def print_csv(predictions: Predictions, top_k: int) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    more = [f"{column}_{place}" for place in range(2, top_k + 1) for column in ("label", "probability")]
    writer.writerow(["file", "label", "probability", *more])
    for name, classes in predictions:
        writer.writerow([name, *(field for pair in classes for field in pair)])


if __name__ == "__main__":
    main()
