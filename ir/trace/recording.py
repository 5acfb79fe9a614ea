"""Records what plain torch.fx does not record while it traces. Each row is a graph that would silently be another model.

in forward                              plain torch.fx                      here
──────────────────────────────────────────────────────────────────────────────────────────────────────
torch.arange(n), torch.rand(3),         runs it once, and keeps the         a node
  self.weight.norm()                      result as a constant
torch.distributions                     fails, as they ask for numbers      a node that asks (`check_all_true`)
an autograd.Function                    traces its forward, and             a node (`AutogradFunction`)
                                          forgets its backward
a function of torch.jit.script          fails, as it takes no proxies       a node (`ScriptedFunction`)
a function that torch.func transforms   fails, as it takes no proxies       refused; a part in which it is called
                                                                              is kept whole
a compiled module or function           fails                               what is inside
with torch.no_grad():                   does not see it                     a mark on each node in it
torch.utils.checkpoint                  traces through it, or loses it      a node before and one after it
with torch.autocast(...), and all       does not see it                     refused
  others of `pippy.ir.base.surroundings`
torch._check(x.all().item())            refuses it                          an assertion
random.random()                         keeps the number                    refused (`check_no_draw`)

Random numbers that forward draws, or seeds, while it is traced would be the same in every run:

    torch.rand(3)                                    recorded, and drawn in each run
    random.random(), a random.Random of one's own    refused before it is drawn: Python tells of each call of a C function
    torch.manual_seed, a generator's seed            the same
    numpy.random.rand, also as an imported name      refused before it is drawn, by a patch
    numpy Generators that the model holds, also in   refused afterwards, since their state has changed
      lists and objects, or its files

No generator of the process is set back, so other threads draw on.
"""

import copy
import operator
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType, ModuleType
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.distributions import Distribution

from pippy.ir.base import source
from pippy.ir.base.compiling import following_compiled
from pippy.ir.base.errors import TracingError
from pippy.ir.base.node_notes import GRADIENTS_OFF, MODULE_PATH, SOURCE
from pippy.ir.base.operations import is_in_place
from pippy.ir.base.surroundings import ChangesInForward, OwnFunctionMode, device_contexts
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.run.functions import AutogradFunction, ScriptedFunction, check_all_true
from pippy.ir.trace.checkpointing import record_reentrant, recording_checkpoints
from pippy.ir.trace.left_as_it_was import numpys_generators
from pippy.ir.trace.proxies import RecordingProxy, made_in_forward, suited, with_in_place_operators
from pippy.ir.trace.questions import answer_in, answering_classes, check_not_asked_for_mode, refusing_to_say_what_runs
from pippy.ir.trace.tracer import tracing_transformers
from pippy.ir.trace.tracing_thread import (
    class_method,
    method_patched_here,
    patched_here,
    refused,
    replaced,
    then,
    watching_c_calls,
)
from pippy.ir.trace.values import value_of

# These are answered at once: a forward may branch on what they say of a parameter.
_QUERIES = frozenset(
    """__format__ __get__ __hash__ __len__ __repr__ data_ptr dim element_size get_device is_complex is_conj is_contiguous
    is_floating_point is_inference is_neg is_pinned is_shared is_signed nelement numel size storage_offset stride
    untyped_storage""".split()
)
# These make a tensor of given numbers, so the result is a constant if no proxy is among the numbers.
_CONSTANTS = frozenset((torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray))
_REVERSED = frozenset("__rsub__ __rdiv__ __rtruediv__ __rfloordiv__ __rmod__ __rpow__ __rmatmul__".split())
# The C parsers of these functions refuse a proxy among the sizes, or in place of the dtype.
_TAKING_SIZES = """arange as_tensor empty eye finfo full iinfo linspace logspace ones rand randint randn randperm tensor
    tril_indices triu_indices zeros""".split()
# These check what they are given as no proxy can be checked.
_WHOLE = ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence", "unpack_sequence")

_FROM_ANOTHER_TRACE = (
    "forward uses a value that it computed while it was traced before, and that is kept in a cache of an installed package. "
    "What to do: compute the value in __init__, and keep it in a buffer"
)


def _is_tensor(value: Any) -> bool:
    if issubclass(type(value), fx.Proxy):
        known = value_of(value)
        return known is UNKNOWN or isinstance(known, torch.Tensor)
    return isinstance(value, torch.Tensor)


