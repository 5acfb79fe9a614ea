"""Runs steps aside, and compares what they give: trials, in which a driver looks whether a model may be cut into micro-batches.

    reference    5 rows as one micro-batch      ─▶ a digest of each gradient and of each buffer
    noise        the same in another order      ─▶ by how much rounding moves each
    compared     2 rows and 3 rows              ─▶ what differs by more goes back to the controller

A trial ends with nothing changed: gradients are taken from `.grad`, where a step leaves them, and go no further.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.alike import alike
from pippy.drivers.compare.digest import digest, distance, size_of
from pippy.drivers.compare.tolerance import LEAST, Tolerance, floor_of
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.protocol.trials import Purpose, RunTrial, TrialDifference, TrialResult
from pippy.drivers.worker.gradients.step_buffers import StepBuffers, own_buffers
from pippy.drivers.worker.measure.leave_unchanged import left_unchanged
from pippy.drivers.worker.measure.watch import Watch
from pippy.ir.run.snapshot import snapshot_of_buffers

Place = tuple[str, str, str]  # the stage, "gradient" or "buffer", the name in the stage
Digests = dict[Place, torch.Tensor]


class Trials:
    """The trials of one driver on one worker. ``clear`` drops what a step leaves in `.grad`.

    Without ``own_random``, the random numbers are a script's, and whoever runs the step takes care of them.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        clear: Callable[[], None],
        buffers: StepBuffers,
        own_random: bool,
    ) -> None:
        self.modules, self.device, self.clear, self.own_random = modules, device, clear, own_random
        self.step_buffers = buffers
        self.reference: Digests = {}
        self.noise: dict[Place, float] = {}

    def forget(self) -> None:
        """Drop what trials are compared with."""
        self.reference, self.noise = {}, {}

    def try_out(self, trial: RunTrial, inputs: Division, run: Callable[[], StepResult]) -> TrialResult:
        """Carry out a trial. ``run`` runs its step, on these inputs."""
        watch = Watch(inputs) if trial.watch else None
        before = snapshot_of_buffers(dict(self._buffers()))
        differences: tuple[TrialDifference, ...] = ()
        with ExitStack() as stack:
            for module in self.modules.values():
                stack.enter_context(left_unchanged(module, self.own_random))
            stack.callback(self.clear)
            self.clear()
            with self.step_buffers.step(trial.step.inputs.chunks, refuses=False), _alike_and_watched(watch):
                result = run()
            changed = set(before.changed(dict(self._buffers())))
            if trial.purpose is not Purpose.ALONE:
                differences = self._taken(dict(self._digests(changed)), trial.purpose)
            if trial.follow_buffers:
                self.step_buffers.follow({(each.call, each.name) for each in differences if each.kind == "buffer"})
        asked = TrialNotes() if watch is None else watch.asked()
        is_finite = all(_is_finite(found) for (_, kind, _), found in self.reference.items() if kind == "gradient")
        return TrialResult(result.values, differences, asked, is_finite)

    def _taken(self, found: Digests, purpose: Purpose) -> tuple[TrialDifference, ...]:
        if purpose is Purpose.REFERENCE:
            self.reference, self.noise = found, {}
            return ()
        places = [*self.reference, *(place for place in found if place not in self.reference)]
        off = {place: distance(self.reference.get(place), found.get(place)) for place in places}
        if purpose is Purpose.NOISE:
            self.noise = off
            return ()
        sizes = {place: size_of(self.reference.get(place)) for place in places}
        largest = max((size for (_, kind, _), size in sizes.items() if kind == "gradient"), default=0.0)
        dtypes = {place: each.dtype for place, each in self._tensors()}
        off.update({(call, "buffer", name): math.inf for call, name in self.step_buffers.disagreeing()})
        return tuple(
            TrialDifference(place[0], place[2], place[1], off[place], sizes.get(place, 0.0))
            for place in off
            if not off[place] <= self._allowed(place, sizes.get(place, 0.0), largest, dtypes[place])
        )

    def _allowed(self, place: Place, size: float, largest: float, dtype: torch.dtype) -> float:
        casts = torch.is_autocast_enabled(self.device.type)
        floor = floor_of(dtype, *([torch.get_autocast_dtype(self.device.type)] if casts else []))
        if place[1] == "buffer":  # vectors of spectral norm that are nearly there move by 1e-9
            return Tolerance(size, self.noise.get(place, 0.0), size, floor).allowed
        return Tolerance(size, self.noise.get(place, 0.0), largest, max(LEAST, floor)).allowed

    def _digests(self, changed: Collection[Place]) -> Iterator[tuple[Place, torch.Tensor]]:
        """Of all gradients, and of the buffers that were changed, now or in the reference."""
        for place, parameter in self._parameters():
            if parameter.grad is not None:
                yield place, digest(parameter.grad)
        for place, buffer in self._buffers():
            if place in changed or place in self.reference:
                yield place, digest(buffer)

    def _tensors(self) -> Iterator[tuple[Place, torch.Tensor]]:
        yield from self._parameters()
        yield from self._buffers()

    def _parameters(self) -> Iterator[tuple[Place, nn.Parameter]]:
        for call, module in self.modules.items():
            for name, parameter in module.named_parameters():
                yield (call, "gradient", name), parameter

    def _buffers(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for call, stage in self.modules.items():
            for name, _, buffer in own_buffers(stage):
                yield (call, "buffer", name), buffer


def _is_finite(found: torch.Tensor) -> bool:
    return bool(found.isfinite().all())


@contextmanager
def _alike_and_watched(watch: Watch | None) -> Iterator[None]:
    with ExitStack() as stack:
        if watch is not None:
            stack.enter_context(watch)
        stack.enter_context(alike())
        yield
