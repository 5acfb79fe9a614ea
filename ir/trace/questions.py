"""What forward may ask of a traced value, and who answers. Nothing is read from bytecode.

asked                                  with an example                        without
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
isinstance, x.__class__, case Name():  the class of the fake value            as for a tensor, checked in each run
hasattr, getattr with a default        the fake value                         the same
type(x), callable(x)                   the fake value                         refused
case [a, b], case {"a": b}             the fake value                         refused: len(x) is unknown
a key of a dict or a set               the fake value                         refused; no size is one at the first try
assert x                               recorded, if one answer leads to an AssertionError (`TraceTrials`)
x is y                                 traced again with values in place of stand-ins, and compared (`identities.py`)
a, b = x                               the fake value                         torch.fx counts

Python asks no object for its answer to `type(x)`, `callable(x)` and `getattr(x, name, default)`. So while a function of the
user's that has such a name is traced, its module has a global of that name, which hides the builtin (`answering_classes`).
Other threads get the builtin's answers from it too.
"""

import builtins
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.operations import is_in_place
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.call.guards import InputChecks, Method, ValueReference
from pippy.ir.run import forward_state
from pippy.ir.run.functions import check_fixed, check_tensor
from pippy.ir.trace.tracing_thread import patched_here, refused
from pippy.ir.trace.values import value_of

_ADVICE = (
    "What to do: give example_args or example_kwargs, so that values are known; or, if it is an argument, pass it as a "
    "constant with concrete_args={...}; or ask with isinstance(x, torch.Tensor); or move this code into the "
    "forward of a module of its own, without a mark inside, which is called as a whole"
)
_MODES = frozenset((torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled))


def check_not_asked_for_mode(function: Any, frame: FrameType) -> None:
    """Raise if the user's code asks for a mode of torch that another call of the Pipe may have."""
    if function in _MODES and source.is_users(frame.f_code.co_filename) and torch.is_grad_enabled():
        raise asked(
            f"forward() calls torch.{function.__name__}(), and the answer while tracing would hold for every run", frame
        )


@contextmanager
def refusing_to_say_what_runs() -> Iterator[None]:
    """A context in which `is_checkpointing` and `is_recomputing` raise a `TracingError`."""

    def refuse(what: str) -> bool:
        raise asked(
            f"forward() calls pippy.is_{what}(), and the answer while tracing would hold for every run",
            sys._getframe(1),
        )

    with patched_here(forward_state, "is_now", refuse):
        yield


def refused_question(what: str) -> TracingError:
    """The error for a question that tracing cannot answer, on the user's line."""
    return asked(f"forward() asks what a traced value is ({what}), which tracing cannot answer", sys._getframe(1))


def asked(what: str, where: FrameType | fx.Node | Exception | None) -> TracingError:
    """The error for a question on the user's line below a frame, at a node, or of another error."""
    if isinstance(where, Exception):
        place = getattr(where, "source", None)
    else:
        place = SOURCE.of(where) if isinstance(where, fx.Node) else source.of_frame(where)
    line = f":\n{place.excerpt()}\n" if place else "; "
    return refused(TracingError(f"{what}{line}{_ADVICE}"))


# Finds in a traced graph what forward asked of its inputs alone, so that it can be checked before a call runs.


_HOMES = ("_operator", "builtins", "math")
_METHODS = frozenset(
    "dim element_size get get_device is_complex is_floating_point nelement ndimension numel size".split()
)


def asked_of(graph: fx.Graph, is_tensor: Callable[[fx.Node], bool], of_rows: Mapping[fx.Node, int]) -> InputChecks:
    """The calls of `check_fixed` in a traced graph that depend on its inputs alone, and compute nothing with tensors.

    Those ``of_rows`` are given the number of rows of the example.
    """
    known: set[fx.Node] = set()
    checks: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder" or (node.all_input_nodes and known.issuperset(node.all_input_nodes)):
            if node.target is check_fixed:
                checks.append(node)
            elif node.op == "placeholder" or _is_cheap(node, is_tensor(node)):
                known.add(node)
    needed = _with_inputs(checks)
    steps = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    calls = [(node, (*node.args, of_rows[node]) if node in of_rows else node.args) for node in steps]
    return InputChecks(tuple((node.name, _function(node), *_named((args, node.kwargs))) for node, args in calls))


