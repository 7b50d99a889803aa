"""An image-classification trainer for one GPU or many, on Hugging Face Accelerate.

    from trainer import load_model
    model, preprocess = load_model("runs/mine/model")

Reading order: main.py (the command), loop.py (the training loop), hooks/ (one file each), config.py (every knob), data/sampler.py
(which rank sees which sample), state.py (how a run is built), runtime.py (how processes agree and end).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.hub import Classifier
    from trainer.inference import load_model

__all__ = ["Classifier", "load_model"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: a mistyped flag is answered before torch is there."""
    if name == "load_model":
        from trainer.inference import load_model

        return load_model
    if name == "Classifier":
        from trainer.hub import Classifier

        return Classifier
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
