"""What data gives, item by item, as arguments of `driver.run`: one item is a mini-batch, or several are.

item                     arguments
─────────────────────────────────────────────────────────────────
a tensor                 run(chunks, tensor)
a tuple or a list        run(chunks, *item)
a dict                   run(chunks, **item)
several of one kind      each argument as `MicroBatches`: the micro-batches of one item after those of the other
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.columns import Column, joined_columns
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.trees import children, describe, leaves, tensors, with_children


@dataclass(frozen=True)
class RunCall:
    """The arguments of one call of `driver.run`."""

    chunks: int | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_of_items(items: Sequence[Any], chunks: int | None) -> RunCall:
    """The call that runs these items as one mini-batch, each in ``chunks`` micro-batches, or in fewer if it has fewer rows.

    The weights of the losses are those of all rows together, so that the items may differ in length and in rows.

    >>> call_of_items([(torch.ones(4, 2), torch.ones(4))], 2)
    RunCall(chunks=2, args=(tensor([[1., 1.],
            [1., 1.],
            [1., 1.],
            [1., 1.]]), tensor([1., 1., 1., 1.])), kwargs={})
    >>> call_of_items([{"x": torch.ones(4, 2)}, {"x": torch.ones(3, 5)}], 2)
    RunCall(chunks=4, args=(), kwargs={'x': MicroBatches([float32[2, 2], float32[2, 2], float32[2, 5], float32[1, 5]])})
    """
    calls = [_arguments(item, at) for at, item in enumerate(items)]
    if len(calls) == 1:
        args, kwargs = calls[0]
        return RunCall(_fitting(chunks, calls[0]), args, kwargs)
    if chunks is None:
        raise MicrobatchError(
            f"chunks=None: the driver does not choose the number of micro-batches when {len(calls)} items of data "
            "form one mini-batch; give the number of micro-batches of each item"
        )
    counts = [_fitting(chunks, call) or 1 for call in calls]
    args, kwargs = joined_items([tuple(call) for call in calls], counts, "item")
    return RunCall(sum(counts), tuple(args), dict(kwargs))


def next_call(data_iter: Iterator[Any], chunks: Any, method: str) -> RunCall:
    """The call of `driver.run` with the next ``chunks`` items, each of which is a micro-batch.

    >>> next_call(iter([torch.ones(2), torch.ones(3)]), 2, "train_batch")
    RunCall(chunks=2, args=(MicroBatches([float32[2], float32[3]]),), kwargs={})
    """
    check_count("chunks", chunks, "how many items of data are a mini-batch", DriverError)
    if not isinstance(data_iter, Iterator):
        raise DriverError(
            f"{method}() takes {chunks} items from an iterator at each call, but this is {describe(data_iter)}, not "
            "an iterator; call iter() once, before the loop, or give pippy.RepeatingLoader(loader)"
        )
    items = list(islice(data_iter, chunks))
    if len(items) < chunks:
        raise DriverError(
            f"the iterator ended after {len(items)} of the {chunks} micro-batches of this step, and nothing was run; "
            "pippy.RepeatingLoader(loader) begins anew at the end"
        )
    return call_of_items(items, 1)


def _arguments(item: Any, at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, torch.Tensor):
        return (item,), {}
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    raise MicrobatchError(
        f"data returned {describe(item)}, which cannot be matched with the model's arguments; it must return a "
        "tuple of the arguments, a dict of them by name, or one tensor. For a DataLoader, write a collate_fn that "
        "does so"
    )


def _fitting(chunks: int | None, call: Any) -> int | None:
    """How many micro-batches an item is cut into: not more than it has rows."""
    rows = {tensor.shape[0] for tensor in tensors(call) if tensor.dim()}
    rows |= {len(leaf) for leaf in leaves(call) if isinstance(leaf, Column)}
    return min(chunks, max(1, rows.pop())) if isinstance(chunks, int) and len(rows) == 1 else chunks


def joined_items(values: Sequence[Any], counts: Sequence[int], path: str) -> Any:
    """One value from those of several items: each of these is cut into as many micro-batches as ``counts`` says."""
    first = values[0]
    for value in values:
        if _shape(value) != _shape(first):
            raise MicrobatchError(
                f"items that form one mini-batch must have the same shapes, but {path} is {describe(first)} in one "
                f"item and {describe(value)} in another; make the items of data alike"
            )
    if isinstance(first, Column):
        return joined_columns(values, counts)
    held = children(first)
    if held is not None and not isinstance(first, MicroBatches):
        parts = zip(*[children(value) or () for value in values])
        return with_children(first, [joined_items(part, counts, f"{path}[{at}]") for at, part in enumerate(parts)])
    if isinstance(first, torch.Tensor) and first.dim():
        return MicroBatches([piece for value, count in zip(values, counts) for piece in value.tensor_split(count)])
    if all(_same_constant(value, first) for value in values):
        return first
    return MicroBatches([value for value, count in zip(values, counts) for _ in range(count)], dim=None)


def _shape(value: Any) -> Any:
    """What items must have in common: the containers, and where in them there are tensors with rows."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    held = children(value)
    return held if held is None else (type(value), list(value) if isinstance(value, Mapping) else len(held))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one is other or bool(type(one) is type(other) and one == other)
