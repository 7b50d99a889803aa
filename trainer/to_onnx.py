"""Export to ONNX: `python trainer/to_onnx.py MODEL [--output FILE]`; needs `pip install 'accelerate-trainer[onnx]'`.

The file takes `images`, uint8 (N, C, H, W) pixels of the model's size, and gives `logits` (N, classes); it normalises by itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.commands import Arguments, run_alone
from trainer.runtime import EXIT_DONE, UserError

if TYPE_CHECKING:
    import argparse


def main(argv: Sequence[str] | None = None) -> None:
    """Write the ONNX file, and say how exactly it does what the model does.

    Args:
        argv: flags; None takes the command line's.

    Raises:
        SystemExit: 2 for a user's mistake, 1 for anything else; then there is no new file.
    """
    run_alone("to_onnx", lambda: convert(parse(argv)))


def parse(argv: Sequence[str] | None) -> "argparse.Namespace":
    parser = Arguments(
        "python trainer/to_onnx.py MODEL [options]",
        "Export a model to ONNX and compare it with the original on random images. It takes 'images', uint8 (N, C, H, W), and gives "
        "'logits' (N, classes); the normalisation is inside.",
    )
    parser.add_argument("folder", metavar="MODEL", help="a run's folder, or the model folder in it")
    parser.add_argument("--output", metavar="FILE", help="the file to write (default: model.onnx in the model folder)")
    parser.add_argument("--model", metavar="FACTORY", help="the package.module:factory of a model of one's own: its code is run")
    return parser.read(argv)


def convert(arguments: "argparse.Namespace") -> int:
    from trainer.export import find_model

    file = Path(arguments.output) if arguments.output is not None else find_model(arguments.folder) / "model.onnx"
    if arguments.output is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise UserError(f"--output {file} is a folder, or its folder is not there: name a file in a folder that is")
    from trainer.inference import load_model
    from trainer.onnx_model import TOLERANCE, check_packages, export

    check_packages()
    model, preprocess = load_model(arguments.folder, arguments.model)
    difference = export(model, preprocess, file)
    channels = 1 if preprocess.mode == "L" else 3
    print(
        f"{file}: images uint8 (N, {channels}, {preprocess.size[0]}, {preprocess.size[1]}) -> logits (N, {len(preprocess.classes)}); "
        f"largest difference of a logit {difference:.1e} (at most {TOLERANCE:g} of the largest is allowed)",
        flush=True,
    )
    return EXIT_DONE


if __name__ == "__main__":
    main()
