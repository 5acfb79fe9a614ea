"""A worker's part in a step whose micro-batches are slices of sequences: the keys and values between the runs of a stage."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pippy.drivers.worker.stage_call import StageCall
from pippy.drivers.worker.stage_runs import AutogradRun, Run
from pippy.ir.run.key_value_cache import MadeForLater, SliceCache, roots


class SliceCaches:
    """The caches of one step on one worker: one for each call of a stage, and row of micro-batches with ``slices`` each.

    A cache is dropped with the backward of its first slice, which is the last of the row; or with the last forward, if
    forwards have no backwards.
    """

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._caches: dict[tuple[str, int], SliceCache] = {}
        # Stands for what a slice reads of earlier ones: it makes the half I of a backward give gradients to them.
        self._earlier = torch.zeros(0, requires_grad=True)

    def begin(
        self, call: StageCall, microbatch: int, inputs: tuple[Any, ...], args: Sequence[Any], step: int | None
    ) -> tuple[Any, Run]:
        """`StageCall.begin` for a slice."""
        row, number = divmod(microbatch, self.slices)
        with self._cache(call, row).running(number) as made:
            outputs, run = call.begin((*inputs, self._earlier), args, step)
        assert isinstance(run, AutogradRun)
        return outputs, SliceRun(run, made, (lambda: self._drop(call, row)) if number == 0 else None)

    def run(self, call: StageCall, microbatch: int, args: Sequence[Any], step: int | None) -> Any:
        """`StageCall.run` for a slice."""
        row, number = divmod(microbatch, self.slices)
        with self._cache(call, row).running(number):
            outputs = call.run(args, step)
        if number == self.slices - 1:
            self._drop(call, row)
        return outputs

    def of_row(self, calls: Iterable[str], microbatch: int) -> list[SliceCache]:
        """The caches of some calls, of the row of a micro-batch, as far as there are any."""
        keys = [(call, microbatch // self.slices) for call in calls]
        return [self._caches[key] for key in keys if key in self._caches]

    def _cache(self, call: StageCall, row: int) -> SliceCache:
        return self._caches.setdefault((call.name, row), SliceCache(self.slices))

    def _drop(self, call: StageCall, row: int) -> None:
        self._caches.pop((call.name, row), None)


class SliceRun:
    """A run of a slice: its backward begins with the gradients that later slices have given of what it has ``made``, too.

    ``ends`` is called after the backward of the last slice of a row to go backward.
    """

    def __init__(self, run: AutogradRun, made: Sequence[MadeForLater], ends: Callable[[], None] | None) -> None:
        self.run, self.made, self.ends = run, made, ends

    @property
    def held(self) -> Any:
        return self.run.held

    def backward(self, output_grads: Any) -> Sequence[Any]:
        return self._from_later(self.run.backward, output_grads)

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        return self._from_later(self.run.backward_input, output_grads)

    def backward_weight(self) -> None:
        self.run.backward_weight()

    def _from_later(self, backward: Callable[[Any], Sequence[Any]], output_grads: Any) -> Sequence[Any]:
        edges, gradients = roots(self.made)
        self.run.outputs, self.made = (self.run.outputs, *edges), ()
        found = backward((output_grads, *gradients))[:-1]
        if self.ends is not None:
            self.ends()
        return found
