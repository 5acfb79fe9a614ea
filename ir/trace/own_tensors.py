"""Whether a module has the parameters and buffers with which tracing began: a node that calls it would run it with those.

    torch.func.functional_call(self.base, {"weight": made}, x)      self.base(x), while its weight is another tensor
    self.conv.weight = self.hyper(z)                                self.conv(x), with what forward has put there

Such a call is traced through, into the operations on the tensors that the module has at that moment.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import _named_member_accessor

from pippy.ir.trace.tracing_thread import patched_here


class OwnTensors:
    """The tensors that each module of a model has now.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> own = OwnTensors(net)
    >>> before = own.are_others(net[0])
    >>> net[0].weight = nn.Parameter(torch.ones(2, 2))
    >>> before, own.are_others(net[0])
    (False, True)
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {id(each): list(_tensors(each)) for each in model.modules()}

    def are_others(self, module: nn.Module) -> bool:
        """Whether the module, or one inside of it, has others now."""
        return any(not _same(self._before.get(id(each)), list(_tensors(each))) for each in module.modules())


def letting_proxies_be_tensors() -> AbstractContextManager[None]:
    """A context in which `functional_call` takes proxies for tensors of a module."""
    torchs: Any = _named_member_accessor
    plain = torchs.swap_tensor

    def swap(module: nn.Module, name: str, tensor: Any, *rest: Any, **options: Any) -> Any:
        held: Any = next((each for each in (module._parameters, module._buffers) if name in each), None)
        if held is None or not issubclass(type(tensor), fx.Proxy):
            return plain(module, name, tensor, *rest, **options)
        before, held[name] = held[name], tensor
        return before

    return patched_here(torchs, "swap_tensor", swap)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):
        return
    for held in (module._parameters, module._buffers, module.__dict__):
        for name, value in held.items():
            if issubclass(type(value), (torch.Tensor, fx.Proxy)):  # isinstance() would ask a proxy for its class
                yield name, value


def _same(one: list[tuple[str, Any]] | None, other: list[tuple[str, Any]]) -> bool:
    return one is not None and len(one) == len(other) and all(a == b and x is y for (a, x), (b, y) in zip(one, other))
