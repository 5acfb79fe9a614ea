"""What an exported program keeps whole: calls of modules that are leaves, custom autograd functions, and marks.

`torch.export` records operators only. It would take modules of torch apart, forget the backward of a custom autograd
function, and pass by `pipe_split()`. So each of these is recorded as a call of `kept`, with its number in ``calls``:

    self.lin(x)                    kept(3, x)      calls[3] is KeptModule("lin")
    Rounding.apply(x)              kept(4, x)      calls[4] is AutogradFunction(Rounding)
    pipe_split()                   kept(5)         calls[5] is MARK

Its result comes from a run on fake tensors that is not recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import (
    _ModuleStackTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils import _pytree

from pippy.ir.base import source
from pippy.ir.base.errors import MarkError, TracingError
from pippy.ir.base.marks import SplitPoint, annotated_modules, recording_splits, split_points
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.export.known_results import result_of
from pippy.ir.trace.own_tensors import OwnTensors
from pippy.ir.trace.recording import AutogradFunction
from pippy.ir.trace.tracing_thread import class_method, method_patched_here


class _Kept(HigherOrderOperator):
    """The operator that stands for a kept call. Nobody calls it: it is there to be a node."""

    def __init__(self) -> None:
        super().__init__("pippy_kept")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the graph of a stage has the call itself")


kept = _Kept()
MARK = "mark"


@dataclass(frozen=True)
class KeptModule:
    """A call of the module at ``path``."""

    path: str


class KeptCalls:
    """While forward is exported, records the calls that are kept. ``is_leaf`` says of a module whether its calls are."""

    def __init__(
        self,
        model: nn.Module,
        is_leaf: Callable[[nn.Module, str], bool],
        on_start: Callable[[Any, Any], None],
        on_leaf: Callable[[nn.Module, Any], None],
        reads: list[nn.Module],
    ) -> None:
        self.asked_autocast: source.Source | None = None  # the line that asked whether autocast is on
        self.asked_again: set[int] = set()  # the numbers of the questions about sizes that the stages ask themselves
        self.calls: list[KeptModule | AutogradFunction | str] = []
        self._is_leaf, self._on_start, self._on_leaf, self._reads = is_leaf, on_start, on_leaf, reads
        # While it is exported, a module may be another object, which shares its dictionary.
        self._paths = {id(module.__dict__): (path, module) for path, module in model.named_modules()}
        self._unmet = dict(annotated_modules(model))
        self._tracer: Any = None
        self._own_tensors = OwnTensors(model)
        self._inside = False
        self._scope: dict[str, tuple[str, type]] = {}  # the calls that forward is in
        self._numbers: dict[str, int] = {}  # how often each module was called
        self._call_module = _ModuleStackTracer.call_module

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which `torch.export` records them."""
        create_node = _ModuleStackTracer.create_node
        apply = class_method(torch.autograd.Function.__dict__["apply"])

        def call(tracer: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            path, own = self._paths.get(id(module.__dict__), (None, module))
            if path is None or self._inside:
                return self._call_module(tracer, module, forward, args, kwargs)
            if path == "":
                self._tracer, self._own_tensors = tracer, OwnTensors(module)
                self._on_start(args, kwargs)
            return self._marked(path, own, lambda: self._call(tracer, path, own, module, forward, args, kwargs))

        def create(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(tracer, *args, **kwargs)
            node.meta["scope"] = self._scope
            return node

        def call_function(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            run = lambda *args, **kwargs: apply(cls, *args, **kwargs)  # noqa: E731
            if self._inside or self._tracer is None or cls.__module__.startswith("torch."):
                return run(*args, **kwargs)
            return self._keep(AutogradFunction(cls), run, args, kwargs)

        with (
            method_patched_here(_ModuleStackTracer, "call_module", call),
            method_patched_here(_ModuleStackTracer, "create_node", create),
            method_patched_here(torch.autograd.Function, "apply", call_function),
            recording_splits(self._mark),
        ):
            yield

    def _marked(self, path: str, module: nn.Module, call: Callable[[], Any]) -> Any:
        points = split_points(module)
        if points:
            self._unmet.pop(path, None)
        if SplitPoint.BEGINNING in points:
            self._mark()
        result = call()
        if SplitPoint.END in points:
            self._mark()
        return result

    def _call(
        self,
        tracer: Any,
        path: str,
        own: nn.Module,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        outside = self._scope
        if path != "":
            self._numbers[path] = self._numbers.get(path, -1) + 1
            self._scope = {**outside, f"{path}@{self._numbers[path]}": (path, type(own))}
        try:
            is_leaf = isinstance(own, DeferredBatchNorm) or self._is_leaf(own, path)
            if path == "" or not is_leaf or self._own_tensors.are_others(module):
                check_backward_hooks(path, own)
                return self._call_module(tracer, module, forward, args, kwargs)
            self._on_leaf(own, args)
            return self._keep(KeptModule(path), result_of(own, forward), args, kwargs)
        finally:
            self._scope = outside

    def _keep(self, what: KeptModule | AutogradFunction, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        proxies = _pytree.tree_map(self._tracer.unwrap_proxy, (args, kwargs))
        self._inside, count = True, len(self._reads)
        try:
            with (
                self.own_questions(*given),
                disable_proxy_modes_tracing(),
                torch._C.DisableTorchFunction(),
                recording_splits(lambda: None),
            ):
                result = run(*args, **kwargs)
                result = _pytree.tree_map_only(torch.Tensor, lambda made: _another(made, given), result)
        finally:
            self._inside = False
            del self._reads[count:]  # a module that is kept whole follows its own flags
        proxy = self._tracer.create_proxy("call_function", kept, (len(self.calls), *proxies[0]), proxies[1])
        self.calls.append(what)
        return track_tensor_tree(result, proxy, constant=None, tracer=self._tracer)

    def _mark(self) -> None:
        node = self._tracer.create_node("call_function", kept, (len(self.calls),), {})
        node.meta["val"] = None
        self.calls.append(MARK)

    @contextmanager
    def own_questions(self, *given: torch.Tensor) -> Iterator[None]:
        """A context for operations on ``given`` that ask about sizes when they run, too: nothing else depends on the answer."""
        env = next((each.fake_mode.shape_env for each in given if hasattr(each, "fake_mode")), None)
        before = 0 if env is None else len(env.guards)
        yield
        self.asked_again.update(range(before, before if env is None else len(env.guards)))

    def recorded(
        self, operator: torch._ops.OpOverload, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record a call of an operator that has given ``tensor`` itself, without a trace."""
        if self._inside or get_proxy_mode() is None:  # torch's own code calls it, to find out what an operator gives
            return tensor
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            result = tensor.view_as(tensor)
        proxy = self._tracer.create_proxy("call_function", operator, (self._tracer.unwrap_proxy(tensor), *args), kwargs)
        return track_tensor_tree(result, proxy, constant=None, tracer=self._tracer)

    def is_inside(self) -> bool:
        """Whether a kept call runs now: nothing in it is recorded."""
        return self._inside

    def check_all_met(self) -> None:
        """Raise if a mark is on a module that forward has not called."""
        if self._unmet:
            raise MarkError(
                f"split points on modules that tracing never called: {', '.join(map(repr, self._unmet))}. Either forward "
                "does not call them, or they lie inside a module that is not traced through (a module of torch.nn, or a "
                "leaf of your tracer); mark that module, or pass a tracer whose is_leaf_module says False for it"
            )


def _another(made: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    """A tensor that a module returns as it got it, as another object: later uses are of one or of the other."""
    return made.view_as(made) if any(made is each for each in given) else made


def check_backward_hooks(path: str, module: nn.Module) -> None:
    """Refuse backward hooks on a module that is taken apart: a stage has its operations, and does not call it."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise TracingError(
            f"{path!r} ({type(module).__name__}) has backward hooks, which would be lost, since tracing takes it apart; keep "
            "it whole with a tracer whose is_leaf_module says True for it, or take the hooks off"
        )
