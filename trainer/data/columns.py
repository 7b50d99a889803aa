"""Which column of a table holds the images, and which one the labels."""

from typing import TYPE_CHECKING, Any

from trainer.data.row_groups import StreamedRows
from trainer.runtime import UserError

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_COLUMNS = ("image", "img", "pixel_values", "picture", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "cls")


def names(columns: "dict[str, Any] | Dataset | StreamedRows") -> str:
    """Names of splits, or of a split's columns, quoted."""
    return ", ".join(f"'{name}'" for name in (columns if isinstance(columns, dict) else columns.column_names))


def is_image_column(feature: Any) -> bool:
    """Whether a column holds encoded images: `datasets`' own type, the files' bytes, or bytes and path, as other programs write them."""
    import datasets

    if isinstance(feature, dict):
        return set(feature) == {"bytes", "path"}
    return isinstance(feature, datasets.Image) or (isinstance(feature, datasets.Value) and "binary" in feature.dtype)


def find_columns(name: str, train: "Dataset | StreamedRows", image: str | None, label: str | None) -> tuple[str, str]:
    """The image column and the label column, named or found.

    Args:
        name: what error messages call the data set.

    Raises:
        UserError: there is none, or not the named one.
    """
    import datasets

    features = train.features
    images = [column for column, feature in features.items() if is_image_column(feature)]
    labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    for flag, column in (("--image_column", image), ("--label_column", label)):
        if column is not None and column not in features:
            raise UserError(f"{flag} {column}: {name} has only the columns {names(train)}: name one of them")
    if image is not None and image not in images:
        raise UserError(f"--image_column {image}: in {name} it holds {features[image]}, and no images: name another one")
    image = image or next((column for column in IMAGE_COLUMNS if column in images), images[0] if len(images) == 1 else None)
    label = label or next((column for column in LABEL_COLUMNS if column in features), labels[0] if len(labels) == 1 else None)
    if image is None:
        usual = ", ".join(IMAGE_COLUMNS)
        raise UserError(f"{name} has no image column ({usual}); its columns are {names(train)}: name it by --image_column")
    if label is None:
        usual = ", ".join(LABEL_COLUMNS)
        raise UserError(f"{name} has no label column ({usual}); its columns are {names(train)}: name it by --label_column")
    return image, label


def undecoded(part: Any, image: str, label: str) -> Any:
    """The two columns alone, as `image` ({"bytes", "path"}) and `label`, of a `datasets.Dataset` or `StreamedRows`: the same again."""
    if isinstance(part, StreamedRows):
        return part.with_columns(image, label)
    import datasets

    part = part.select_columns([image, label]).rename_columns({old: new for old, new in ((image, "image"), (label, "label")) if old != new})
    return part.cast_column("image", datasets.Image(decode=False))
