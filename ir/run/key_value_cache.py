"""The keys and values that a stage of a language model keeps from one token to the next, of one micro-batch.

The graph of a stage says only which layer adds what. Whoever runs the stage says which cache that goes to: `using_cache`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
