"""The layers of a list that are no modules: functions, and specifications of modules, which are made where they are used."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pippy.ir.base.errors import InitializationError
from pippy.ir.base.public_calls import check_words

_SPEC = "pippy.layer_spec"  # no part of a module can have this name, since it has a dot


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


class LayerSpec:
    """A layer that is made where it is used: a class of modules, or another function that gives one, and its arguments.

    `Pipe.from_sequential` takes a list of them. In the script's process they are made on the meta device; `driver.initialize`
    has each worker make those of its stages. See docs/large_models.md.

    >>> from pippy import Pipe
    >>> pipe = Pipe.from_sequential([LayerSpec(nn.Linear, 4, 8, bias=False), LayerSpec(nn.ReLU)])
    >>> pipe.get_parameter("0.weight").device
    device(type='meta')
    """

    def __init__(self, layer: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if isinstance(layer, nn.Module) or not callable(layer):
            raise InitializationError(
                f"{type(self).__name__} was given a {type(layer).__name__}; give the class of a module, and then its arguments"
            )
        check_words(getattr(layer, "__name__", "the layer"), kwargs, layer)
        self.layer, self.args, self.kwargs = layer, args, kwargs

    def build(self) -> nn.Module:
        """Make the layer."""
        made: object = self.layer(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise InitializationError(f"{self} gives a {type(made).__name__}, and a layer is a module")
        return made

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([getattr(self.layer, '__name__', repr(self.layer)), *arguments])})"


class TiedLayerSpec(LayerSpec):
    """A `LayerSpec` of a layer that is used in several places: those with the same key are one layer, with tied parameters.

    With ``forward_fn`` the layer is not called there, but ``forward_fn(layer, value)``.

    >>> from pippy import Pipe
    >>> def logits(embedding, x):
    ...     return x @ embedding.weight.T
    >>> first = TiedLayerSpec("embed", nn.Embedding, 9, 4)
    >>> last = TiedLayerSpec("embed", nn.Embedding, 9, 4, forward_fn=logits)
    >>> pipe = Pipe.from_sequential([first, LayerSpec(nn.Linear, 4, 4), last])
    >>> pipe.replicated_params
    [{'submod_0': '0.weight', 'submod_2': '2.layer.weight'}]
    """

    def __init__(
        self,
        key: str,
        layer: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn


class TiedLayer(nn.Module):
    """A layer that is called by a function, as it is used in another place in another way.

    >>> TiedLayer(nn.Identity(), lambda layer, value: layer(value) + 1)(2)
    3
    """

    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, value: Any) -> Any:
        """Call the function with the layer and a value."""
        return self.function(self.layer, value)


def note_spec(layer: nn.Module, spec: LayerSpec) -> None:
    """Remember what a layer was made from.

    >>> layer = nn.ReLU()
    >>> note_spec(layer, LayerSpec(nn.ReLU))
    >>> spec_of(layer)
    LayerSpec(ReLU)
    """
    layer.__dict__[_SPEC] = spec


def spec_of(module: nn.Module) -> LayerSpec | None:
    """What a layer was made from; None if it came as a module."""
    return module.__dict__.get(_SPEC)
