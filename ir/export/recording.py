"""What `torch.export` would lose, or write into its graph as a constant: noted on each node, or refused.

in forward                                  torch.export                        here
────────────────────────────────────────────────────────────────────────────────────────────────────────────
with torch.no_grad():                       a region of its own                 a mark on each node in it
torch.utils.checkpoint                      traces through it, or loses it      refused
saved_tensors_hooks, save_on_cpu            loses them                          refused
x.register_hook(...)                        loses it                            refused
torch.autograd.grad, x.backward()           loses it, or fails                  refused
with torch.autocast(...)                    a region of its own                 refused
random.random(), numpy.random.rand()        keeps the number                    refused
hooks of modules for the backward           loses them                          refused, before
self.layer.count = self.layer.count + 1     loses it, but on the model itself   refused
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.nn.modules.module import register_module_buffer_registration_hook

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.export.kept import KeptCalls
from pippy.ir.run import repeated_forward
from pippy.ir.trace import tracing_thread
from pippy.ir.trace.checkpointing import GENERATOR
from pippy.ir.trace.random_draws import refusing_numpys_draws
from pippy.ir.trace.refusals import refused
from pippy.ir.trace.tracing_thread import is_tracing, method_patched_here, patched_here

_WHOLE = "in a module that a tracer, whose is_leaf_module says True for it, keeps whole"
_AUTOCAST = (
    "enters torch.autocast, and a stage would compute without; do so around the call of the Pipe, or write x.to(dtype)"
)
_CHECKPOINT = f"calls torch.utils.checkpoint, and a stage would keep what it frees; do so {_WHOLE}"
_SAVED = f"sets hooks for the tensors that autograd saves, and a stage would not call them; do so {_WHOLE}"
_HOOK = f"registers a hook on a tensor, and a stage would not call it; do so {_WHOLE}"
_GRAD = f"computes gradients, and a stage would not; do so {_WHOLE}"
_AGAIN = f"asks whether it is computed again, and a stage would keep the answer; do so {_WHOLE}"
_INFERENCE = "enters or leaves torch.inference_mode, and a stage would not; use torch.no_grad()"
# Whether a size is 1 decides in these how memory is laid out, and nothing that forward sees.
_contiguous = torch.Tensor.contiguous
_NUMBERS_UNCHANGED = ("contiguous", "view", "reshape", "flatten", "copy_")


@contextmanager
def recording(model: nn.Module, kept: KeptCalls) -> Iterator[None]:
    """A context in which `torch.export` notes and refuses what the table above says, but not inside of a kept call."""

    def refusing(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if kept.is_inside():
                return original(*args, **kwargs)
            raise _refusal(what, sys._getframe(1))

        return refuse

    places: list[tuple[Any, str, str]] = [
        (torch.autocast, "__enter__", _AUTOCAST),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", _SAVED),
        (torch.Tensor, "register_hook", _HOOK),
        (torch.Tensor, "register_post_accumulate_grad_hook", _HOOK),
        (torch.Tensor, "backward", _GRAD),
    ]
    functions: list[tuple[Any, str, str]] = [
        (torch.utils.checkpoint, GENERATOR, _CHECKPOINT),
        (torch.utils.checkpoint.CheckpointFunction, "apply", _CHECKPOINT),
        (torch.autograd, "grad", _GRAD),
        (torch.autograd, "backward", _GRAD),
        (repeated_forward, "is_now", _AGAIN),
    ]
    with ExitStack() as stack:
        for owner, name, what in places:
            stack.enter_context(method_patched_here(owner, name, refusing(what, owner.__dict__[name])))
        for owner, name, what in functions:
            stack.enter_context(patched_here(owner, name, refusing(what, getattr(owner, name))))
        stack.enter_context(
            patched_here(torch, "is_autocast_enabled", _noting_autocast(kept, torch.is_autocast_enabled))
        )
        stack.enter_context(_annotated_nodes())
        stack.enter_context(torch._C._DisableAutocast())  # it would write its casts into the graph
        stack.enter_context(torch.enable_grad())
        stack.enter_context(refusing_numpys_draws(model))
        stack.enter_context(_refused_assignments(model, kept))
        for name in _NUMBERS_UNCHANGED:
            stack.enter_context(patch.object(torch.Tensor, name, _asking_again(kept, getattr(torch.Tensor, name))))
        # A question for an error that the stage raises itself, and that would fix sizes.
        stack.enter_context(patched_here(torch, "_debug_has_internal_overlap", lambda _: 0))
        yield


@contextmanager
def _refused_assignments(model: nn.Module, kept: KeptCalls) -> Iterator[None]:
    """A context in which no module inside of the model may assign its buffers: torch.export sees the model's own alone."""
    inner = {module: path for path, module in model.named_modules() if module is not model}

    def refuse(module: nn.Module, name: str, value: Any) -> None:
        if module in inner and name in module._buffers and is_tracing() and not kept.is_inside():
            frame = sys._getframe(1)
            while frame.f_back is not None and not source.is_users(frame.f_code.co_filename):
                frame = frame.f_back
            path = f"{inner[module]}.{name}"
            raise _refusal(f"assigns the buffer {path!r}; change it in place, as in self.{name}.copy_(...)", frame)

    with register_module_buffer_registration_hook(refuse):
        yield


def _noting_autocast(kept: KeptCalls, ask: Callable[..., bool]) -> Callable[..., bool]:
    def note(*args: Any) -> bool:
        caller = sys._getframe(1)
        while caller.f_code.co_filename == tracing_thread.__file__ and caller.f_back is not None:
            caller = caller.f_back
        if source.is_users(caller.f_code.co_filename) and not kept.is_inside():
            kept.asked_autocast = source.of_frame(caller)
        return ask(*args)

    return note


def _asking_again(kept: KeptCalls, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            return method(tensor, *args, **kwargs)
        with kept.own_questions(tensor):
            result = method(tensor, *args, **kwargs)
        if result is tensor and method is _contiguous:  # it is, here and now; in another mode, it may not be
            return kept.recorded(torch.ops.aten.contiguous.default, tensor, *args, **kwargs)
        return result

    return call


@contextmanager
def _annotated_nodes() -> Iterator[None]:
    """Write into each new node its source line, and whether gradients were off."""
    create_node, inference = _ModuleStackTracer.create_node, torch.is_inference_mode_enabled()

    def create(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if inference != torch.is_inference_mode_enabled():
            raise _refusal(_INFERENCE, sys._getframe(1))
        node = create_node(tracer, *args, **kwargs)
        node.meta["source"] = source.of_frame(sys._getframe(1))
        node.meta["no_grad"] = not torch.is_grad_enabled()
        return node

    with method_patched_here(_ModuleStackTracer, "create_node", create):
        yield


def _refusal(what: str, frame: FrameType) -> TracingError:
    where = source.of_frame(frame)
    return refused(TracingError(f"forward {what}" + (f"\n{where.excerpt()}" if where else "")))


class PythonDraws:
    """Whether Python's random numbers, or the seed of torch's, were drawn or set since this was made."""

    def __init__(self) -> None:
        self._state, self._torch = random.getstate(), torch.get_rng_state()

    def seen(self) -> bool:
        """Whether they were; then they are set back."""
        if random.getstate() == self._state and torch.equal(torch.get_rng_state(), self._torch):
            return False
        random.setstate(self._state)
        torch.set_rng_state(self._torch)
        return True
