"""What type checkers know of the public names. `make check` runs mypy and pyright on it; nothing runs it."""

from collections.abc import Mapping
from typing import Any, assert_type

import torch
from torch import nn

import pippy
import pippy.errors
from pippy import Cluster, Pipe, PipelineDriver, PipelineDriver1F1B, SplitPoint, cluster, pipe_split, pipeline
from pippy.drivers.count.driver_memory import DriverMemory
from pippy.drivers.driver.steps.results import PostedStep
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.plan import Program, Simulation, make_schedule, simulate
from pippy.drivers.report.record import Recording
from pippy.errors import DriverError, PippyError, StepError
from pippy.ir.show.drawing import Drawing


class Net(nn.Module):
    """A model that marks where it is cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One cut."""
        pipe_split()
        return x.relu()


def train() -> None:
    """A training script, as a user writes it."""
    model = Net()
    pippy.annotate_split_points(model, {"layer": SplitPoint.END})
    pipe = assert_type(pipeline(model, nn.MSELoss(), num_stages=2, split="parameters"), Pipe)
    assert_type(pipe.draw(torch.zeros(2)), Drawing)
    x = torch.zeros(8, 2)
    with cluster(2, names=["a", "b"]) as workers:
        assert_type(workers, Cluster)
        driver = PipelineDriver1F1B(pipe, workers, step_timeout=10.0)
        assert_type(PipelineDriver(pipe, schedule="auto"), PipelineDriver)
        optimizer = assert_type(driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3), PipelineOptimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert_type(driver.instantiate_grad_scaler(), PipelineGradScaler)
        optimizer.zero_grad()
        try:
            assert_type(driver.run(4, x, target=x), Any)
        except StepError as error:
            refused: PippyError = error
            raise DriverError(str(refused)) from error
        assert_type(driver.run_async(4, x, x), PostedStep)
        assert_type(driver.clip_grad_norm_(1.0), torch.Tensor)
        optimizer.step()
        program = assert_type(driver.program(4), Program)
        assert_type(simulate(program), Simulation)
        assert_type(driver.memory(4, x, x), DriverMemory)
        with driver.record() as recording:
            assert_type(recording, Recording)
        assert_type(driver.save("run", optimizers=optimizer), str)
        weights: Mapping[str, Any] = driver.state_dict()
        model.load_state_dict(weights)
    assert_type(make_schedule("1f1b", workers=2, chunks=4), Program)


def catch(error: Exception) -> bool:
    """`pippy.errors` is there with either import."""
    return isinstance(error, pippy.errors.WorkerLostError | pippy.errors.ClusterError)
