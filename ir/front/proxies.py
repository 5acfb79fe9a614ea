"""Proxies that record more than those of torch.fx: in-place operators, assertions, and `isinstance`.

What a forward asks of a proxy is answered as for a tensor where no value can change the answer, and that it was one is checked
when the graph runs. Other questions are refused, also if forward catches the error.
"""

import dis
import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.errors import TracingError
from pippy.ir.front import questions
from pippy.ir.front.in_place import IN_PLACE
from pippy.ir.front.refusals import refused
from pippy.ir.front.values import UNKNOWN, fix_value, none_if_known, value_of
from pippy.ir.run.functions import check_tensor
from pippy.ir.run.shared_tensors import memory_of

_IS_PARAMETER = type(torch.nn.Parameter).__instancecheck__.__code__
_DIMENSIONS = frozenset(
    ("ndim", "dim", "ndimension")
)  # the number is the same in each call, as those of the inputs are
_PROXY_STATE = frozenset(("tracer", "node", "root", "attr", "_node", "tensor"))


class RecordingProxy(fx.Proxy):
    """A proxy that records `x += y`, `x[i] = y` and `assert x`, and for which `isinstance(x, torch.Tensor)` is True.

    A proxy of torch.fx makes `x += y` a new value, refuses `x[i] = y` and `assert x`, and is no tensor. Where its value is
    known (`values.py`), this one also answers what Python asks of a size, of a dtype or of a container.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __getitem__(self, index: Any) -> Any:
        return none_if_known(self.tracer.create_proxy("call_function", operator.getitem, (self, index), {}))

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name, sys._getframe(1))

    def _attribute(self, name: str, frame: FrameType) -> Any:
        value = value_of(self)
        if isinstance(value, torch.Tensor) and name in _DIMENSIONS:
            return getattr(value, name)
        if value is not UNKNOWN and not hasattr(value, name):
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if value is UNKNOWN and not hasattr(torch.Tensor, name) and _asks_for_attribute(frame):
            self._check_tensor()
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if questions.is_compared(frame) and not _is_none_of(value, name):
            raise questions.asked(
                f"forward() asks what .{name} of a traced value is, which tracing cannot answer", frame
            )
        made = RecordingAttribute(self, name)
        return made if value is UNKNOWN or callable(getattr(value, name)) else none_if_known(made)

    @property
    def keys(self) -> Any:
        """As for any other attribute: fx.Proxy has a method of this name, and a tensor has none."""
        value = fix_keys(self)
        return self._attribute("keys", sys._getframe(1)) if value is UNKNOWN else value.keys

    @property
    def items(self) -> Any:
        """The keys of a known dict with proxies of its values; otherwise as for any other attribute."""
        value = fix_keys(self)
        return (
            self._attribute("items", sys._getframe(1))
            if value is UNKNOWN
            else lambda: [(key, self[key]) for key in value]
        )

    @property
    def values(self) -> Any:
        """Proxies of the values of a known dict; otherwise as for any other attribute."""
        value = fix_keys(self)
        return self._attribute("values", sys._getframe(1)) if value is UNKNOWN else lambda: [self[key] for key in value]

    def __contains__(self, item: Any) -> bool:
        value = fix_keys(self)
        return any(each == item for each in self) if value is UNKNOWN else item in value

    def __hash__(self) -> int:
        frame = sys._getframe(1)
        if not source.is_users(frame.f_code.co_filename):
            return id(self)
        if questions.keeps_keys(frame):  # a cache may live longer than the trace
            raise TypeError("unhashable: a traced value")
        value = fix_value(self)
        if value is UNKNOWN:
            raise questions.asked(
                "forward() looks a traced value up in a dict or a set, and tracing sees no values", frame
            )
        return hash(value)

    def __len__(self) -> int:
        value = value_of(self)
        if value is UNKNOWN or (isinstance(value, torch.Tensor) and value.dim() == 0):
            raise refused(RuntimeError("'len' is not supported in symbolic tracing by default"))
        if not isinstance(value, torch.Size):  # a tensor's dimensions are known
            fix_value(self.tracer.create_proxy("call_function", len, (self,), {}))
        return len(value)

    def __iter__(self) -> Any:
        value = value_of(self)
        if value is UNKNOWN or (isinstance(value, torch.Tensor) and value.dim() == 0):
            count = _unpacked(sys._getframe(1))
            return self.tracer.iter(self) if count is None else (self[index] for index in range(count))
        if isinstance(value, Mapping):
            return iter(fix_keys(self))
        return iter([self[index] for index in range(len(self))])

    def __index__(self) -> int:
        return operator.index(self._told(TypeError("a traced value cannot be interpreted as an integer")))

    def __int__(self) -> int:
        return int(self._told(fx.proxy.TraceError("int() of a traced value")))

    def __float__(self) -> float:
        return float(self._told(fx.proxy.TraceError("float() of a traced value")))

    def __complex__(self) -> complex:
        return complex(self._told(fx.proxy.TraceError("complex() of a traced value")))

    def __round__(self, digits: int | None = None) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *(() if digits is None else (digits,))), {})

    def __floor__(self) -> Any:
        return self.tracer.create_proxy("call_function", math.floor, (self,), {})

    def __ceil__(self) -> Any:
        return self.tracer.create_proxy("call_function", math.ceil, (self,), {})

    def __trunc__(self) -> Any:
        return self.tracer.create_proxy("call_function", math.trunc, (self,), {})

    def __format__(self, spec: str) -> str:
        value = fix_value(self) if source.is_users(sys._getframe(1).f_code.co_filename) else UNKNOWN
        return super().__format__(spec) if value is UNKNOWN else format(value, spec)

    def _told(self, error: Exception) -> Any:
        """The value, which Python needs now; ``error`` is raised if it is not known."""
        value = fix_value(self)
        if value is UNKNOWN:
            raise refused(error)
        return value

    def _check_tensor(self) -> None:
        self.tracer.create_proxy("call_function", check_tensor, (self,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PROXY_STATE:
            object.__setattr__(self, name, value)
        elif name == "_is_param":
            raise refused(
                TracingError(
                    "forward() makes an nn.Parameter, which cannot be recorded; change a parameter in place under "
                    "torch.no_grad(), or keep what is computed as a plain value"
                )
            )
        elif not _is_in_place_on(value, self, name):  # after `x.T += y` Python assigns the result
            raise refused(
                TracingError(
                    f"forward() sets .{name} of a tensor, which cannot be recorded; for .data use .copy_() or another in-place "
                    "method under torch.no_grad(), for .requires_grad use .detach() or .requires_grad_()"
                )
            )

    def __bool__(self) -> bool:
        value = fix_value(self)
        if value is not UNKNOWN:
            return bool(value)
        if _is_assertion(sys._getframe(1)):
            self.tracer.create_proxy("call_function", torch._assert, (self, "an assertion in forward failed"), {})
            return True
        return super().__bool__()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the value where code asks for it; elsewhere the real class, as C code needs it."""
        if not _asks_for_class(sys._getframe(1)):
            return type(self)
        value = value_of(self)
        if value is UNKNOWN:
            self._check_tensor()
        return torch.Tensor if value is UNKNOWN or isinstance(value, torch.Tensor) else type(value)


