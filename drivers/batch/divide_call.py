"""Dividing the arguments of a call: specs are found by the names of the model's arguments, as the arguments are."""

from collections.abc import Mapping, Sequence
from typing import Any

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.columns import loaded_columns
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.division import Division
from pippy.ir.base.errors import GuardError
from pippy.ir.base.readable import brief
from pippy.ir.call.signature import bind, call_signature, check_guards
from pippy.ir.record.compiled import Compiled


def divide_call(
    compiled: Compiled,
    chunks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chunk_spec: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: Sequence[int | None] | Mapping[str, int | None] | None = None,
    mask: bool = False,
) -> Division:
    """Divide the arguments of a call of the Pipe. ``chunk_spec`` and ``batch_dims`` are given by name, or in order as ``args``.

    >>> import torch
    >>> from torch import nn
    >>> from pippy.ir.pipe import Pipe, compiled_of
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.MSELoss())
    >>> args = torch.ones(3, 5), torch.ones(5, 2)
    >>> division = divide_call(compiled_of(pipe), 2, args, {}, batch_dims=[1])
    >>> division.sizes, division.take("target", 1).shape, division.take("input_1", 1).shape
    ((3, 2), torch.Size([2, 2]), torch.Size([3, 2]))
    """
    division = divide_unguarded(compiled, chunks, args, kwargs, chunk_spec, batch_dims, mask)
    check_guards_of(compiled, division)
    return division


def divide_unguarded(
    compiled: Compiled,
    chunks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chunk_spec: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: Sequence[int | None] | Mapping[str, int | None] | None = None,
    mask: bool = False,
    values: Mapping[str, Any] | None = None,
) -> Division:
    """Divide the arguments of a call, whatever sizes micro-batches have. ``values`` are those of the model's own arguments, if
    these are to be divided, and not the inputs of the Pipe."""
    users = {node.name: str(node.target).lstrip("*") for node in compiled.split_gm.graph.find_nodes(op="placeholder")}
    if values is None:
        values = bind(compiled, args, kwargs)
    else:
        users = {name: name for name in values}
    by_name = _specs_of_call(compiled, args, kwargs, chunk_spec, "chunk_spec")
    for name, dim in _specs_of_call(compiled, args, kwargs, _without_zero(batch_dims), "batch_dims").items():
        by_name[name] = _either(name, by_name.get(name), dim)
    by_input = {name: by_name[user] for name, user in users.items() if user in by_name}
    return divide(values, chunks, by_input, mask=mask, names={user: name for name, user in users.items()})


def check_guards_of(compiled: Compiled, division: Division) -> None:
    """Raise if a micro-batch is not as the Pipe needs it."""
    fault = failed_guard(compiled, division)
    if fault is not None:
        raise fault


def failed_guard(compiled: Compiled, division: Division, microbatch: int | None = None) -> GuardError | None:
    """The error for a micro-batch that is not as the Pipe needs it; None if there is none. One of each size is checked, or one
    alone."""
    names = guarded_inputs(compiled, division)
    if not compiled.guards.are_of_rows or any(loaded_columns(division.arguments[name]) for name in names):
        return None
    sizes = enumerate(division.sizes or (0,))
    chosen = {(size, chunk % division.slices): chunk for chunk, size in sizes}.values()
    for chunk in chosen if microbatch is None else (microbatch,):
        try:
            check_guards(compiled, {name: division.take(name, chunk) for name in names})
        except GuardError as error:
            rows = division.rows_shown(chunk)
            sized = f"\nThese are the sizes of micro-batch {chunk}, which has {rows}" if rows else ""
            return GuardError(f"{error}{sized}")
    return None


def guarded_inputs(compiled: Compiled, division: Division) -> list[str]:
    """The inputs that `check_guards` looks at, by their names in the Pipe."""
    names = (division.names.get(name) for name in compiled.guards.checked_names)
    return [name for name in names if name is not None and name in division.arguments]


def _without_zero(dims: Sequence[int | None] | Mapping[str, int | None] | None) -> Any:
    """0 is the default, and users of PiPPy write it for values without rows too."""
    if isinstance(dims, Mapping):
        return {name: dim or None for name, dim in dims.items()}
    return None if dims is None else [dim or None for dim in dims]


def _either(name: str, spec: Any, dim: Any) -> Any:
    if isinstance(dim, dict):  # of **kwargs
        spec = spec or {}
        return {key: _either(f"{name}[{key!r}]", spec.get(key), dim.get(key)) for key in {**spec, **dim}}
    if isinstance(dim, tuple):  # of *args
        spec = spec if isinstance(spec, tuple) else (spec,) * len(dim)
        longest = max(len(spec), len(dim))
        padded = [(*each, *(None,) * (longest - len(each))) for each in (spec, dim)]
        return tuple(_either(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(*padded)))
    if spec is not None and dim is not None:
        raise MicrobatchError(
            f"{name} has both a spec, {brief(spec)}, and a batch dim, {brief(dim)}; give only one of them"
        )
    return dim if spec is None else spec


def _specs_of_call(
    compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Any, what: str
) -> dict[str, Any]:
    """Specs by the names of the model's arguments: bound as the arguments are."""
    if specs is None:
        return {}
    if isinstance(specs, Mapping):
        return _specs_by_argument(compiled, specs, what)
    if not isinstance(specs, (list, tuple)) or len(specs) > len(args):
        raise MicrobatchError(
            f"{what} is {brief(specs)}, and the call has {len(args)} positional arguments; give one for each, in order, or a "
            "dict by name"
        )
    in_order, by_name = [*specs, *[None] * (len(args) - len(specs))], {}
    if compiled.target_name is not None and compiled.target_name not in kwargs:
        by_name[compiled.target_name] = in_order.pop()
    by_name.update(call_signature(compiled).bind_partial(*in_order).arguments)
    return {name: spec for name, spec in by_name.items() if spec is not None}


def _specs_by_argument(compiled: Compiled, specs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What ``**kwargs`` takes may be named as in the call."""
    parameters = call_signature(compiled).parameters
    rest = next((name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD), None)
    known = [*parameters, *([compiled.target_name] if compiled.target_name else [])]
    by_name = {name: spec for name, spec in specs.items() if name in known and spec is not None}
    unknown = {name: spec for name, spec in specs.items() if name not in known and spec is not None}
    if unknown and rest is None:
        raise MicrobatchError(f"{what} names {list(unknown)}, which are not inputs; the inputs are {', '.join(known)}")
    if unknown and rest is not None:
        by_name[rest] = {**by_name.get(rest, {}), **unknown}
    return by_name