def _is_cheap(node: fx.Node, is_tensor: bool) -> bool:
    if node.target in (getattr, operator.getitem):
        return True
    if is_tensor or node.op == "call_method":
        return not is_tensor and node.target in _METHODS
    function: Any = node.target
    return node.op == "call_function" and function.__module__ in _HOMES and not is_in_place(function)


def _with_inputs(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += node.all_input_nodes
    return reached


def _function(node: fx.Node) -> Callable[..., Any]:
    return node.target if callable(node.target) else Method(node.target)


def _named(arguments: Any) -> Any:
    return fx.node.map_arg(
        arguments, lambda node: ValueReference(node.target if node.op == "placeholder" else node.name)
    )


_NAMES = frozenset(("type", "callable", "getattr"))
_hidden: list[tuple[dict[str, Any], str]] | None = None  # the globals that are set, while a model is traced


@contextmanager
def answering_classes() -> Iterator[None]:
    """A context in which `answer_in` acts."""
    global _hidden
    _hidden = []
    try:
        yield
    finally:
        for names, name in _hidden:
            names.pop(name, None)
        _hidden = None


def answer_in(frame: FrameType) -> None:
    """Hide the builtins that a function of the user's names, in its module, where it begins. Not in Python's own."""
    if not source.is_users(frame.f_code.co_filename) or _hidden is None:
        return
    for name in _NAMES.intersection(frame.f_code.co_names):
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name not in frame.f_globals and module not in sys.stdlib_module_names:
            frame.f_globals[name] = _Answer(getattr(builtins, name))
            _hidden.append((frame.f_globals, name))


class _Answer:
    """What stands for a builtin: it answers for proxies, and is the builtin for all else."""

    def __init__(self, builtin: Any) -> None:
        self.builtin = builtin
        # What a metaclass calls: `type.__new__(kind, name, bases, namespace)`.
        self.__dict__.update({name: getattr(builtin, name) for name in ("__new__", "__init__", "__call__")})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or kwargs or not issubclass(type(args[0]), fx.Proxy):
            return self.builtin(*args, **kwargs)
        if self.builtin is getattr:
            return _attribute(*args)
        if len(args) != 1:
            return self.builtin(*args)
        value = value_of(args[0])
        if value is UNKNOWN:
            raise refused_question(f"{self.builtin.__name__}()")
        if self.builtin is type:
            return class_of(args[0], value)
        return self.builtin(value)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self.builtin,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builtin, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.builtin)

    def __subclasscheck__(self, value: Any) -> bool:
        return issubclass(value, self.builtin)

    def __getitem__(self, item: Any) -> Any:
        return self.builtin[item]

    def __or__(self, other: Any) -> Any:
        return self.builtin | other

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.builtin

    def __hash__(self) -> int:
        return hash(self.builtin)


def _attribute(proxy: fx.Proxy, name: str, *default: Any) -> Any:
    if default and value_of(proxy) is UNKNOWN and not hasattr(torch.Tensor, name):
        check_is_tensor(proxy)
        return default[0]
    return getattr(proxy, name, *default)


def check_is_tensor(proxy: fx.Proxy) -> None:
    """Have it checked that the value of a proxy is a tensor: what was asked has been answered as for one."""
    proxy.tracer.create_proxy("call_function", check_tensor, (proxy,), {})


def class_of(proxy: fx.Proxy, value: Any) -> type:
    """The class of a value that is known. That of a fake tensor is that of the tensor which it stands for."""
    state = proxy.__dict__.get("tensor")
    if state is not None:
        return type(state)
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)
