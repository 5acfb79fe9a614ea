"""Checks, in a first step, that the losses of parts of a batch add up to the loss of the whole.

The inputs of the loss are those of one micro-batch, or of several where one has few rows. They are cut in two unequal parts:

    L(rows 0 to n)   ==   w · L(rows 0 to k)  +  w' · L(rows k to n)        with the weights that the step assumes

If that is not so, the other reductions are tried, and the one that fits is reported. Targets that hold a value which
losses often leave out, such as -100, are tried with more of it. Nothing of a check remains: no gradient, no random number,
no buffer.
"""

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pippy.drivers.batches.division import CutTensor, DividedValue, Division, PerMicrobatch
from pippy.drivers.batches.loss_check import LossCheck, LossReport, indices
from pippy.drivers.batches.specs import items_with_paths
from pippy.ir.names import LOSS
from pippy.ir.passes.loss_function import FunctionLoss
from pippy.ir.trees import children, leaves, map_leaves

_ENOUGH = 3  # rows, for two parts that differ
_DOUBLED = 1 << 24  # elements that may be checked in float64
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_VALUES = 16  # values of a target that are tried, whether the loss leaves them out
_WRITTEN = 16  # class weights that are written out


class Call(Protocol):
    """What computes the loss."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Sequence[Any]) -> Any: ...


class NotPossible(Exception):
    """The loss cannot be computed for parts, or not be compared."""


@dataclass(frozen=True)
class Sample:
    """Inputs of the loss that can be cut: each tensor along its ``dims`` entry, or not at all (None)."""

    inputs: tuple[Any, ...]
    dims: tuple[int | None, ...]
    rows: int

    def part(self, start: int, stop: int) -> tuple[Any, ...]:
        """Some rows, in tensors of their own."""
        dims = iter(self.dims)
        return tuple(map_leaves(lambda leaf: self._cut(leaf, next(dims), start, stop), value) for value in self.inputs)

    def _cut(self, leaf: Any, dim: int | None, start: int, stop: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if dim is None:
            return leaf.clone()
        each = leaf.shape[dim] // self.rows
        return leaf.narrow(dim, start * each, (stop - start) * each).clone()

    def joined(self, other: "Sample") -> "Sample | None":
        """The rows of both; None if what has no rows differs."""
        mine, theirs = ([leaf for value in each.inputs for leaf in leaves(value)] for each in (self, other))
        if len(mine) != len(theirs) or self.dims != other.dims:
            return None
        found = []
        for one, two, dim in zip(mine, theirs, self.dims):
            if dim is None and isinstance(one, torch.Tensor) and not (one.shape == two.shape and torch.equal(one, two)):
                return None
            found.append(one if dim is None else torch.cat([one, two], dim))
        items = iter(found)
        return replace(
            self,
            inputs=tuple(map_leaves(lambda _: next(items), value) for value in self.inputs),
            rows=self.rows + other.rows,
        )

    def mapped(self, function: Callable[[int, torch.Tensor, int | None], torch.Tensor]) -> "Sample":
        """The same with other tensors: ``function`` takes the number of the input, the tensor and its dimension."""
        dims = iter(self.dims)

        def one(number: int, leaf: Any) -> Any:
            dim = next(dims)
            return function(number, leaf, dim) if isinstance(leaf, torch.Tensor) else leaf

        inputs = [map_leaves(lambda leaf, n=number: one(n, leaf), value) for number, value in enumerate(self.inputs)]  # type: ignore[misc]
        return replace(self, inputs=tuple(inputs))


@dataclass(frozen=True)
class Cut:
    """A sample cut in two, and the losses of the parts and of the whole."""

    parts: tuple[tuple[Any, ...], tuple[Any, ...]]
    rows: tuple[int, int]
    losses: tuple[float, float]
    whole: float
    tolerance: float

    def fits(self, weights: tuple[float, float]) -> bool:
        """Whether the weighted losses add up. A loss of weight 0 is left out, nan or not."""
        terms = [weight * loss for weight, loss in zip(weights, self.losses) if weight]
        size = abs(self.whole) + sum(map(abs, terms))
        return math.isfinite(size) and abs(sum(terms) - self.whole) <= self.tolerance * size

    def alike(self) -> bool:
        """Whether any weights fit, as the losses are the same."""
        return all(abs(loss - self.whole) <= 1e3 * self.tolerance * abs(self.whole) for loss in self.losses)


class LossProbe:
    """One check, in one step. It sees the inputs of the loss of each micro-batch before the loss is computed."""

    def __init__(self, check: LossCheck, division: Division) -> None:
        self.check, self.division = check, division
        self.sample: Sample | None = None
        self.seen = 0
        self.report: LossReport | None = None

    def see(
        self, call: Call, names: Sequence[str], gives: Sequence[str | None], inputs: Sequence[Any], microbatch: int
    ) -> None:
        """Take the inputs of a micro-batch, and check when there are enough."""
        self.seen += 1
        if self.report is not None or self.division.sizes is None:
            return
        detached = tuple(
            map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, v) for v in inputs
        )
        rows = self.division.rows_of(microbatch)
        found = Sample(detached, tuple(self._dims(call, names, detached, microbatch, rows)), rows)
        last = self.seen == self.division.chunks
        if self.sample is not None:
            joined = self.sample.joined(found)
            last, found = last or joined is None, joined or self.sample
        self.sample = found
        if found.rows >= _ENOUGH or last:
            with torch.no_grad(), unchanged(call.module):
                index = None if len(gives) == 1 else list(gives).index(self.check.value)
                computed = [number for number, name in enumerate(names) if name not in self.check.inputs]
                judge = Judge(self.check, call, index, names, computed)
                judge.holds = self._holds
                self.report = judge.judge(found, last)

    def _holds(self, value: int) -> bool:
        given = [self.division.arguments[name] for name in self.check.inputs if name in self.division.arguments]
        return any(bool((each == value).any()) for divided in given for each in indices(divided))

    def _dims(
        self, call: Call, names: Sequence[str], inputs: Sequence[Any], microbatch: int, rows: int
    ) -> Iterator[int | None]:
        given = {
            name: list(_dims_given(self.division.arguments[name], value)) if name in self.check.inputs else None
            for name, value in zip(names, inputs)
        }
        known = [dim for dims in given.values() for dim in dims or () if dim is not None]
        for name, value in zip(names, inputs):
            dims = given[name]
            if dims is not None:
                yield from dims
            else:
                yield from (_dim_of(leaf, rows, [*known, 0], call.name == LOSS) for leaf in leaves(value))


def _dims_given(divided: Any, value: Any) -> Iterator[int | None]:
    """Where each tensor of an input has its rows."""
    if isinstance(divided, CutTensor):
        yield divided.dim
    elif isinstance(divided, PerMicrobatch):
        fits = [
            isinstance(leaf, torch.Tensor) and divided.dim is not None and leaf.dim() > divided.dim
            for leaf in leaves(value)
        ]
        yield from (divided.dim if each else None for each in fits)
    elif isinstance(divided, DividedValue) or children(value) is None:
        yield from (None for _ in leaves(value))
    else:
        for item, its in zip(children(divided) or (), children(value) or ()):
            yield from _dims_given(item, its)


def _dim_of(leaf: Any, rows: int, likely: Sequence[int], flattened: bool) -> int | None:
    """Where a computed tensor has its rows, or several values for each row."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    exact = [dim for dim in likely if dim < leaf.dim() and leaf.shape[dim] == rows]
    if exact:
        return exact[0]
    return 0 if flattened and leaf.shape[0] and leaf.shape[0] % rows == 0 else None