@contextmanager
def recording(tracer: fx.Tracer, model: nn.Module) -> Iterator[None]:
    """A context in which ``tracer`` records of ``model`` what the table above says."""
    with ExitStack() as stack:
        stack.enter_context(method_patched_here(_SingleLevelFunction, "apply", _recorded_apply(tracer)))
        stack.enter_context(method_patched_here(BackwardCFunction, "__init__", _refuse_unseen_apply))
        stack.enter_context(method_patched_here(torch.jit.ScriptFunction, "__call__", _recorded_scripted(tracer)))
        stack.enter_context(method_patched_here(torch.autocast, "__enter__", _refuse_autocast))
        stack.enter_context(following_compiled())
        stack.enter_context(recording_checkpoints(tracer))
        stack.enter_context(tracing_transformers(tracer))
        stack.enter_context(patched_here(torch, "is_tensor", _is_tensor))
        ask = _asked_in_the_stage(tracer)
        stack.enter_context(patched_here(torch, "_is_all_true", ask))
        stack.enter_context(method_patched_here(Distribution, "_validate_sample", _recorded_validation(ask)))
        stack.enter_context(patched_here(torch, "_check_with", _recorded_check(tracer)))
        for name in _TAKING_SIZES:
            stack.enter_context(patched_here(torch, name, _given_proxies(tracer, getattr(torch, name))))
        for name in _WHOLE:
            function = getattr(nn.utils.rnn, name)
            tracer._autowrap_function_ids.add(id(function))  # for the names of the user's modules
            stack.enter_context(patched_here(nn.utils.rnn, name, _given_proxies(tracer, function)))
        stack.enter_context(_annotated_nodes(tracer))
        stack.enter_context(_recording_proxies(tracer))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_RecordUntraced(tracer))
        stack.enter_context(_refusing_values(tracer))
        stack.enter_context(refusing_numpys_draws(model))
        stack.enter_context(refusing_to_say_what_runs())
        stack.enter_context(answering_classes())
        yield


def watching_calls(tracer: fx.Tracer) -> AbstractContextManager[None]:
    """A context in which what forward calls is checked and answered. Entered last, it sees least of what is not forward's."""
    return watching_c_calls(tracer, _check_call, answer_in)


def _check_call(function: Any, frame: FrameType) -> None:
    check_no_draw(function, frame)
    check_not_asked_for_mode(function, frame)


@contextmanager
def _recording_proxies(tracer: fx.Tracer) -> Iterator[None]:
    """The proxies of a plain ``tracer`` are ours, and those of its own class record in-place operators."""
    made_in_forward(tracer).clear()
    plain, make = type(tracer).proxy is fx.proxy.TracerBase.proxy, tracer.proxy

    def proxy(node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, tracer) if plain else with_in_place_operators(make(node))

    try:
        with replaced(tracer, "proxy", proxy), then(tracer, "create_proxy", suited):
            yield
    finally:
        made_in_forward(tracer).clear()


