"""The layers of a list that are no modules, as modules: stages call them, on workers too."""

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionLayer(nn.Module):
    """A function as a layer: it takes what the layer before it gives.

    >>> FunctionLayer(len)
    FunctionLayer(len)
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        """Call the function."""
        return self.function(value)

    def extra_repr(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__qualname__", repr(self.function))