def _unpacked(frame: FrameType) -> int | None:
    """How many values the frame takes, as in `a, b = x`; None if it asks for all of them."""
    code = frame.f_code.co_code
    return code[frame.f_lasti + 1] if dis.opname[code[frame.f_lasti]] == "UNPACK_SEQUENCE" else None


def _is_none_of(value: Any, name: str) -> bool:
    return value is not UNKNOWN and not isinstance(value, torch.Tensor) and getattr(value, name) is None


def fix_keys(proxy: fx.Proxy) -> Any:
    """The value of a proxy that is a mapping, whose keys Python is told; `UNKNOWN` if it is none."""
    value = value_of(proxy)
    if not isinstance(value, Mapping):
        return UNKNOWN
    fix_value(proxy.tracer.create_proxy("call_function", list, (proxy,), {}))
    return value


def _asks_for_class(frame: Any) -> bool:
    """Whether the frame asks by `isinstance`, under any name, by a `case` with a class, by `x.__class__` or singledispatch."""
    code = frame.f_code
    if code.co_filename == functools.__file__:
        return True
    if not source.is_users(code.co_filename):
        return False
    opname = dis.opname[code.co_code[frame.f_lasti]]
    return opname in ("MATCH_CLASS", "LOAD_ATTR") or source.called(frame) in (isinstance, issubclass)


