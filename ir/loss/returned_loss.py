"""The loss as one of the values that the model returns. A specification, `output_loss_value_spec`, says which.

The specification has the shape of what the model returns, with True for the loss; there are short forms:

    the model returns                       specification
    ──────────────────────────────────────────────────────────────────────────────────────────
    loss                                    True
    (loss, logits)                          (True, False)                       or 0
    {"loss": loss, "logits": logits}        {"loss": True, "logits": False}     or "loss", or None
    Output(loss=loss, logits=logits)        {"loss": True, "logits": False}     or "loss", or 0, or None
    Output(parts={"loss": loss})            {"parts": {"loss": True}}           or {"parts": "loss"}

The search goes through two graphs, since a container can be made at two places:

    1. The top-level graph returns a tuple, list or dict of nodes. The specification leads to one of them (`_marked`).
    2. If something of the specification is left, it leads into the value of that node: a dataclass, a named tuple or a
       mapping that the last stage makes. The names of its fields are those of the class (`_fields`). Then the
       seed of the backward is a list, with `SEED` for the field that is the loss and None for the others.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from pippy.ir.base.errors import LossError
from pippy.ir.base.readable import brief
from pippy.ir.loss.loss_function import LossWrapper
from pippy.ir.record.compiled import Compiled, Loss, maker_of
from pippy.ir.run.stage_backward import SEED

LossSpec = bool | str | int | Sequence[Any] | Mapping[str, Any] | None


def default_loss_spec(compiled: Compiled, model: nn.Module) -> LossSpec:
    """The specification if the user gives none: all that a LossWrapper returns, or what is called "loss"."""
    output = _returned(compiled)
    declared = getattr(model, "loss_spec", None) if isinstance(model, LossWrapper) else None
    if declared is not None:
        return declared
    items = output if isinstance(output, Mapping) else {}
    if isinstance(output, fx.Node):
        items = _fields(compiled, output)
    if items.get("loss") is not None:  # a model may return None there, if it is given no labels
        return "loss"
    if isinstance(model, LossWrapper):
        if isinstance(output, fx.Node):
            return True
        raise LossError(
            f"{type(model).__name__} returns {_shape(output)}; say with output_loss_value_spec which of it is the loss, for "
            "example (True, False) or {'loss': True, 'logits': False}"
        )
    return None


def find_returned_loss(compiled: Compiled, spec: LossSpec) -> None:
    """Record as the loss the value that ``spec`` marks."""
    if spec is not None and spec is not False:
        compiled.loss = _Search(compiled, spec).loss()


def _returned(compiled: Compiled) -> Any:
    return compiled.split_gm.graph.output_node().args[0]


class _Search:
    """The search for the loss that one specification marks."""

    def __init__(self, compiled: Compiled, spec: LossSpec) -> None:
        self.compiled, self.whole_spec = compiled, spec

    def loss(self) -> Loss:
        output = _returned(self.compiled)
        marked = self._marked(output, self.whole_spec)
        if len(marked) != 1:
            raise self._error(f"marks {len(marked)} values as the loss; mark exactly one of {_shape(output)}")
        value, rest = marked[0]
        if not isinstance(value, fx.Node) or value.op == "placeholder":
            raise self._error(f"marks {value!r} as the loss, which no stage computes")
        return Loss(value.name, SEED if rest is True else self._inner_seed(value, rest))

    def _error(self, fault: str) -> LossError:
        return LossError(f"output_loss_value_spec {brief(self.whole_spec)} {fault}")

    def _marked(self, output: Any, spec: Any) -> list[tuple[Any, Any]]:
        """The nodes that ``spec`` leads to, each with what is left of the specification: True if nothing is."""
        if spec is False or spec is None:
            return []
        if spec is True:
            return [(self._node(output), True)]
        if isinstance(output, fx.Node):
            return [(output, spec)]
        if isinstance(spec, (str, int)):
            spec = self._in_full(output, spec)
        if isinstance(spec, Mapping) and isinstance(output, Mapping) and set(spec) == set(output):
            return [marked for key in output for marked in self._marked(output[key], spec[key])]
        if _is_sequence(spec) and _is_sequence(output) and len(spec) == len(output):
            return [marked for item, item_spec in zip(output, spec) for marked in self._marked(item, item_spec)]
        raise self._error(f"does not have the shape of what the model returns, {_shape(output)}")

    def _node(self, output: Any) -> fx.Node:
        if isinstance(output, fx.Node):
            return output
        if output is None:
            raise self._none()
        hint = "mark one value in it" if isinstance(output, (Sequence, Mapping)) else "which is a constant"
        raise self._error(f"marks {_shape(output)} as the loss; {hint}")

    def _none(self) -> LossError:
        return self._error(
            "marks what is None in the values that the model returns; leave the specification out for a Pipe without a loss, "
            "or have the model return its loss there"
        )

    def _in_full(self, output: Any, key: str | int) -> Any:
        """The short form ``key`` written in full, in the shape of ``output``."""
        if isinstance(output, Mapping) and key in output:
            return {name: name == key for name in output}
        if isinstance(key, str) and key in getattr(output, "_fields", ()):
            return [name == key for name in output._fields]
        if _is_sequence(output) and isinstance(key, int) and -len(output) <= key < len(output):
            return [index == key % len(output) for index in range(len(output))]
        raise self._error(f"names nothing in what the model returns, {_shape(output)}")

    def _inner_seed(self, value: fx.Node, spec: Any) -> list[Any]:
        """The seed for a loss that is a field of ``value``."""
        fields = _fields(self.compiled, value)
        if not fields:
            raise self._error(
                f"looks inside {value.name!r}, but tracing does not know what that is made of; "
                "return the loss as an output of its own"
            )
        seed = self._seed_of(fields, spec)
        if _count(seed) != 1:
            raise self._error(f"does not mark one of the fields {list(fields)}")
        return seed

    def _seed_of(self, held: Mapping[Any, Any], spec: Any) -> list[Any]:
        flags = _field_flags(list(held), spec)
        return [self._seed_at(item, flag) for item, flag in zip(held.values(), flags)]

    def _seed_at(self, held: Any, flag: Any) -> Any:
        """The seed for what a field holds: for a list or a dict, what is left of the specification may lead into it."""
        if flag is True and held is None:
            raise self._none()
        if flag is True or flag is None or flag is False:
            return SEED if flag else None
        items = dict(enumerate(held)) if _is_sequence(held) else held
        return self._seed_of(items, flag) if isinstance(items, Mapping) else None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _count(seed: Any) -> int:
    """How many values a seed marks."""
    return sum(map(_count, seed)) if isinstance(seed, list) else int(seed is SEED)


def _field_flags(names: list[Any], spec: Any) -> list[Any]:
    """For each field, whether ``spec`` marks it; empty if ``spec`` does not fit the fields."""
    if isinstance(spec, Mapping):
        return [spec.get(name) for name in names] if set(spec) <= set(names) else []
    if _is_sequence(spec):
        return list(spec) if len(spec) == len(names) else []
    return [spec in (name, index, index - len(names)) for index, name in enumerate(names)]


def _fields(compiled: Compiled, value: fx.Node) -> dict[str, Any]:
    """The fields of a value and what they hold, if a stage makes it by a call of its class; else none."""
    maker = maker_of(compiled, value)
    if maker is None or not isinstance(maker.target, type):
        return {}
    if dataclasses.is_dataclass(maker.target):
        names = [field.name for field in dataclasses.fields(maker.target)]
    elif hasattr(maker.target, "_fields"):
        names = list(maker.target._fields)
    else:
        return dict(maker.args[0]) if maker.args and isinstance(maker.args[0], Mapping) else {}
    bound = inspect.signature(maker.target).bind_partial(*maker.args, **maker.kwargs)
    bound.apply_defaults()
    return {name: bound.arguments.get(name, ...) for name in names}  # a class may fill a field itself


def _shape(output: Any) -> str:
    """What a model returns, in a few words for an error message."""
    if isinstance(output, fx.Node):
        return f"the value {output.name!r}"
    if isinstance(output, Mapping):
        return f"a dict with {list(output)}"
    if _is_sequence(output):
        return f"a {type(output).__name__.removeprefix('immutable_')} of {len(output)}"
    return repr(output)
