"""Reads `split=`: a policy that says how to weigh a model's operations, or cuts by hand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import current_cluster
from pippy.ir.base.errors import BalanceError
from pippy.ir.base.names import unknown_name
from pippy.ir.base.public_calls import is_whole
from pippy.ir.base.readable import brief, did_you_mean
from pippy.ir.cut.constraints import Constraint
from pippy.ir.cut.uses import scopes
from pippy.ir.record.compiled import Traced

Split = str | Sequence[str] | Sequence[int] | None

# Each policy and what it measures.
MEASURES = {"uniform": "layers", "parameters": "parameters", "type": "matches", "time": "time", "size": "memory"}
_KNOWN = ("auto", "uniform", "parameters", "type:REGEX", "time", "size")


@dataclass(frozen=True)
class Policy:
    """A split as the user gave it.

    ``kind`` is a key of MEASURES, or "names" or "counts" for cuts by hand. ``text`` is its name in reports. ``assumes`` says
    that parameters are balanced without being asked for, as nothing else is known.
    """

    kind: str
    text: str
    stages: int
    pattern: re.Pattern[str] | None = None
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = field(default=())
    assumes: bool = False

    @property
    def measure(self) -> str:
        """The measure of the costs in a report; for cuts by hand, their parameters."""
        return MEASURES.get(self.kind, "parameters")


def read_split(split: Split, num_stages: int | str | None, with_examples: bool) -> Policy:
    """The policy that ``split`` and ``num_stages`` ask for.

    >>> read_split("auto", 4, with_examples=True).text
    'time (auto)'
    >>> read_split([3, 3, 2], None, with_examples=False).stages
    3
    """
    if num_stages == "auto":
        num_stages = _number_of_workers()
    if not (num_stages is None or is_whole(num_stages)):
        raise BalanceError(
            f"num_stages is {brief(num_stages)}; give a number of stages, 1 or more, or 'auto' for as many as there are workers"
        )
    if split is None or isinstance(split, str):
        return _by_policy("auto" if split is None else split, num_stages, with_examples)
    if not isinstance(split, Sequence) or not split:
        raise BalanceError(f"split is {brief(split)}; {_ADVICE}")
    return _by_hand(list(split), num_stages)


def without_numbers(policy: Policy) -> Policy:
    """The policy for a model on the meta device, whose operations take no time. Raises if the split is by time."""
    if policy.kind != "time":
        return policy
    if policy.text != "time":
        return replace(policy, kind="parameters", text="parameters (auto)")
    raise BalanceError(
        "split='time' runs the model to measure it, and its parameters are on the meta device, where nothing is computed; give "
        "split='parameters' or split='size'"
    )


def _number_of_workers() -> int:
    try:
        return len(current_cluster()) - len(current_cluster().gone)
    except ClusterError as error:
        raise BalanceError(
            f"num_stages='auto' makes as many stages as the current cluster has workers, but {error}; or give a "
            "number, as in num_stages=4"
        ) from None


_ADVICE = (
    f"give one of {', '.join(map(repr, _KNOWN))}, a list of names of modules before which to cut, or a list with the number "
    "of layers of each stage"
)


def _by_policy(split: str, num_stages: int | None, with_examples: bool) -> Policy:
    kind, colon, pattern = split.partition(":")
    assumes = kind == "auto" and not with_examples
    if kind == "auto":
        kind, text = ("time", "time (auto)") if with_examples else ("parameters", "parameters (auto)")
    else:
        text = split
    if kind not in MEASURES or (kind == "type") != bool(colon):
        hint = did_you_mean(split, _KNOWN, most=1, cutoff=0.6)
        raise BalanceError(f"split is {brief(split)}; {hint}{' Else ' if hint else ''}{_ADVICE}")
    if num_stages is None:
        raise BalanceError(f"split={brief(split)} needs to know into how many stages; give num_stages=2, say")
    if kind in ("time", "size") and not with_examples:
        raise BalanceError(
            f"split={brief(split)} runs the model to measure it, and needs arguments for that: give example_args, those of one "
            "micro-batch, as you will call the Pipe with them (the loss's target last); or split='parameters', which runs "
            "nothing"
        )
    return Policy(kind, text, num_stages, _compiled(pattern) if kind == "type" else None, assumes=assumes)


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise BalanceError("split='type:' names no class; say which modules to count: split='type:TransformerBlock'")
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise BalanceError(f"split='type:{pattern}' is no regular expression: {error}") from None


def _by_hand(split: list[Any], num_stages: int | None) -> Policy:
    if all(isinstance(each, str) for each in split):
        policy = Policy("names", "hand", len(split) + 1, names=tuple(split))
    elif all(isinstance(each, int) and not isinstance(each, bool) for each in split):
        if min(split) < 1:
            raise BalanceError(f"split={brief(split)} has a stage without a layer; each number must be 1 or more")
        policy = Policy("counts", "hand", len(split), counts=tuple(split))
    else:
        raise BalanceError(f"split is {brief(split)}; {_ADVICE}")
    if num_stages not in (None, policy.stages):
        raise BalanceError(
            f"split={brief(split)} makes {policy.stages} stages, but num_stages={num_stages}; leave one of them out"
        )
    return policy


def matching_layers(traced: Traced, pattern: re.Pattern[str]) -> list[Constraint]:
    """The operations of each call of a module whose class name matches; of modules inside each other, the outermost."""
    layers: list[Constraint] = []
    inside: set[int] = set()
    kinds: dict[str, None] = {}
    for (_, path), (kind, numbers) in scopes(traced).items():
        kinds[kind.__name__] = None
        if pattern.search(kind.__name__) and not inside & set(numbers):
            inside.update(numbers)
            layers.append(Constraint(numbers[0], numbers[-1], f"{path} ({kind.__name__}) is one layer"))
    if not layers:
        raise BalanceError(
            f"split='type:{pattern.pattern}' matches the class of no module that the model calls; it calls "
            f"{', '.join(kinds) or 'none'}"
        )
    return layers


def named_cuts(traced: Traced, names: Sequence[str]) -> list[int]:
    """The operations before which to cut: the first of each named module, in its first call."""
    modules = dict(traced.model.named_modules(remove_duplicate=False))
    first_name = {id(module): name for name, module in traced.model.named_modules()}
    begins: dict[str, int] = {}
    for (_, path), (_, numbers) in scopes(traced).items():
        begins[path] = min(numbers[0], begins.get(path, numbers[0]))
    cuts: dict[int, str] = {}
    for name in names:
        at = _begin(name, modules, first_name, begins, traced)
        if at in cuts:
            raise BalanceError(f"split: {cuts[at]!r} and {name!r} begin with the same operation; name one of them")
        cuts[at] = name
    return sorted(cuts)


def _begin(
    name: str, modules: dict[str, nn.Module], first_name: dict[int, str], begins: dict[str, int], traced: Traced
) -> int:
    if name == "" or name not in modules:
        raise BalanceError("split: " + unknown_name("module", name, (known for known in modules if known)))
    at = begins.get(first_name[id(modules[name])])
    around = next((path for path in traced.kept_whole if name.startswith(f"{path}.")), None)
    if at is None and around is not None:
        raise BalanceError(
            f"split: {name!r} lies inside of {around!r}, which cannot be traced and is kept whole: {traced.kept_whole[around]}"
            f". Name {around!r} or a module outside of it, or write that line with torch functions (torch.where)"
        )
    if at is None:
        raise BalanceError(
            f"split: tracing saw no operation of {name!r}. Either forward does not call it, or it lies inside a module that is "
            "not traced through (a module of torch.nn, or a leaf of your tracer); name that module, or pass a tracer whose "
            "is_leaf_module says False for it"
        )
    if at == 0:
        raise BalanceError(
            f"split: {name!r} is where the model begins, so the stage before it would be empty; leave it out"
        )
    return at
