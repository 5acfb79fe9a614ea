"""The bytes of an optimizer's state. They are counted after one step on fake tensors, which have shapes and no numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.ir.base.readable import brief
from pippy.ir.base.without_dynamo import DispatchMode

Group = tuple[Sequence[torch.Tensor], Mapping[str, Any]]  # parameters, and their options


@dataclass(frozen=True)
class CountedOptimizer:
    """An optimizer whose state is counted: how it is made, the parameters of each group (None: all), the dtype of copies.

    If the state is divided among replicas, ``shares`` has the names of the parameters that each worker updates, by stage.
    """

    make: Callable[[list[dict[str, Any]]], Optimizer]
    groups: tuple[tuple[frozenset[str] | None, Mapping[str, Any]], ...]
    master_dtype: torch.dtype | None = None
    shares: Mapping[int, Mapping[int, frozenset[str]]] | None = None

    def of(self, parameters: Mapping[str, torch.Tensor], mode: Any, unit: int) -> int:
        """The bytes of its state for these fake parameters."""
        groups = [
            ([each for name, each in parameters.items() if names is None or name in names], options)
            for names, options in self.groups
        ]
        return state_bytes(self.make, groups, mode, unit, self.master_dtype)

    def of_workers(self, stages: Sequence[Mapping[str, torch.Tensor]], mode: Any, unit: int) -> dict[int, int]:
        """The bytes on each worker of a state that is divided. ``stages`` are the fake parameters of all stages."""
        return {
            worker: sum(
                self.of({name: each for name, each in stages[stage].items() if name in names}, mode, unit)
                for stage, names in shares_of_stages.items()
            )
            for worker, shares_of_stages in (self.shares or {}).items()
        }


def counted_optimizer(make: Callable[..., Optimizer]) -> CountedOptimizer:
    """An optimizer class, or a function of parameters that makes an optimizer, for all parameters."""
    if not callable(make):
        raise OptimizerError(
            f"optimizer={brief(make)}: give a class, as in optimizer=torch.optim.AdamW, or a function of parameters"
        )
    return CountedOptimizer(make, ((None, {}),))


class _OneForNumbers(DispatchMode):
    """Answers 1 where an optimizer asks for the number in a tensor. That is the count of its steps; no size depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


def state_bytes(
    make: Callable[[list[dict[str, Any]]], Optimizer],
    groups: Sequence[Group],
    mode: Any,
    unit: int = 1,
    master_dtype: torch.dtype | None = None,
) -> int:
    """The bytes that an optimizer holds after a step on fake parameters: moments, counts, copies of parameters.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode() as mode:
    ...     weight = torch.nn.Parameter(torch.empty(8, 8))
    >>> state_bytes(torch.optim.AdamW, [([weight], {"lr": 0.1})], mode), state_bytes(torch.optim.SGD, [([weight], {})], mode)
    (516, 0)
    """
    live = LiveStorages(unit)
    wanted: list[dict[str, Any]] = []
    with mode, live, _OneForNumbers():
        live.add(each for parameters, _ in groups for each in parameters)
        before = live.bytes
        for parameters, options in groups:
            copies = [_copy(each, master_dtype) for each in parameters if each.requires_grad]
            if copies:
                wanted.append({**options, "params": copies})
        if not wanted:
            return 0
        optimizer = make(wanted)
        for group in wanted:
            for each in group["params"]:
                each.grad = torch.empty_like(each)
        optimizer.step()
        for group in wanted:
            for each in group["params"]:
                each.grad = None
        return live.bytes - before


def _copy(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
        return parameter
    return parameter.detach().to(dtype).requires_grad_()
