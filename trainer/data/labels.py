"""Label columns of any kind -> class names and numbers; the train split's rule. And a part of it held out for evaluation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer.runtime import UserError
from trainer.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset


def encode(name: str, parts: "Sequence[Dataset]") -> tuple[tuple[str, ...], list[list[int]]]:
    """Class names, and class numbers of each part, by the names or numbers of the first one, whatever each part's own order is.

    Args:
        name: what error messages call the data set.
        parts: the train split, and the one to evaluate on, with the column `label`: whole numbers of any values, texts, true and false,
            or a ClassLabel.

    Raises:
        UserError: labels are of another kind or missing, there is only one class, or a class that the train split lacks.
    """
    import datasets

    features = [part.features["label"] for part in parts]
    kinds = [_kind(name, feature) for feature in features]
    # Whole numbers without names, in any part, are the numbers of the other one's classes.
    by_number = "whole number" in kinds
    found: list[list[Any]] = []
    for part, feature, kind in zip(parts, features, kinds, strict=True):
        # A data set in memory gives a column one row after the other.
        values = part.select_columns("label")[:]["label"] if isinstance(part, datasets.Dataset) else list(part["label"])
        if kind == "class":
            values = [None if v is None or v < 0 else v if by_number else feature.names[v] for v in values]
        if None in values:
            raise UserError(f"{name}: row {values.index(None)} has no label; every image of both splits needs one")
        if kind == "fraction":
            raise UserError(f"{name}: the labels are fractions ({feature.dtype}), which name no classes: give whole numbers or texts")
        # A CSV file whose texts all look like numbers is read as numbers, another one of the same data set is not.
        found.append([str(value) for value in values] if "text" in kinds and kind not in ("text", "class") else values)
    known: list[Any] = sorted(set(found[0]))
    classes = [str(value) for value in known]
    # The names of an image folder are the folders of all splits; those of the train split alone rule.
    if isinstance(features[0], datasets.ClassLabel) and parts[0].builder_name != "imagefolder":
        classes = list(features[0].names)
        known = list(range(len(classes))) if by_number else classes
    number = {value: index for index, value in enumerate(known)}
    unknown = sorted({str(value) for values in found[1:] for value in values if value not in number})
    if unknown:
        raise UserError(
            f"{name}: the test split has classes that the train split lacks: {', '.join(unknown[:10])}: remove them, or add "
            "images of them to the train split"
        )
    if len(classes) < 2:
        raise UserError(f"{name}: all images are of the class '{classes[0]}': add images of another one")
    return tuple(classes), [[number[value] for value in values] for values in found]


def encode_by(name: str, split: str, part: "Dataset", classes: Sequence[str]) -> list[int]:
    """Class numbers of a split's rows, by the names of `classes`; whole numbers count as their own names.

    Args:
        name: what error messages call the data set.
        part: with the column `label`, see `encode`.
        classes: a model's.

    Raises:
        UserError: labels are of another kind or missing, or name classes that the model does not have.
    """
    feature, values = part.features["label"], list(part["label"])
    kind = _kind(name, feature)
    if kind == "fraction":
        raise UserError(f"{name}: the labels are fractions ({feature.dtype}), which name no classes: give whole numbers or texts")
    if kind == "class":
        values = [None if value is None or value < 0 else value for value in values]
    if None in values:
        raise UserError(f"{name}: row {values.index(None)} of the split '{split}' has no label; every image needs one")
    named = [feature.names[value] for value in values] if kind == "class" else [str(value) for value in values]
    if kind == "class" and not set(named) <= set(classes) and {str(value) for value in values} <= set(classes):
        # The model was trained on numbers without names.
        named = [str(value) for value in values]
    number = {value: index for index, value in enumerate(classes)}
    unknown = sorted(set(named) - number.keys())
    if unknown:
        raise UserError(
            f"{name}: the split '{split}' has classes that the model does not know: {', '.join(unknown[:10])}; it knows "
            f"{', '.join(classes[:10])}{' …' if len(classes) > 10 else ''}: rename or remove them"
        )
    return [number[value] for value in named]


def _kind(name: str, feature: Any) -> str:
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    dtype = feature.dtype if isinstance(feature, datasets.Value) else ""
    if dtype.startswith(("int", "uint")):
        return "whole number"
    if dtype.startswith(("float", "double", "decimal")):
        return "fraction"
    if dtype in ("string", "large_string", "bool", "null"):
        return {"bool": "truth", "null": "none"}.get(dtype, "text")
    raise UserError(f"{name}: the label column must hold one class for each image, but holds {feature}")


def hold_out(name: str, labels: list[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows to evaluate on, both ascending: of each class the `fraction`, rounded, but one at least is trained on.

    A function of the labels, the fraction and the seed alone.

    Raises:
        UserError: no row would be held out.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed(seed, "split")))
    numbers = torch.tensor(labels)[order]
    counts = numbers.bincount()
    # Which one of its class each image is, in that order.
    place = torch.empty_like(order)
    place[numbers.argsort(stable=True)] = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    held = torch.minimum((counts * fraction).round().long(), counts - 1)[numbers]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[order] = place < held
    if not chosen.any():
        raise UserError(f"--val_fraction {fraction:g} of {name} holds out none of its {len(labels)} images: give a larger one")
    return (~chosen).nonzero().flatten().tolist(), chosen.nonzero().flatten().tolist()
