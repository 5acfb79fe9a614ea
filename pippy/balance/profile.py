"""The time and the memory of each operation of a model, measured by running it alone.

    for each operation, in order                                                        who
    ────────────────────────────────────────────────────────────────────────────────    ──────────────────
    1 its arguments become leaves; those that it changes, copies                        _Trial._prepared
    2 one run gives the value for later operations, and what autograd saves             _Trial, Storages
    3 more runs, each followed by a backward of the operation alone, give the times;    _Trial, Stopwatch
      fewer if others have done the same work
    4 its value is detached and kept until its last use                                 _Run

Values are detached from one another, so only one operation's graph is alive at a time. An operation that fails so, as
`torch.autograd.grad` does, is run after all those before it, as forward runs it. Its time is known then, and nothing else.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pippy.balance.stopwatch import ChangedTensors, Clock, Stopwatch, Timing, restoring_model
from pippy.ir.base import source
from pippy.ir.base.errors import BalanceError, StageError
from pippy.ir.base.fake_mode import work_of
from pippy.ir.base.logs import is_muted, redraws
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import GRADIENTS_OFF
from pippy.ir.base.trees import map_stored, map_tensors, nbytes, plain_parts, tensors
from pippy.ir.cut.effects import find_mutations
from pippy.ir.cut.uses import is_operation, operations
from pippy.ir.record.compiled import Traced, map_nodes, values_to_free
from pippy.ir.run.checkpointed_parts import is_end, parts_of
from pippy.ir.run.stage_run import as_leaf

_LONGEST = 70


@dataclass
class OperationCost:
    """One operation: nanoseconds of forward and backward, and the storages that autograd saves for it, with their bytes."""

    forward: int = 0
    backward: int = 0
    saved: dict[int, int] = field(default_factory=dict)


@dataclass
class Profile:
    """The cost of each operation in order, the bytes of its value, the cost of the loss, and facts that the runs showed.

    ``changed`` has the ids of tensors of the model that changed, ``untravelling`` the operations whose values cannot be sent to
    another stage. All times together may be wrong by ``uncertain`` of themselves.
    """

    costs: list[OperationCost] = field(default_factory=list)
    sizes: dict[fx.Node, int] = field(default_factory=dict)
    loss: OperationCost = field(default_factory=OperationCost)
    changed: set[int] = field(default_factory=set)
    untravelling: list[fx.Node] = field(default_factory=list)
    uncertain: float = 0.0

    def kept(self, start: int, end: int) -> list[int]:
        """The bytes that each of some operations keeps for the backward, and none of those before it.

        The sum is nearly what a stage of them keeps: values that it takes from other stages and does not save are missing.
        The loss is with the last operation.
        """
        seen, found = set[int](), list[int]()
        for number, cost in enumerate(self.costs[start:end], start + 1):
            saved = cost.saved | (self.loss.saved if number == len(self.costs) else {})
            found.append(sum(size for key, size in saved.items() if key not in seen))
            seen |= saved.keys()
        return found


def profile(
    traced: Traced,
    inputs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    *,
    timed: bool = True,
    trains: bool = True,
    progress: bool | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Profile:
    """Run the operations of ``traced`` on ``inputs``, the values of its placeholders by name.

    Parameters, buffers, gradients, attributes, training flags, random states and the inputs are left as they were.

    >>> from pippy.ir.trace.trace import trace
    >>> found = profile(trace(nn.Sequential(nn.Linear(4, 2), nn.Tanh())), {"input_1": torch.ones(8, 4)}, timed=False)
    >>> [list(cost.saved.values()) for cost in found.costs]  # the input, and the result of tanh
    [[128], [64]]
    """
    modules = [traced.model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    with restoring_model(*modules) as state, torch.inference_mode(False), torch.set_grad_enabled(trains):
        run = _Run(traced, state, Stopwatch(modules, clock) if timed else None)
        return run.run(inputs, loss_fn, target, progress)


class _Run:
    """One walk over the operations. ``values`` are detached; ``flags`` say which of their tensors want a gradient."""

    def __init__(self, traced: Traced, state: ChangedTensors, stopwatch: Stopwatch | None) -> None:
        self.traced, self.state, self.stopwatch = traced, state, stopwatch
        self.values: dict[fx.Node, Any] = {}
        self.flags: dict[fx.Node, list[bool]] = {}
        self.profile = Profile()
        mutations, self.roots = find_mutations(traced.graph, traced.attributes)
        self.targets: dict[fx.Node, set[fx.Node]] = {}  # what each operation changes in place
        for mutation in mutations:
            self.targets.setdefault(mutation.node, set()).add(mutation.target)
        self.storages = Storages(tensor for _, tensor in named_state(traced.model))
        self.parts = {part.begin: part for part in parts_of(list(traced.graph.nodes))}
        self.around = 0  # how many checkpointed parts have begun that have not ended
        self.timed: list[_Timed] = []
        self.whole: _Whole | None = None

    def run(self, inputs: Mapping[str, Any], loss_fn: Any, target: Any, shown: bool | None) -> Profile:
        """Walk over the graph."""
        numbered = operations(self.traced)
        progress = ProfileProgress(len(numbered) + (loss_fn is not None), shown)
        expired = values_to_free(list(self.traced.graph.nodes))
        self.whole = _Whole(self.traced, inputs)
        try:
            for node in self.traced.graph.nodes:
                if node.op == "placeholder":  # a copy: an operation may change it in place
                    self._put(node, map_tensors(_copied, inputs[node.name]))
                    self.profile.sizes[node] = nbytes(self.values[node])
                elif node.op == "get_attr":
                    self.values[node] = self.traced.attributes[str(node.target)]
                elif node.op == "output" and loss_fn is not None:
                    progress.step("the loss")
                    self._loss(loss_fn, node.args[0], target)
                elif is_operation(node):
                    progress.step(str(node.target) if node.op == "call_module" else node.name)
                    self._operation(node)
                    self._enter_or_leave(node)
                for each in expired.get(node, ()):
                    self.values.pop(each, None)
        finally:
            progress.end()
        self.profile.changed = self.state.changed
        self._read_times()
        return self.profile

    def _read_times(self) -> None:
        """Write the times into the costs, now that all runs are made."""
        for each in self.timed:
            each.cost.forward, each.cost.backward = each.timing.forward, each.timing.backward
            each.cost.backward += each.runs_again * each.cost.forward if each.cost.backward else 0
        total = sum(each.cost.forward + each.cost.backward for each in self.timed)
        uncertain = sum(each.timing.uncertain for each in self.timed)
        self.profile.uncertain = uncertain / total if total else 0.0

    def _operation(self, node: fx.Node) -> None:
        called = callee_of(node, self.traced)
        constants = [self.values[each] for each in node.all_input_nodes if each.op == "get_attr"]
        needs = [each for each in constants if isinstance(each, torch.Tensor)]
        needs += _state_of(called)
        roots = {root for target in self.targets.get(node, ()) for root in self.roots[target]}
        held = [self.traced.attributes[str(root.target)] for root in roots if root.op == "get_attr"]

        def call(arguments: Any) -> Any:
            return _called(called, *arguments)

        with self.state.watching([*needs, *held]), explain_operation_errors(node):
            enabled = torch.is_grad_enabled() and not GRADIENTS_OFF.of(node)
            with torch.set_grad_enabled(enabled):
                trial = _Trial(self, call, (node.args, node.kwargs), needs, self.targets.get(node, set()))
                try:
                    value, cost = trial.measure(called)
                except Exception:
                    assert self.whole is not None
                    value, cost = self.whole.measure(node)
            self._put(node, value)
            if node in self.targets:
                self._change(node, call, wanted=any(copy.requires_grad for copy in trial.copies))
        self.profile.costs.append(cost)
        self.profile.sizes[node] = nbytes(self.values[node])
        try:
            as_leaf(value)
        except StageError:
            self.profile.untravelling.append(node)

    def _enter_or_leave(self, node: fx.Node) -> None:
        """Begin or end a checkpointed part. Autograd saves its inputs, and runs its operations again for each part around."""
        part = self.parts.get(node)
        cost = self.profile.costs[-1]
        if part is not None:
            inputs = [self.values[each] for each in (*part.inputs, *part.captured())]
            if not self.around and torch.is_grad_enabled():
                cost.saved = self.storages.of(inputs)
            self.around += 1
            return
        if self.around:
            cost.saved = {}
            if self.timed and self.timed[-1].cost is cost:
                self.timed[-1].runs_again = self.around
        if is_end(node):
            self.around -= 1

    def _put(self, node: fx.Node, value: Any) -> None:
        """Note a value, detached from the operation that made it."""
        self.flags[node] = [tensor.requires_grad for tensor in tensors(value)]
        self.values[node] = map_tensors(torch.Tensor.detach, value)

    def _change(self, node: fx.Node, call: Callable[[Any], Any], wanted: bool) -> None:
        """Change the values themselves, as copies of them were changed, so that values that share their memory change too."""
        with torch.no_grad():
            value = call(map_nodes(self.values.__getitem__, (node.args, node.kwargs)))
        self.values[node] = map_tensors(torch.Tensor.detach, value)
        roots = {root for target in self.targets[node] for root in self.roots[target]}
        for other in self.flags if wanted else ():
            if other in self.values and roots.intersection(self.roots[other]):
                # After a write into a part, the whole value depends on it.
                self.flags[other] = [
                    each.is_floating_point() or each.is_complex() for each in tensors(self.values[other])
                ]

    def _loss(self, loss_fn: Callable[..., Any], output: Any, target: Any) -> None:
        needs = _state_of(loss_fn)
        with self.state.watching(needs), explain_operation_errors(None):
            trial = _Trial(self, lambda given: loss_fn(given, target), output, needs, set())
            self.profile.loss = trial.measure()[1]


class _Whole:
    """The operations as forward runs them: each on the values that those before it have made, with their graph."""

    def __init__(self, traced: Traced, inputs: Mapping[str, Any]) -> None:
        self.traced, self.inputs, self.rest = traced, inputs, iter(traced.graph.nodes)
        self.values: dict[fx.Node, Any] = {}

    def measure(self, node: fx.Node) -> tuple[Any, OperationCost]:
        """The value of an operation that comes after all that were measured, and its cost, of which the time is known."""
        for each in self.rest:
            begin = time.perf_counter_ns()
            self.values[each] = self._value(each)
            if each is node:
                break
        return self.values[node], OperationCost(time.perf_counter_ns() - begin)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return map_tensors(_copied, self.inputs[node.name])
        if node.op == "get_attr":
            return self.traced.attributes[str(node.target)]
        args, kwargs = map_nodes(self.values.__getitem__, (node.args, node.kwargs))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not GRADIENTS_OFF.of(node)):
            return _called(callee_of(node, self.traced), args, kwargs)


def callee_of(node: fx.Node, traced: Traced) -> Any:
    """What an operation calls: a module, a function, or the name of a method."""
    return traced.attributes[str(node.target)] if node.op == "call_module" else node.target


def _state_of(called: Any) -> list[torch.Tensor]:
    """The parameters and buffers of what is called, if it is a module."""
    return [tensor for _, tensor in named_state(called)] if isinstance(called, nn.Module) else []


def _called(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives: a module or a function, or a method by its name."""
    return getattr(args[0], function)(*args[1:], **kwargs) if isinstance(function, str) else function(*args, **kwargs)