class Judge:
    """Finds how the losses of parts add up."""

    def __init__(
        self, check: LossCheck, call: Call, index: int | None, names: Sequence[str], computed: Sequence[int]
    ) -> None:
        self.check, self.call, self.index, self.names, self.computed = check, call, index, names, computed
        self.entropies: list[Mapping[str, Any]] = []
        self.holds: Callable[[int], bool] = lambda value: False  # whether targets of the step hold a value

    def judge(self, sample: Sample, last: bool) -> LossReport | None:
        """A report; None if the sample says nothing and more micro-batches are to come."""
        try:
            sample = self._prepared(sample)
            whole = self._loss(sample.inputs)
        except Exception:  # if it is the loss that is wrong, the step itself is going to say so
            return LossReport(possible=False)
        if not math.isfinite(whole):
            return LossReport(conclusive=False) if last else None
        if sample.rows < 2 or all(dim is None for number in self.computed for dim in self._dims(sample, number)):
            return LossReport(possible=False)
        report = self._report(sample)
        training = [module for module in self.call.module.modules() if module.training]
        if not report.fits and training and not isinstance(self.call.module, FunctionLoss):
            for module in training:
                module.training = False
            calm = self._report(sample)
            report = calm if calm.fits or not calm.random else report
        return report

    def _dims(self, sample: Sample, number: int) -> list[int | None]:
        counts = [sum(1 for _ in leaves(value)) for value in sample.inputs]
        start = sum(counts[:number])
        return list(sample.dims[start : start + counts[number]])

    def _prepared(self, sample: Sample) -> Sample:
        """In float64 where the loss can take it, for a sharper comparison."""
        elements = sum(
            leaf.numel() for value in sample.inputs for leaf in leaves(value) if isinstance(leaf, torch.Tensor)
        )
        if self.call.name == LOSS and elements <= _DOUBLED and not any(True for _ in self.call.module.parameters()):
            with suppress(Exception):
                doubled = sample.mapped(lambda _, leaf, dim: leaf.double() if leaf.is_floating_point() else leaf)
                self._loss(doubled.inputs)
                return doubled
        return sample

    def _loss(self, inputs: Sequence[Any], seed: int = 0, notes: bool = False) -> float:
        _seed(seed, inputs)
        with _Entropies(self.entropies) if notes else ExitStack():
            value = self.call.run(
                tuple(
                    map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, each)
                    for each in inputs
                )
            )
        value = _at(value if self.index is None else value[self.index], self.check.seed)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise NotPossible
        self.dtype = value.dtype
        return float(value.detach().double())

    def _report(self, sample: Sample) -> LossReport:
        self.entropies.clear()
        whole = self._loss(sample.inputs, notes=True)
        if abs(self._loss(sample.inputs, seed=1) - whole) > 1e-2 * self._tolerance(sample) * abs(whole):
            return LossReport(fits=False, random=True)
        ignored = tuple(dict.fromkeys(int(each.get("ignore_index") or 0) for each in self.entropies if _averages(each)))
        try:
            cuts = self._cuts(sample)
        except Exception as error:
            return LossReport(fits=False, seen=f"for a part of the rows it raised {type(error).__name__}: {error}")
        conclusive = True
        if all(cut.alike() for cut in cuts):
            conclusive = False
            with suppress(Exception):
                noisy = self._cuts(self._noisy(sample))
                conclusive, cuts = not all(cut.alike() for cut in noisy), cuts + noisy
        held = dict.fromkeys([*self.check.held, *filter(self.holds, [*ignored, 0, -1]), *self._classes()])
        for value in held:
            with suppress(Exception):
                cuts = cuts + self._cuts(self._holding(sample, value))
        assumed = self._assumed()
        wrong = [cut for cut in cuts if not cut.fits(assumed(cut))]
        if not wrong:
            return LossReport(conclusive=conclusive, ignored=ignored)
        found = next((text for text, weights in self._reductions(sample, ignored) if _all_fit(cuts, weights)), None)
        one, two = wrong[0].losses
        seen = (
            f"{wrong[0].rows[0]} and {wrong[0].rows[1]} rows have the losses {one:.6g} and {two:.6g}, "
            f"together {wrong[0].whole:.6g}"
        )
        return LossReport(fits=False, reduction=found, ignored=ignored, seen=seen)

    def _classes(self) -> list[int]:
        """Of the classes that weigh something, the one that weighs least and the one that weighs most."""
        weights = [
            each["weight"].detach().double()
            for each in self.entropies
            if _averages(each) and each.get("weight") is not None
        ]
        positive = [torch.where(weight > 0, weight, math.inf) for weight in weights]
        return [int(each) for weight, least in zip(weights, positive) for each in (least.argmin(), weight.argmax())]

    def _tolerance(self, sample: Sample) -> float:
        if torch.is_autocast_enabled(_device(sample.inputs)):
            return 2e-2
        kinds = [
            leaf.dtype
            for number in self.computed
            for leaf in leaves(sample.inputs[number])
            if isinstance(leaf, torch.Tensor)
        ]
        return max(_TOLERANCES.get(kind, 2e-2) for kind in [self.dtype, *kinds] if kind.is_floating_point)

    def _cuts(self, sample: Sample) -> list[Cut]:
        whole, rows = self._loss(sample.inputs), sample.rows
        found = []
        for at in dict.fromkeys((max(rows // 3, 1), rows - 1)):
            parts = sample.part(0, at), sample.part(at, rows)
            losses = self._loss(parts[0]), self._loss(parts[1])
            found.append(Cut(parts, (at, rows - at), losses, whole, self._tolerance(sample)))
        return found

    def _noisy(self, sample: Sample) -> Sample:
        """Other values in place of computed ones: where all rows have the same loss, no weights could be told apart."""

        def noisy(number: int, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            return (
                leaf + 0.01 * torch.randn_like(leaf) if number in self.computed and leaf.is_floating_point() else leaf
            )

        _seed(2, sample.inputs)
        return sample.mapped(noisy)

    def _holding(self, sample: Sample, value: int) -> Sample:
        """The same with this target in all of the first row, in each input that holds it anyway or may."""

        def holding(number: int, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if (
                number in self.computed
                or dim is None
                or not _is_index(leaf)
                or (leaf.is_cuda and value < 0 and not bool((leaf == value).any()))
            ):
                return leaf
            leaf = leaf.clone()
            leaf.narrow(dim, 0, leaf.shape[dim] // sample.rows).fill_(value)
            return leaf

        return sample.mapped(holding)

    def _assumed(self) -> Callable[[Cut], tuple[float, float]]:
        return _alone if self.check.kind == "sum" else _by_rows

    def _reductions(
        self, sample: Sample, ignored: Sequence[int]
    ) -> Iterator[tuple[str, Callable[[Cut], tuple[float, float]]]]:
        """The reductions that are known, as they are written, and the weights that they give."""
        yield "'sum'", _alone
        yield "'mean'", _by_rows
        for number, name in enumerate(self.names):
            user = self.check.inputs.get(name)
            if user is None or not user.isidentifier():
                continue
            for expression, leaf in _tensors_with_paths(sample.inputs[number], user):
                for count, names in self._counts(expression, leaf, ignored):
                    text = f"lambda {user}: {count}"
                    yield text, _counted(eval(text, {"torch": torch, **names}), number)

    def _counts(
        self, expression: str, leaf: torch.Tensor, ignored: Sequence[int]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Expressions that count what a tensor holds, and the names that they use."""
        if leaf.dtype == torch.bool:
            yield f"{expression}.sum()", {}
        elif leaf.is_floating_point():
            yield f"({expression} != 0).sum()", {}
            yield f"{expression}.clamp(min=0).sum()", {}
        elif _is_index(leaf):
            for each in self.entropies:
                weight = each.get("weight")
                if weight is not None and not (each.get("label_smoothing") and bool((weight == 0).any())):
                    yield _weighing(expression, weight, each.get("ignore_index", -100))
            some = leaf.unique()[:_VALUES].tolist()
            for value in dict.fromkeys([*ignored, -100, *self.check.held, 0, *some]):
                yield f"({expression} != {value}).sum()", {}
                if leaf.dim() > 1:
                    yield f"({expression}[:, 1:] != {value}).sum()", {}
            yield f"{expression}.sum()", {}


def _all_fit(cuts: Sequence[Cut], weights: Callable[[Cut], tuple[float, float]]) -> bool:
    try:
        return all(cut.fits(weights(cut)) for cut in cuts)
    except Exception:  # it cannot count this
        return False


def _alone(cut: Cut) -> tuple[float, float]:
    return 1.0, 1.0


def _by_rows(cut: Cut) -> tuple[float, float]:
    return cut.rows[0] / sum(cut.rows), cut.rows[1] / sum(cut.rows)


def _counted(count: Callable[[Any], Any], number: int) -> Callable[[Cut], tuple[float, float]]:
    def weights(cut: Cut) -> tuple[float, float]:
        one, two = (float(count(part[number])) for part in cut.parts)
        return one / (one + two), two / (one + two)

    return weights


def _weighing(expression: str, weight: torch.Tensor, ignored: int) -> tuple[str, dict[str, Any]]:
    weight = weight.detach().cpu().double()
    short = weight.numel() <= _WRITTEN
    table = f"torch.tensor({weight.tolist()}, dtype=torch.float64)" if short else "class_weights"
    return f"({table}[{expression}.cpu().clamp(min=0)] * ({expression}.cpu() != {ignored})).sum()", {
        "class_weights": weight
    }


def _tensors_with_paths(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    held = items_with_paths(value, path)
    if held is None:
        yield from [(path, value)] if isinstance(value, torch.Tensor) else []
    for where, item in held or ():
        yield from _tensors_with_paths(item, where)


def _is_index(leaf: torch.Tensor) -> bool:
    return not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool


def _averages(entropy: Mapping[str, Any]) -> bool:
    return entropy.get("reduction", "mean") == "mean"


def _at(value: Any, seed: Any) -> Any:
    """What lies in a value where the seed of the loss is."""
    while isinstance(seed, (list, tuple)):
        index = next(number for number, each in enumerate(seed) if each is not None)
        value, seed = (children(value) or ())[index], seed[index]
    return value


def _device(inputs: Sequence[Any]) -> str:
    found = [leaf.device.type for value in inputs for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return next((each for each in found if each != "cpu"), "cpu")


def _seed(seed: int, inputs: Sequence[Any]) -> None:
    torch.default_generator.manual_seed(seed)
    if _device(inputs) == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class _Entropies(TorchFunctionMode):
    """Notes how the cross entropies are called that a loss calls."""

    def __init__(self, found: list[Mapping[str, Any]]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            with suppress(TypeError):
                self.found.append(inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
        return func(*args, **(kwargs or {}))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Leaves random states, buffers and attributes as they are, those of what a loss function refers to too.

    >>> norm = nn.BatchNorm1d(2)
    >>> with unchanged(norm):
    ...     _ = norm(torch.randn(3, 2))
    >>> norm.num_batches_tracked
    tensor(0)
    """
    function = module.function if isinstance(module, FunctionLoss) else module
    reached = list(_reached(function))
    modules = [each for root in [module, *reached] if isinstance(root, nn.Module) for each in root.modules()]
    plain = [each for each in reached if isinstance(each, torch.Tensor) and not each.requires_grad]
    attributes = [(each, dict(each.__dict__), dict(each._buffers)) for each in modules]
    held = [*plain, *(buffer for _, _, buffers in attributes for buffer in buffers.values() if buffer is not None)]
    copies = [(tensor.clone(), tensor._version) for tensor in held]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        compiled = any(each._compiled_call_impl for each in modules)
        eager = torch.compiler.set_stance("force_eager") if compiled else ExitStack()
        with torch.random.fork_rng(devices), eager:
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        for each, attribute, buffers in attributes:
            each.__dict__.clear()
            each.__dict__.update(attribute)
            each._buffers.clear()
            each._buffers.update(buffers)
        with torch.no_grad():
            for tensor, (copied, version) in zip(held, copies):
                if tensor._version != version:
                    tensor.copy_(copied)


def _reached(function: Any) -> Iterator[Any]:
    """What a function refers to by its closure, its arguments or its object."""
    if hasattr(function, "func"):  # a partial
        yield from _reached(function.func)
        yield from [*function.args, *function.keywords.values()]
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents
    code = getattr(function, "__code__", None)
    names = code.co_names if code is not None else ()
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