@contextmanager
def _refusing_values(tracer: fx.Tracer) -> Iterator[None]:
    """What ``tracer`` refuses to say of a value stays refused, also if forward catches the error."""

    def refusing(answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(proxy: fx.Proxy) -> Any:
            try:
                return answer(proxy)
            except Exception as error:
                refused(error)
                raise

        return ask

    with replaced(tracer, "to_bool", refusing(tracer.to_bool)), replaced(tracer, "iter", refusing(tracer.iter)):
        yield


def _given_proxies(tracer: fx.Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which refuses proxies, in a form that records a call with proxies."""

    before = len(device_contexts())

    def record(*args: Any, **kwargs: Any) -> Any:
        if any(map(_holds_proxy, (*args, *kwargs.values()))):
            if len(device_contexts()) != before:
                raise _lost("a default device", sys._getframe(1), "the device in the call")
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


def _recorded_check(tracer: fx.Tracer) -> Callable[..., None]:
    """`torch._check` and its like, which end here, where the condition is a number that tracing does not know."""
    original = torch._check_with

    def check(error_type: type[Exception], condition: Any, message: Any) -> None:
        if issubclass(type(condition), fx.Proxy):
            text = f"{error_type.__name__} in forward" if message is None else str(message())
            tracer.create_proxy("call_function", torch._assert, (condition, text), {})
        else:
            original(error_type, condition, message)

    return check


def _asked_in_the_stage(tracer: fx.Tracer) -> Callable[[Any], Any]:
    """`torch._is_all_true`, by which a distribution asks whether parameters are valid. The stage asks it of traced values."""
    original = torch._is_all_true

    def ask(valid: Any) -> Any:
        if not issubclass(type(valid), fx.Proxy):
            return original(valid)
        tracer.create_proxy("call_function", check_all_true, (valid, str(source.of_frame(sys._getframe(1)) or "")), {})
        return True

    return ask


def _recorded_validation(ask: Callable[[Any], Any]) -> Callable[..., None]:
    """The check of a value whose density a distribution is asked for."""
    original = Distribution._validate_sample

    def validate(distribution: Distribution, value: Any) -> None:
        if not issubclass(type(value), fx.Proxy):
            original(distribution, value)
            return
        with suppress(NotImplementedError):  # some distributions have no support
            ask(cast(Any, distribution.support).check(value))

    return validate


def _holds_proxy(value: Any) -> bool:
    if isinstance(value, (tuple, list)) and not issubclass(type(value), fx.Proxy):
        return any(map(_holds_proxy, value))
    if isinstance(value, slice):
        return any(map(_holds_proxy, (value.start, value.stop, value.step)))
    return issubclass(type(value), fx.Proxy)


class _RecordUntraced(OwnFunctionMode):
    """Records operations that no proxy takes part in: on new tensors, and on parameters and buffers."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if function in _CONSTANTS:
            return self._constant(function(*args, **(kwargs or {})), args)
        if name == "__getitem__" and _holds_proxy(args[1]):
            return self.tracer.create_proxy("call_function", operator.getitem, args, {})
        if name.startswith("__") and is_in_place(name):
            return self.tracer.create_proxy("call_function", getattr(operator, name), args, {})
        if (
            name in _QUERIES
            or (name.startswith("_") and name not in _REVERSED and not name.startswith("_foreach_"))
            or any(issubclass(each, fx.Proxy) for each in types)
        ):
            return function(*args, **(kwargs or {}))
        if getattr(torch.Tensor, name, None) is function:
            return self.tracer.create_proxy("call_method", name, args, kwargs or {})
        return self.tracer.create_proxy("call_function", function, args, kwargs or {})

    def _constant(self, made: Any, args: Any) -> Any:
        if isinstance(made, torch.Tensor) and not any(made is given for given in args):
            made_in_forward(self.tracer).append(made)
        return made


def _recorded_apply(tracer: fx.Tracer) -> Callable[..., Any]:
    """What `torch.autograd.Function.apply` ends in. So one that was taken from its class before tracing ends here, too."""
    original = class_method(torch._C._FunctionBase.__dict__["apply"])

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return record_reentrant(tracer, *args)
        if cls.__module__.startswith("torch.") and not any(map(_holds_proxy, args)):
            return original(cls, *args, **kwargs)
        return tracer.create_proxy("call_function", AutogradFunction(cls, cls.__name__), args, kwargs)

    return apply


def _refuse_unseen_apply(context: Any) -> None:
    """Refuse to make the context of a custom function that no node stands for: its backward would be lost."""
    function = context._forward_cls
    if function.__module__.startswith("torch."):
        return
    where = source.of_frame(sys._getframe(1))
    raise refused(
        TracingError(
            f"forward applies the autograd function {function.__name__} past torch.autograd.Function.apply, so its operations "
            f"would be traced, and its backward would be lost:\n{where.excerpt() if where else ''}\n"
            f"What to do: call {function.__name__}.apply(...)"
        )
    )


def _recorded_scripted(tracer: fx.Tracer) -> Callable[..., Any]:
    original = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_holds_proxy, (*args, *kwargs.values()))):
            return original(function, *args, **kwargs)
        name = str(function.qualified_name).rpartition(".")[2]
        return tracer.create_proxy("call_function", ScriptedFunction(function, name), args, kwargs)

    return call


def _lost(what: str, frame: FrameType, remedy: str = "") -> TracingError:
    where = source.of_frame(frame)
    line = f"\n{where.excerpt()}" if where else ""
    return refused(
        TracingError(
            f"forward enters or sets {what}, which a traced graph cannot hold; do so around the call of the Pipe, or move the "
            "region into the forward of a module of its own, without a mark inside, which is called as a whole; or, if it "
            "computes the loss, into a loss function of your own, which is called as a whole"
            f"{f'; or write {remedy}' if remedy else ''}{line}"
        )
    )


