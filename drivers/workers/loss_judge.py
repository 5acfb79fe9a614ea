"""Finds how the losses of parts of a batch add up to the loss of the whole.

A sample is cut in two unequal parts:

    L(rows 0 to n)   ==   w · L(rows 0 to k)  +  w' · L(rows k to n)        with the weights that the step assumes

If that is not so, the other reductions are tried, and the one that fits is reported. Targets that hold a value which
losses often leave out, such as -100, are tried with more of it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from pippy.drivers.batches.loss_check import LossCheck, LossReport
from pippy.drivers.workers.cross_entropies import CrossEntropies
from pippy.drivers.workers.known_reductions import KnownReductions, Weights, alone, by_rows, is_index
from pippy.drivers.workers.loss_sample import Cut, Sample
from pippy.ir.names import LOSS
from pippy.ir.passes.loss_function import FunctionLoss
from pippy.ir.run.random_state import seed_all
from pippy.ir.sparse_tensors import map_stored
from pippy.ir.trees import children, leaves, map_leaves

_DOUBLED = 1 << 24  # elements that may be checked in float64
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class Call(Protocol):
    """What computes the loss."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Sequence[Any]) -> Any: ...


class NotPossible(Exception):
    """The loss cannot be computed for parts, or not be compared."""


class Judge:
    """Finds how the losses of parts add up."""

    def __init__(
        self, check: LossCheck, call: Call, index: int | None, names: Sequence[str], computed: Sequence[int]
    ) -> None:
        self.check, self.call, self.index, self.names, self.computed = check, call, index, names, computed
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
        if sample.rows < 2 or all(dim is None for number in self.computed for dim in sample.dims_of(number)):
            return LossReport(possible=False)
        report = self._report(sample)
        training = [module for module in self.call.module.modules() if module.training]
        if not report.fits and training and not isinstance(self.call.module, FunctionLoss):
            for module in training:
                module.training = False
            calm = self._report(sample)
            report = calm if calm.fits or not calm.random else report
        return report

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

    def _loss(self, inputs: Sequence[Any], seed: int = 0) -> float:
        seed_all(seed)
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
        with CrossEntropies() as entropies:
            whole = self._loss(sample.inputs)
        if abs(self._loss(sample.inputs, seed=1) - whole) > 1e-2 * self._tolerance(sample) * abs(whole):
            return LossReport(fits=False, random=True)
        ignored = entropies.ignored()
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
        held = dict.fromkeys([*self.check.held, *filter(self.holds, [*ignored, 0, -1]), *entropies.classes()])
        for value in held:
            with suppress(Exception):
                cuts = cuts + self._cuts(self._holding(sample, value))
        assumed = self._assumed()
        wrong = [cut for cut in cuts if not cut.fits(assumed(cut))]
        if not wrong:
            return LossReport(conclusive=conclusive, ignored=ignored)
        users = [self.check.inputs.get(name) for name in self.names]
        known = KnownReductions(sample.inputs, users, entropies.calls, [*ignored, -100, *self.check.held])
        found = next((text for text, weights in known if _all_fit(cuts, weights)), None)
        one, two = wrong[0].losses
        seen = (
            f"{wrong[0].rows[0]} and {wrong[0].rows[1]} rows have the losses {one:.6g} and {two:.6g}, "
            f"together {wrong[0].whole:.6g}"
        )
        return LossReport(fits=False, reduction=found, ignored=ignored, seen=seen)

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
            if number not in self.computed or not leaf.is_floating_point():
                return leaf
            return map_stored(lambda values: values + 0.01 * torch.randn_like(values), leaf)

        seed_all(2)
        return sample.mapped(noisy)

    def _holding(self, sample: Sample, value: int) -> Sample:
        """The same with this target in all of the first row, in each input that holds it anyway or may."""

        def holding(number: int, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if (
                number in self.computed
                or dim is None
                or not is_index(leaf)
                or (leaf.is_cuda and value < 0 and not bool((leaf == value).any()))
            ):
                return leaf
            leaf = leaf.clone()
            leaf.narrow(dim, 0, leaf.shape[dim] // sample.rows).fill_(value)
            return leaf

        return sample.mapped(holding)

    def _assumed(self) -> Weights:
        return alone if self.check.kind == "sum" else by_rows


def _all_fit(cuts: Sequence[Cut], weights: Weights) -> bool:
    try:
        return all(cut.fits(weights(cut)) for cut in cuts)
    except Exception:  # it cannot count this
        return False


def _at(value: Any, seed: Any) -> Any:
    """What lies in a value where the seed of the loss is."""
    while isinstance(seed, (list, tuple)):
        index = next(number for number, each in enumerate(seed) if each is not None)
        value, seed = (children(value) or ())[index], seed[index]
    return value


def _device(inputs: Sequence[Any]) -> str:
    found = [leaf.device.type for value in inputs for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return next((each for each in found if each != "cpu"), "cpu")
