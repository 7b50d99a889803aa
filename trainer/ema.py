"""An exponential moving average of the weights, which is evaluated and exported in their place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """average = d x average + (1 - d) x weight after each update, for every parameter of `module`, beginning with what they are.

    Buffers have no average: with the averaged weights go the module's own, as in training. The average depends on nothing but the weights
    and the number of updates, so ranks with equal weights have equal averages without a word between them.

    Args:
        decay: d, 0..1; in the beginning it is (1 + n) / (10 + n) after n updates where that is lower, so that the first weights,
            which have learnt nothing, are soon forgotten (as TensorFlow's ExponentialMovingAverage does with `num_updates`).

    Attributes:
        averages: by the parameters' names, on their device.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(module.named_parameters())
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def update(self, step: int) -> None:
        """Take up the weights after update number `step`, counted from 1."""
        move = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        move(list(self.averages.values()), list(self._parameters.values()), 0)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module holds the averages inside, and its weights again, to the bit, outside, whatever ends the block."""
        weights: list[Tensor] = list(self._parameters.values())
        with torch.no_grad():
            held = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, list(self.averages.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, held)

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Go on with `averages`, as another `Ema` of such a module had them; with the weights themselves when there are none.

        Raises:
            ValueError: they are not those of this module.
        """
        for name, average in self.averages.items():
            source = averages.get(name) if averages else self._parameters[name].detach()
            if source is None or source.shape != average.shape:
                raise ValueError(f"it has no average for the weight {name} of shape {tuple(average.shape)}")
            average.copy_(source)
        unknown = averages.keys() - self.averages.keys()
        if unknown:
            raise ValueError(f"its average {min(unknown)} is of no weight of the model")