def _refuse_autocast(_: Any) -> None:
    raise _lost("torch.autocast", sys._getframe(1), "x.to(dtype)")


@contextmanager
def _annotated_nodes(tracer: fx.Tracer) -> Iterator[None]:
    """Write into each new node its source line, its module, and whether gradients were off."""
    create_node, inference, changes = tracer.create_node, torch.is_inference_mode_enabled(), ChangesInForward()

    def create(*args: Any, **kwargs: Any) -> fx.Node:
        if inference != torch.is_inference_mode_enabled():
            raise _lost("torch.inference_mode", sys._getframe(1), "torch.no_grad()")
        if changed := changes.found():
            raise _lost(", ".join(changed), sys._getframe(1))
        node = create_node(*args, **kwargs)
        if any(each.graph is not node.graph for each in node.all_input_nodes):
            raise refused(TracingError(_FROM_ANOTHER_TRACE))
        SOURCE.put(node, source.of_frame(sys._getframe(1)))
        MODULE_PATH.put(node, tracer.scope.module_path)
        if not torch.is_grad_enabled():
            GRADIENTS_OFF.put(node, True)
        return node

    with replaced(tracer, "create_node", create):
        yield


_SEEDING = frozenset(("manual_seed", "seed", "set_state"))
_ASKING = frozenset(("getstate", "setstate", "get_state", "initial_seed", "get_bit_generator", "get_printoptions"))


@contextmanager
def refusing_numpys_draws(model: nn.Module) -> Iterator[None]:
    """A context in which draws and seeds of numpy's raise a `TracingError`."""
    with _watching_numpy(model) if "numpy" in sys.modules else nullcontext():
        yield


def check_no_draw(function: Any, frame: FrameType) -> None:
    """Raise if the call of the C function ``function`` draws random numbers, or seeds a generator."""
    drawn = _drawn_from(function)
    if drawn and not _is_importing(frame):
        raise draw_refusal(drawn, frame)


def _drawn_from(function: Any) -> str:
    """The generator that a call of ``function`` draws from or seeds; empty if none."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return "" if function.__name__ in _ASKING else "Python's random"
    if isinstance(owner, torch.Generator):
        return "torch" if function.__name__ in _SEEDING else ""
    return "the system's" if function is os.urandom else ""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not source.TRACE:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _watching_numpy(model: nn.Module) -> Iterator[None]:
    numpy, generators = sys.modules["numpy"].random, numpys_generators()
    generators = [
        each for each in generators if each is not numpy.mtrand._rand
    ]  # that is patched; other threads draw on
    before = [copy.deepcopy(_bits(each).state) for each in generators]
    with ExitStack() as stack:
        for module in (numpy, *_files(model)):
            for name, value in list(vars(module).items()):
                if getattr(value, "__self__", None) is numpy.mtrand._rand and name not in _ASKING:
                    stack.enter_context(patched_here(module, name, _refuse_numpy))
        yield
    drawn = [pair for pair in zip(generators, before) if repr(_bits(pair[0]).state) != repr(pair[1])]
    for generator, state in drawn:
        _bits(generator).state = state
    if drawn:
        raise draw_refusal("numpy's", None)


def _refuse_numpy(*_: Any, **__: Any) -> None:
    raise draw_refusal("numpy's", sys._getframe(1))


def _bits(generator: Any) -> Any:
    return generator._bit_generator if hasattr(generator, "_bit_generator") else generator.bit_generator


def _files(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of ``model``, without torch's."""
    names = {each.__module__ for module in model.modules() for each in type(module).__mro__} - {"builtins"}
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def draw_refusal(generator: str, frame: FrameType | None) -> TracingError:
    """The error for a draw from ``generator`` on the user's line below ``frame``."""
    where = source.of_frame(frame)
    return refused(
        TracingError(
            f"forward() draws or seeds random numbers ({generator}) in a way that cannot be recorded, so each run would repeat "
            "those of tracing"
            + (f":\n{where.excerpt()}\n" if where else "; ")
            + "What to do: draw them with torch functions (torch.rand(()) < p and torch.where)"
        )
    )
