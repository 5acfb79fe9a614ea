"""What a worker has for one driver, held while something is tried: afterwards all is as it was, to the bit."""

from collections.abc import Mapping

import torch
from torch import nn

from pippy.drivers.worker.gradients.gradients import Gradients
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.state.forward_state import Before, RandomNumbers


class HeldState:
    """Copies of parameters, buffers, attributes of modules and states of optimizers, and the gradients themselves."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        gradients: Gradients,
        optimizers: Mapping[int, WorkerOptimizer],
        device: torch.device,
    ) -> None:
        every = list(dict.fromkeys(each for module in modules.values() for each in module.modules()))
        self.gradients, self.optimizers = gradients, optimizers
        self.parameters = {each: each.detach().clone() for module in every for each in module.parameters(False)}
        self.states = {number: each.copied_state() for number, each in optimizers.items()}
        self.random = RandomNumbers(every, device).now()
        self.before = Before(every, None)
        self.of_steps = gradients.take_out()

    def put_back(self) -> None:
        """All is again as it was."""
        with torch.no_grad():
            for parameter, copied in self.parameters.items():
                parameter.copy_(copied)
        self.before.put_back()
        for number, state in self.states.items():
            self.optimizers[number].put_back(state)
        self.gradients.put_back(self.of_steps)
        self.random.restore()