@dataclass
class _Timed:
    """The timing of an operation, and how often the backward of a checkpointed part runs its forward again."""

    cost: OperationCost
    timing: Timing
    runs_again: int = 0


class _Trial:
    """One operation, run on leaves of its own."""

    def __init__(
        self,
        run: _Run,
        call: Callable[[Any], Any],
        arguments: Any,
        needs: Sequence[torch.Tensor],
        targets: Collection[fx.Node],
    ) -> None:
        self.run, self.call, self.arguments, self.targets = run, call, arguments, targets
        self.weights = [tensor for tensor in needs if tensor.requires_grad]
        self.copies: list[torch.Tensor] = []  # of what the call changes in place

    def measure(self, target: Any = None) -> tuple[Any, OperationCost]:
        """The value of the operation, which calls ``target``, and its cost."""
        arguments, leaves = self._prepared()
        work = None if target is None else work_of(target, *arguments)
        with self.run.storages.saved() as saved:
            value = self.call(arguments)
        cost, stopwatch = OperationCost(saved=saved), self.run.stopwatch
        if stopwatch is None or not stopwatch.knows(work):
            self._backward(value, leaves)()
        if stopwatch is not None:
            self.run.timed.append(_Timed(cost, stopwatch.time(self._timed, work)))
        return value, cost

    def _prepared(self) -> tuple[Any, list[torch.Tensor]]:
        """The arguments, and those of their tensors that want a gradient. What the call changes in place is a copy."""
        leaves: list[torch.Tensor] = []
        self.copies = []

        def prepared(node: fx.Node) -> Any:
            value, changes = self.run.values[node], node in self.targets
            if node.op == "get_attr":
                return map_tensors(lambda t: self._copy(t.detach()), value) if changes else value
            flags = iter(self.run.flags[node])

            def leaf(tensor: torch.Tensor) -> torch.Tensor:
                detached = tensor.detach()
                if next(flags) and (detached.is_floating_point() or detached.is_complex()):
                    leaves.append(detached.requires_grad_())
                return self._copy(detached) if changes else detached

            return map_tensors(leaf, value)

        return map_nodes(prepared, self.arguments), leaves

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies.append(tensor.clone())
        self.run.storages.copied(self.copies[-1], tensor)
        return self.copies[-1]

    def _backward(self, value: Any, leaves: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """The backward of the operation alone, ready to be called."""
        outputs = [tensor for tensor in tensors(value) if tensor.requires_grad]
        inputs = [*leaves, *self.weights]
        if not outputs or not inputs or not torch.is_grad_enabled():
            return _nothing
        gradients = [map_stored(torch.ones_like, tensor.detach()) for tensor in outputs]
        return lambda: torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)

    def _timed(self) -> tuple[int, int]:
        assert self.run.stopwatch is not None
        now = self.run.stopwatch.now
        arguments, leaves = self._prepared()
        begin = now()
        value = self.call(arguments)
        forward = now() - begin
        backward = self._backward(value, leaves)
        if backward is _nothing:
            return forward, 0
        begin = now()
        backward()
        return forward, now() - begin


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nothing() -> None:
    """The backward of an operation that has none."""


