"""Proxies that record more than those of torch.fx: in-place operators, assertions, and `isinstance`.

    RecordingProxy       of a value that is known, as far as the next two are not for it
      SequenceProxy      of one that is known to be a list, a tuple or a size: `case [a, b]` asks for its length
      MappingProxy       of one that is known to be a dict: `case {"a": b}` asks for its keys
      UnknownProxy       of one that may be anything: `case [a, b]` is refused, and torch.fx counts in `a, b = x`

What a forward asks of a proxy is answered as for a tensor where no value can change the answer, and that it was one is checked
when the graph runs. Other questions are refused, also if forward catches the error.
"""

import functools
import math
import operator
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.operations import IN_PLACE, name_of
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.run.in_place import memory_of
from pippy.ir.trace import questions
from pippy.ir.trace.questions import check_is_tensor
from pippy.ir.trace.suppositions import supposed_attribute
from pippy.ir.trace.tracing_thread import called_by, refused
from pippy.ir.trace.trials import UnhashableError, trials_of
from pippy.ir.trace.values import fix_value, none_if_known, value_of

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

    def __repr__(self) -> str:  # which a forward may print
        return f"Proxy({self.node.name}: no numbers while this code is traced)"

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
            check_is_tensor(self)
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if value is UNKNOWN and (supposed := supposed_attribute(self, name)) is not UNKNOWN:
            return supposed
        is_method = value is not UNKNOWN and callable(getattr(value, name))
        if is_method or (value is UNKNOWN and hasattr(torch.Tensor, name)):
            return RecordingAttribute(self, name)
        return none_if_known(self.tracer.create_proxy("call_function", getattr, (self, name), {}))

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
        value = value_of(self)
        if not source.is_users(frame.f_code.co_filename) or isinstance(value, torch.Tensor):
            return id(self)
        if value is UNKNOWN or (_is_size(value) and not trials_of(self.tracer).hashes_sizes):
            raise UnhashableError("unhashable: a traced value")
        return hash(fix_value(self))

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
            return self.tracer.iter(self)
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

    def register_hook(self, hook: Any) -> Any:
        where = source.of_frame(sys._getframe(1))
        raise refused(
            TracingError(
                f"forward() registers a hook on a traced value, which cannot be recorded:\n{where.excerpt() if where else ''}\n"
                "What to do: do so in a module of its own, which is kept whole, and calls the hook once for each micro-batch; "
                "or register a hook of a parameter or a module before pipeline()"
            )
        )

    def __bool__(self) -> bool:
        value = fix_value(self)
        if value is not UNKNOWN:
            return bool(value)
        answer = trials_of(self.tracer).answer(sys._getframe(1))
        if answer is None:
            return super().__bool__()
        if trials_of(self.tracer).is_trying:
            return answer
        held = self if answer else self.tracer.create_proxy("call_function", operator.not_, (self,), {})
        error = trials_of(self.tracer).error
        text = "an assertion in forward failed" if error == "AssertionError" else f"forward raises a {error} here"
        self.tracer.create_proxy("call_function", torch._assert, (held, text), {})
        return answer

    def __copy__(self) -> Any:
        raise questions.refused_question("copy")

    def __deepcopy__(self, memo: Any) -> Any:
        raise questions.refused_question("copy")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the value where code asks for it; elsewhere the real class, as C code needs it."""
        if not _asks_for_class(sys._getframe(1)):
            return type(self)
        value = value_of(self)
        if value is UNKNOWN:
            check_is_tensor(self)
        return torch.Tensor if value is UNKNOWN or isinstance(value, torch.Tensor) else type(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float, tuple, list)) and not isinstance(value, bool)


def fix_keys(proxy: fx.Proxy) -> Any:
    """The value of a proxy that is a mapping, whose keys Python is told; `UNKNOWN` if it is none."""
    value = value_of(proxy)
    if not isinstance(value, Mapping):
        return UNKNOWN
    fix_value(proxy.tracer.create_proxy("call_function", list, (proxy,), {}))
    return value


def _asks_for_class(frame: FrameType) -> bool:
    """Whether it is Python that asks, for the user: by `isinstance`, under any name, by a `case`, by `x.__class__`.

    torch's functions ask in their C code, and need the real class.
    """
    if frame.f_code.co_filename == functools.__file__:  # singledispatch
        return True
    called = called_by(frame)
    by_python = called is None or getattr(called, "__module__", None) in ("builtins", "_abc")
    return by_python and source.is_called_by_user(frame)


def _asks_for_attribute(frame: FrameType) -> bool:
    """Whether the frame calls `hasattr`."""
    if not source.is_users(frame.f_code.co_filename):
        return False
    called = called_by(frame)
    if called is getattr:  # a name that hides the builtin would have asked (`answering_classes`)
        raise questions.refused_question("getattr under another name")
    return called is hasattr


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

    def __iter__(self) -> Any:
        return iter([self[index] for index in range(len(self.tensor))])


class _Sequence(metaclass=ABCMeta):  # noqa: B024
    __abc_tpflags__ = 1 << 5  # as `collections.abc.Sequence` has it: what `case [a, b]` looks for


class _Mapping(metaclass=ABCMeta):  # noqa: B024
    __abc_tpflags__ = 1 << 6


class SequenceProxy(RecordingProxy, _Sequence):
    """A proxy of a list, a tuple or a size."""


class MappingProxy(RecordingProxy, _Mapping):
    """A proxy of a dict."""

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in fix_keys(self) else default


class UnknownProxy(RecordingProxy, _Sequence):
    """A proxy of which nothing is known."""

    __iter__ = fx.Proxy.__iter__  # it looks at the frame that calls it, so nothing of ours may be between


class RecordingAttribute(UnknownProxy, fx.proxy.Attribute):
    """An attribute of a proxy, such as `x.T`. It becomes a node when it is used."""


_set_class = object.__dict__["__class__"].__set__


def suited(proxy: Any) -> Any:
    """A proxy that was made, with the class for what is known of its value if it is a plain one."""
    if type(proxy) is RecordingProxy:
        value = value_of(proxy)
        if value is UNKNOWN:
            _set_class(proxy, UnknownProxy)
        elif isinstance(value, (tuple, list)):
            _set_class(proxy, SequenceProxy)
        elif isinstance(value, Mapping):
            _set_class(proxy, MappingProxy)
    return proxy


def _in_place_method(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in IN_PLACE:
    setattr(RecordingProxy, f"__{_name}__", _in_place_method(_name))


def _is_in_place_on(value: Any, owner: fx.Proxy, name: str) -> bool:
    """Whether ``value`` is the result of an in-place operator on the attribute ``name`` of ``owner``, or that attribute."""
    if issubclass(type(value), fx.Proxy) and value.node.args == (owner.node, name):
        return True
    if not issubclass(type(value), RecordingProxy) or name_of(value.node.target) not in IN_PLACE:
        return False
    changed = value.node.args[0]
    return isinstance(changed, fx.Node) and changed.target is getattr and changed.args == (owner.node, name)


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
