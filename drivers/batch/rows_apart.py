"""What to do where a mini-batch cannot be cut: its values have different numbers of rows, or forward fails for some of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pippy.drivers.base.errors import StepError
from pippy.drivers.batch.division import CutTensor, DividedValue, Division, SameForAll
from pippy.drivers.batch.specs import items_with_paths, spec_of_parts
from pippy.ir.base.brief import some
from pippy.ir.base.readable import listed
from pippy.ir.base.trees import tensors

_ONE = "run one micro-batch, chunks=1"


def advice_for_rows(values: Mapping[str, Any], cut: Sequence[tuple[str, int]], held: Mapping[str, torch.Tensor]) -> str:
    """What to do where some ``values`` have other numbers of rows. ``cut`` has the places of what is cut, with its rows.

    ``held`` are the tensors at these places. The rows of the mini-batch are those of most arguments.

    >>> x, mask = torch.zeros(4, 3), torch.zeros(3, 4)
    >>> print(advice_for_rows({"x": x, "mask": mask}, [("x", 4), ("mask", 3)], {"x": x, "mask": mask}))
    If the rows of 'mask' are along dimension 1: chunk_spec={'mask': TensorChunkSpec(1)}
    If every micro-batch needs all of 'mask', not a part of it for its rows: chunk_spec={'mask': Replicate()}
    If it says which rows belong together, as the edges of a graph do, rows cannot be cut apart: run one micro-batch, chunks=1
    """
    votes = [rows for _, rows in dict.fromkeys((_argument(path, values), rows) for path, rows in cut)]
    usual = max(votes, key=votes.count)  # the first of several
    odd = [path for path, rows in cut if rows != usual]
    flat = [path for path in odd if any(_tells_rows(each, held.get(path)) for each in held.values())]
    lists = [name for name, value in values.items() if _has_rows_as_items(name, value, usual, odd)]
    if flat:
        return (
            f"{flat[0]!r} holds all rows in one dimension, and another value says where each begins, or how long it is, so it "
            "cannot be cut. Give a tensor of two dimensions, padded (nn.EmbeddingBag then takes padding_idx and no offsets); "
            f"or {_ONE}"
        )
    if lists:
        name = lists[0]
        return (
            f"{name!r} is a list with a value for each row, and a micro-batch would be given a part of each value. Cut the "
            f"list yourself, into pieces of one length, MicroBatches([{name}[:n], {name}[n:]], dim=None), of a Pipe whose "
            f"example has one piece; or {_ONE}"
        )
    return "\n".join(_conditions(values, odd, {path: _dims_of(held.get(path), usual) for path in odd}))


def _conditions(values: Mapping[str, Any], odd: Sequence[str], dims: Mapping[str, Sequence[int]]) -> Iterator[str]:
    named = listed(some(map(repr, odd)))
    turned = {path: f"TensorChunkSpec({found[0]})" for path, found in dims.items() if len(found) == 1}
    if len(turned) == len(odd):
        along = " and ".join(sorted({str(found[0]) for found in dims.values()}))
        yield f"If the rows of {named} are along dimension {along}: {_written(values, turned)}"
    replicated = _written(values, dict.fromkeys(odd, "Replicate()"))
    yield f"If every micro-batch needs all of {named}, not a part of it for its rows: {replicated}"
    yield f"If it says which rows belong together, as the edges of a graph do, rows cannot be cut apart: {_ONE}"


def _written(values: Mapping[str, Any], specs: Mapping[str, str]) -> str:
    """The specs of some places, as they are given to a driver."""

    def written(value: Any, path: str) -> str:
        return specs.get(path) or spec_of_parts(value, path, written)

    texts = {name: written(value, name) for name, value in values.items()}
    return f"chunk_spec={{{', '.join(f'{name!r}: {text}' for name, text in texts.items() if text != 'None')}}}"


def _argument(path: str, values: Mapping[str, Any]) -> str:
    """The argument that a place is in."""
    return next((name for name in values if path == name or path.startswith((f"{name}[", f"{name}."))), path)


def _dims_of(tensor: torch.Tensor | None, rows: int) -> list[int]:
    return [] if tensor is None else [dim for dim, size in enumerate(tensor.shape) if size == rows]


def _tells_rows(value: torch.Tensor, flat: torch.Tensor | None) -> bool:
    """Whether a value says where each row of ``flat`` begins, as nn.EmbeddingBag takes it, or how long it is, as F.ctc_loss."""
    if flat is None or flat is value or any(each.dim() != 1 or each.is_floating_point() for each in (value, flat)):
        return False
    if not len(value) or value.dtype == torch.bool or value.is_meta or bool((value < 0).any()):
        return False
    begins = bool(value[0] == 0 and (value.diff() >= 0).all() and value[-1] <= len(flat))
    return begins or int(value.sum()) == len(flat)


def _has_rows_as_items(name: str, value: Any, rows: int, odd: Sequence[str]) -> bool:
    items = items_with_paths(value, name) if isinstance(value, (list, tuple)) else None
    return items is not None and len(items) == rows and {path for path, _ in items} <= set(odd)


@contextmanager
def advising(division: Division) -> Iterator[None]:
    """A context in which the error of a step says what the micro-batch was given for which forward has failed."""
    try:
        yield
    except StepError as error:
        failure = error.failure
        if failure is not None and failure.instruction.startswith("F") and failure.microbatch is not None:
            advice = advice_for_failure(division, failure.microbatch)
            if advice not in str(error) and "What to do" not in failure.message:
                error.args = (f"{error}\n\n{advice}",)
        raise


def advice_for_failure(division: Division, microbatch: int) -> str:
    """What a micro-batch was given, and what to do if forward fails for it; empty if it is the whole mini-batch.

    >>> from pippy.drivers.batch.divide import divide
    >>> print(advice_for_failure(divide({"x": torch.zeros(4, 4), "scale": 2}, chunks=2), 0))
    Micro-batch 0 was given rows 0 to 1 of 4: 'x' along dimension 0
    If the rows of 'x' are along dimension 1, which is as long: chunk_spec={'x': TensorChunkSpec(1)}
    If the whole mini-batch runs, rows cannot be cut apart: run one micro-batch, chunks=1
    """
    rows = division.rows_shown(microbatch)
    if not rows or division.rows is None:
        return ""
    places = [each for user, name in division.names.items() for each in _leaves(division.arguments.get(name), user)]
    cut = {path: leaf for path, leaf in places if isinstance(leaf, CutTensor)}
    given = [f"{path!r} along dimension {leaf.dim}" for path, leaf in cut.items()]
    given += [
        f"all of {path!r}"
        for path, leaf in places
        if isinstance(leaf, SameForAll) and any(each.dim() for each in tensors(leaf.value))
    ]
    lines = [f"Micro-batch {microbatch} was given {rows}: {listed(given)}"]
    for path, leaf in cut.items():
        others = [dim for dim in _dims_of(leaf.value, division.rows) if dim]
        if leaf.dim == 0 and others and path in division.names:
            spec = f"chunk_spec={{{path!r}: TensorChunkSpec({others[0]})}}"
            lines.append(f"If the rows of {path!r} are along dimension {others[0]}, which is as long: {spec}")
    return "\n".join([*lines, f"If the whole mini-batch runs, rows cannot be cut apart: {_ONE}"])


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, DividedValue]]:
    if isinstance(tree, DividedValue):
        yield path, tree
    else:
        for where, item in items_with_paths(tree, path) or []:
            yield from _leaves(item, where)
