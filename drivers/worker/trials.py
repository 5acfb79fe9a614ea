"""What a worker gives of a trial: digests of gradients and of changed buffers, by which a step is compared with another.

before       gradients of earlier steps are taken out; buffers, attributes and random numbers are noted
the step     random operations and batch norms give the same for every row
after        digests are taken, and all is put back
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pippy.drivers.compare.tolerance import digest, widened
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.protocol.steps import RunTrial, StepResult, TrialResult
from pippy.drivers.worker.gradients.buffers import StepBuffers, own_buffers
from pippy.drivers.worker.gradients.gradient_sums import Gradient
from pippy.ir.run.in_place import snapshot_of_buffers


class Trials:
    """The trials of one driver on one worker. ``gradient`` gives that of a parameter, by its id, after a step.

    ``hold`` notes what there is, with copies of these parameters, and gives what puts it back.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        buffers: StepBuffers,
        gradient: Callable[[int], Gradient],
        hold: Callable[[Collection[TensorLocation]], Callable[[], None]],
    ) -> None:
        self.modules, self.step_buffers, self.gradient, self.hold = modules, buffers, gradient, hold
        self._written: set[TensorLocation] = set()  # buffers that some trial has changed

    def try_out(self, trial: RunTrial, run: Callable[[], StepResult]) -> TrialResult:
        """Carry out a trial. ``run`` runs its step."""
        self.step_buffers.follow({(each.call, each.name) for each in trial.follow})
        before = snapshot_of_buffers(dict(self._buffers()))
        put_back = self.hold(trial.written)
        try:
            with widened(self.modules.values(), torch.float32 if trial.wide else None):
                result = run()
                self._written |= set(before.changed(dict(self._buffers())))
                gradients = {place: digest(each) for place, each in self._gradients()}
                buffers = {place: digest(each) for place, each in self._buffers() if place in self._written}
        finally:
            put_back()
        disagreeing = tuple(TensorLocation(*each) for each in self.step_buffers.disagreeing())
        return TrialResult(result, gradients, buffers, disagreeing)

    def _gradients(self) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
        for call, module in self.modules.items():
            for name, parameter in module.named_parameters():
                gradient = self.gradient(id(parameter))
                if gradient is not None:
                    yield TensorLocation(call, name), gradient

    def _buffers(self) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
        for call, stage in self.modules.items():
            for name, _, buffer in own_buffers(stage):
                yield TensorLocation(call, name), buffer


def normalizes_by_batches(modules: Iterable[nn.Module]) -> bool:
    """Whether there are batch norms in training, which a trial has normalize otherwise: graphs of stages would stay so."""
    return any(isinstance(each, _BatchNorm) and each.training for module in modules for each in module.modules())
