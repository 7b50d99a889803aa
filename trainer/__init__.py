"""An image-classification trainer for one GPU or many, on Hugging Face Accelerate.

    from trainer import Config, train
    results = train(Config(epochs=1))
    from trainer import load_model
    model, preprocess = load_model("runs/mine/model")

Reading order: main.py (the command), loop.py (the training loop), hooks/ (one file each), config.py (every knob), data/sampler.py
(which rank sees which sample), state.py (how a run is built), runtime.py (how processes agree and end), library.py (training from
Python).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.hooks.base import Hook
    from trainer.hub import Classifier
    from trainer.inference import load_model
    from trainer.library import train
    from trainer.runtime import RunError, Stopped, UserError
    from trainer.state import Run

__all__ = ["Classifier", "Config", "Hook", "Run", "RunError", "Stopped", "UserError", "load_model", "train"]

PLACES = {
    "Classifier": "hub",
    "Config": "config",
    "Hook": "hooks.base",
    "Run": "state",
    "RunError": "runtime",
    "Stopped": "runtime",
    "UserError": "runtime",
    "load_model": "inference",
    "train": "library",
}


def __getattr__(name: str) -> Any:
    """The public names, each imported when it is asked for: flags are parsed before torch is loaded."""
    if name not in PLACES:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(import_module(f"trainer.{PLACES[name]}"), name)
