"""One run of a stage on a worker: what its forward left, and how its backward goes on."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from pippy.drivers.worker.halves.split_backward import DeferredGradients
from pippy.ir.run.stage_backward import edges_of, stage_backward
from pippy.ir.run.stage_run import StageRun, run_backward

_PUT_OFF = StageRun((), ())  # the half W has neither inputs nor outputs


class Run(Protocol):
    """What a forward has left for the backward."""

    @property
    def held(self) -> Any:
        """The inputs that it holds, and all else that it holds."""

    def backward(self, output_grads: Any) -> Sequence[Any]:
        """The whole backward. Gives the gradients of the inputs."""

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        """The half I. Gives the gradients of the inputs."""

    def backward_weight(self) -> None:
        """The half W."""


class AutogradRun(StageRun):
    """A run whose backward is autograd's. In a program with halves, ``deferred`` takes the gradients that are put off.

    It holds the inputs, and not the outputs: these are freed when they were sent, and read by those who need them here.
    """

    def __init__(
        self, name: str, module: nn.Module, outputs: Any, inputs: tuple[Any, ...], deferred: DeferredGradients | None
    ) -> None:
        self.outputs, self.inputs = edges_of(outputs), inputs
        self.name, self.module, self.deferred = name, module, deferred

    @property
    def held(self) -> Any:
        return self.inputs, ()

    def backward(self, output_grads: Any) -> Sequence[Any]:
        if self.deferred is None:
            return run_backward(self.name, self.module, self, output_grads, stage_backward)
        gradients = self.backward_input(output_grads)
        self.deferred.run()
        return gradients

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        run, self.outputs, self.inputs = StageRun(self.outputs, self.inputs), (), ()
        assert self.deferred is not None
        return run_backward(self.name, self.module, run, output_grads, self.deferred.backward_input)

    def backward_weight(self) -> None:
        run_backward(self.name, self.module, _PUT_OFF, None, self._weights)

    def _weights(self, *_: Any) -> tuple[Any, ...]:
        assert self.deferred is not None
        self.deferred.run()
        return ()