def _asks_for_attribute(frame: Any) -> bool:
    """Whether the frame calls `hasattr`, or `getattr` with a default."""
    if not source.is_users(frame.f_code.co_filename):
        return False
    asked = source.called(frame)
    return asked is hasattr or (asked is getattr and frame.f_code.co_code[frame.f_lasti + 1] == 3)


class StateProxy(RecordingProxy):
    """A parameter or buffer of the model. Its shape is known while tracing, so a forward may branch on it."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame: Any = sys._getframe(1)
        if frame.f_code is _IS_PARAMETER:
            frame = frame.f_back
        return type(self.tensor) if _asks_for_class(frame) else type(self)

    @property
    def _is_param(self) -> bool:
        return getattr(self.tensor, "_is_param", False)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def size(self, *dim: int) -> Any:
        return self.tensor.size(*dim)

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)


class RecordingAttribute(RecordingProxy, fx.proxy.Attribute):
    """An attribute of a proxy, such as `x.T`. It becomes a node when it is used."""


def _in_place_method(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in IN_PLACE:
    setattr(RecordingProxy, f"__{_name}__", _in_place_method(_name))


def _is_in_place_on(value: Any, owner: fx.Proxy, name: str) -> bool:
    """Whether ``value`` is the result of an in-place operator on the attribute ``name`` of ``owner``."""
    if type(value) is not RecordingProxy or getattr(value.node.target, "__name__", "") not in IN_PLACE:
        return False
    changed = value.node.args[0]
    return isinstance(changed, fx.Node) and changed.target is getattr and changed.args == (owner.node, name)


def _is_assertion(frame: Any) -> bool:
    """Whether the frame is evaluating the condition of an `assert` statement."""
    instructions = source.instructions(frame.f_code)
    at = next((index for index, each in enumerate(instructions) if each.offset == frame.f_lasti), None)
    if at is None or "IF_TRUE" not in instructions[at].opname:
        return False
    return instructions[at + 1].opname == "LOAD_ASSERTION_ERROR"


def made_in_forward(tracer: fx.Tracer) -> list[torch.Tensor]:
    """The constants that forward has made of numbers, while ``tracer`` runs: `torch.tensor([1.0, 2.0])`."""
    return tracer.__dict__.setdefault("_made_in_forward", [])


def is_made_in_forward(tracer: fx.Tracer, tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of these constants, or a view of one."""
    made = made_in_forward(tracer)
    if tensor.layout is not torch.strided:
        return any(tensor is each for each in made)
    memory = memory_of(tensor)
    return any(memory_of(each) == memory for each in made)


def with_in_place_operators(proxy: fx.Proxy) -> fx.Proxy:
    """``proxy``, of a class of the user's, with the in-place operators that its class does not have."""
    if not issubclass(type(proxy), RecordingProxy):
        proxy.__class__ = _recording_class(type(proxy))  # type: ignore[arg-type]
    return proxy


@functools.cache
def _recording_class(kind: type) -> type:
    missing = [f"__{name}__" for name in IN_PLACE if not hasattr(kind, f"__{name}__")]
    return type(kind.__name__, (kind,), {name: vars(RecordingProxy)[name] for name in missing})