@contextmanager
def explain_operation_errors(node: fx.Node | None) -> Iterator[None]:
    """Turn an exception into a BalanceError that names the operation and its line in the model."""
    try:
        yield
    except Exception as error:
        what = "the loss" if node is None else f"{node.name}\n{source.excerpt_of(node)}"
        raise BalanceError(
            f"the model was run with the example to measure it, and failed: {type(error).__name__}: {error}\nin {what}\n"
            "What to do: give example_args and example_kwargs that the model itself can be called with, one micro-batch of them"
        ) from error


class Storages:
    """Gives each storage a key. Storages of the model's tensors are left out.

    >>> storages, x = Storages([]), torch.ones(8, requires_grad=True)
    >>> with storages.saved() as saved:
    ...     y = x.exp()
    >>> saved == storages.of(y), list(saved.values())
    (True, [32])
    """

    def __init__(self, model_tensors: Iterable[torch.Tensor]) -> None:
        self.of_model = {part.untyped_storage()._cdata for tensor in model_tensors for part in plain_parts(tensor)}
        self.seen: dict[int, StorageWeakRef] = {}
        self.stands_for: dict[int, tuple[int, int]] = {}  # of copies: the storage that was copied, and its bytes

    def of(self, values: Any) -> dict[int, int]:
        """The storages of the tensors in ``values``, and their bytes."""
        sizes = {}
        for storage in [part.untyped_storage() for tensor in tensors(values) for part in plain_parts(tensor)]:
            key = storage._cdata
            if key not in self.of_model:
                self.seen.setdefault(key, StorageWeakRef(storage))  # while this lives, no other storage has the key
                name, size = self.stands_for.get(key, (key, storage.nbytes()))
                sizes[name] = size
        return sizes

    def copied(self, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Give the storage of a copy the key of the original."""
        both = self.of(copy), self.of(original)
        self.stands_for.update(zip(both[0], both[1].items()))

    @contextmanager
    def saved(self) -> Iterator[dict[int, int]]:
        """Inside, what autograd saves is added to the dict that this gives."""
        sizes: dict[int, int] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            sizes.update(self.of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield sizes


class ProfileProgress:
    """Counts steps. A terminal shows one line that changes; a file gets a line for each tenth of the steps.

    >>> progress = ProfileProgress(2, shown=True, stream=sys.stdout)
    >>> progress.step("0")
    profiling 1/2: 0
    >>> progress.step("1")
    profiling 2/2: 1
    >>> progress.end()
    """

    def __init__(self, steps: int, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        terminal = redraws(self.stream)
        self.steps, self.done, self.terminal = steps, 0, terminal
        self.shown = (terminal if shown is None else shown and self.stream is not None) and not is_muted()

    def step(self, name: str) -> None:
        """The step ``name`` begins."""
        self.done += 1
        if not self.shown:
            return
        text = f"profiling {self.done}/{self.steps}: {name}"[:_LONGEST]
        if self.terminal:
            self.stream.write(f"\r{text}\x1b[K")
        elif self.done * 10 // self.steps > (self.done - 1) * 10 // self.steps:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self.shown and self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
