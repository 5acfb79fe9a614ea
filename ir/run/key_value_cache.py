"""The keys and values that a stage of a language model keeps of one micro-batch: from token to token, and from slice to slice.

The graph of a stage says only which layer adds what. Whoever runs the stage says which cache that goes to: `using_cache`.

A `KeyValueCache` keeps those of all tokens so far. In training, a `SliceCache` keeps those of the slices of a sequence:

    forward    slice 0                slice 1                   slice 2
    keys       [k0          ]         [k0 k1      ]             [k0 k1 k2]       one buffer for the whole sequence
    reads       k0                     k0 k1                     k0 k1 k2        a view of it, as far as it is filled

    backward   slice 2                slice 1                   slice 0
    gives      of k0 k1, and of k2    of k0, and of k1          of k0
    takes                              of k1, from slice 2       of k0, from slice 2, then from slice 1

A later slice gives gradients of the keys and values that earlier ones have made. They are added up in the order in which the
backwards run, and each slice's backward begins with those of its own, beside the gradients of its outputs.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pippy.ir.run.stage_backward import edges_of

_using = threading.local()

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class KeyValueCache:
    """The keys and values of some layers: of all tokens so far, rows first and tokens in the second last dimension.

    >>> cache = KeyValueCache()
    >>> key = value = torch.zeros(2, 4, 3, 8)
    >>> extended = cache.extended(key, value, layer=0)
    >>> [each.shape[-2] for each in cache.extended(key[:, :, :1], value[:, :, :1], layer=0)]
    [4, 4]
    """

    def __init__(self) -> None:
        self.layers: dict[int, KeysAndValues] = {}

    def extended(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KeysAndValues:
        """Add the keys and values of the next tokens, and give those of all tokens so far."""
        if layer in self.layers:
            before = self.layers[layer]
            key, value = torch.cat((before[0], key), dim=-2), torch.cat((before[1], value), dim=-2)
        self.layers[layer] = key, value
        return key, value


@contextmanager
def using_cache(cache: KeyValueCache) -> Iterator[None]:
    """A context in which the graphs that this thread runs extend ``cache``."""
    before, _using.cache = getattr(_using, "cache", None), cache
    try:
        yield
    finally:
        _using.cache = before


def extended_cache(key: torch.Tensor, value: torch.Tensor, layer: int) -> KeysAndValues:
    """A node of a graph: `KeyValueCache.extended` of the cache that is used now."""
    cache: KeyValueCache = _using.cache
    return cache.extended(key, value, layer)


@dataclass
class _Buffer:
    """The keys, or the values, of one layer: ``whole`` of all slices so far, and ``gradients`` of those that wait for them."""

    whole: torch.Tensor
    gradients: torch.Tensor | None = None

    def take(self, gradients: torch.Tensor) -> None:
        """Add the gradients that a slice gives of what earlier slices have made."""
        if self.gradients is None:
            self.gradients = gradients.clone()
        else:
            self.gradients = self.gradients[..., : gradients.shape[-2], :].add_(gradients)


class _Extended(torch.autograd.Function):
    """Puts the keys or values of a slice into a buffer, and gives those of all tokens so far."""

    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, buffer: _Buffer, start: int) -> torch.Tensor:
        end = start + new.shape[-2]
        ctx.buffer, ctx.start = buffer, start
        # Later slices write behind what is read here, so a view of the buffer has to have its own version.
        buffer.whole.data[..., start:end, :].copy_(new)
        return buffer.whole.data[..., :end, :]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.start:
            ctx.buffer.take(gradient[..., : ctx.start, :])
        return gradient[..., ctx.start :, :], None, None


@dataclass
class MadeForLater:
    """Keys or values that a slice has made for later ones: the edge to them, and where they are in which buffer."""

    edge: Any
    buffer: _Buffer
    start: int
    end: int

    @property
    def gradients(self) -> torch.Tensor | None:
        """The gradients that later slices have given; None if none has."""
        whole = self.buffer.gradients
        return None if whole is None else whole[..., self.start : self.end, :]


class SliceCache(KeyValueCache):
    """The keys and values of one call of a stage, for a sequence that is cut into so many ``slices`` of the same length.

    >>> cache, keys = SliceCache(slices=2), torch.arange(4.0).reshape(1, 1, 4, 1).requires_grad_()
    >>> runs = []
    >>> for number in range(2):
    ...     with cache.running(number) as made:
    ...         read, _ = cache.extended(keys[:, :, 2 * number :][:, :, :2], keys.detach()[:, :, :2], layer=0)
    ...         runs.append((read.sum(), made))
    >>> for total, made in reversed(runs):
    ...     edges, gradients = roots(made)
    ...     torch.autograd.backward([total, *edges], [None, *gradients])
    >>> keys.grad.flatten()
    tensor([2., 2., 1., 1.])
    """

    def __init__(self, slices: int) -> None:
        super().__init__()
        self.slices = slices
        self._buffers: dict[tuple[int, int], _Buffer] = {}  # by the layer, of its keys and of its values
        self._now, self._made = 0, list[MadeForLater]()

    @contextmanager
    def running(self, number: int) -> Iterator[list[MadeForLater]]:
        """A context in which the graphs that this thread runs are those of a slice. Gives what they make for later slices."""
        made: list[MadeForLater] = []
        self._now, self._made = number, made
        with using_cache(self):
            yield made
        self._made = []  # else the graph of the latest slice would be held

    def keys(self) -> Iterator[torch.Tensor]:
        """The buffers of keys and values."""
        return (each.whole for each in self._buffers.values())

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that slices have given of what earlier ones have made."""
        return (each.gradients for each in self._buffers.values() if each.gradients is not None)

    def extended(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KeysAndValues:
        return self._extended(key, layer, 0), self._extended(value, layer, 1)

    def _extended(self, new: torch.Tensor, layer: int, which: int) -> torch.Tensor:
        *front, length, size = new.shape
        start = self._now * length
        if (layer, which) not in self._buffers:
            self._buffers[layer, which] = _Buffer(new.new_empty(*front, self.slices * length, size))
        buffer = self._buffers[layer, which]
        if new.requires_grad and self._now < self.slices - 1:
            self._made.append(MadeForLater(edges_of(new), buffer, start, start + length))
        extended: torch.Tensor = _Extended.apply(new, buffer, start)
        return extended


def roots(made: Iterable[MadeForLater]) -> tuple[list[Any], list[torch.Tensor]]:
    """What the backward of a slice begins with beside its outputs: edges to what it has made, and the gradients of that."""
    found = [(each.edge, each.gradients) for each in made]
    with_gradients = [(edge, gradients) for edge, gradients in found if gradients is not None]
    return [edge for edge, _ in with_gradients], [gradients for _, gradients in with_gradients]
