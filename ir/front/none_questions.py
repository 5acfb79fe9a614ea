"""Answers `m is None` with False where a call has given `m`, and has that checked when the graph runs.

    m = self.layer(x)           a layer that is kept whole may give None
    if m is None:               False of a proxy
        return x

It is seen where `m` is a local variable, or where the call itself is compared with None. An input that is None is no question
of this kind: the graph is compared with one that was traced without the input (`trace.py`).
"""

import functools
import operator
from collections.abc import Sequence
from dis import Instruction
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn

from pippy.ir import source
from pippy.ir.run.functions import check_not_none

_LOOKUPS = ("get", "pop", "setdefault")  # methods of dicts
_KNOWN = ("torch", "pippy", "operator", "_operator", "builtins", "math")  # modules of functions that give no None
_NAMES = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME")


def may_be_none(node: fx.Node, root: nn.Module) -> bool:
    """Whether what a node of a graph of ``root`` gives may be None, as far as is known."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith("torch.")
    if node.op == "call_method":
        return node.target in _LOOKUPS
    if node.target in (operator.getitem, getattr):
        whole, index = node.args
        if isinstance(whole, fx.Node):
            return (whole.op == "placeholder" and isinstance(index, str | int)) or may_be_none(whole, root)
    module_name = getattr(node.target, "__module__", None) or "builtins"
    return node.op == "call_function" and module_name.partition(".")[0] not in _KNOWN


def is_call_compared(frame: FrameType) -> bool:
    """Whether what the call in a frame gives is compared with None."""
    steps = source.steps(frame.f_code)
    at = next((index for index, each in enumerate(steps) if each.offset == frame.f_lasti), None)
    return at is not None and _is_compared(steps, at)


@functools.lru_cache(maxsize=4096)
def compared_variables(code: CodeType) -> dict[int, str]:
    """The places of a function where it loads a local variable to compare it with None, and the variable."""
    steps = source.steps(code)
    return {
        step.offset: step.argval for at, step in enumerate(steps) if step.opname in _NAMES and _is_compared(steps, at)
    }


def _is_compared(steps: Sequence[Instruction], at: int) -> bool:
    after = steps[at + 1 : at + 3]
    if after and after[0].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    if len(after) == 2 and _is_none(after[0]):
        return after[1].opname == "IS_OP"
    return bool(at and after) and _is_none(steps[at - 1]) and after[0].opname == "IS_OP"


def _is_none(step: Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


def check(proxy: Any) -> None:
    """Have it checked, once, that the value of a proxy is not None."""
    if not any(user.target is check_not_none for user in proxy.node.users):
        proxy.tracer.create_proxy("call_function", check_not_none, (proxy,), {})
