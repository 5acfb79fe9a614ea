"""What surrounds the commands of each driver, on a worker: settings, autocast and the state of the random numbers.

A worker has the process for itself, or is a thread beside a script's (`WorkerContext.shares_process`). The settings and
random numbers of a script's process are the script's: there the worker only looks whether the settings are those of the
call that it was sent, and draws from the script's random numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.protocol.commands import Command, CommandElsewhere
from pippy.drivers.protocol.programs import Load
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.run.random_state import RandomState, seed_all


class WorkerSurroundings:
    """The surroundings of the drivers of one worker. ``driver`` is the one whose command was carried out last."""

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.device = context, torch.device(context.device or "cpu")
        self.gpus = [self.device] if self.device.type == "cuda" else []
        self.of: dict[int, Surroundings] = {}
        self.random_states: dict[int, RandomState] = {}
        self.driver: int | None = None
        self.set: Surroundings | None = None  # what the process was given last

    @contextmanager
    def around(self, command: Command) -> Iterator[None]:
        """The surroundings in which a command is carried out."""
        if isinstance(command, CommandElsewhere) and command.surroundings is not None:
            self.of[command.driver] = command.surroundings
        own = self.of[command.driver]
        if self.context.shares_process:
            _check(own)
        else:
            self._switch_to(command)
            if own is not self.set:
                self.set = None
                own.set_process()
                self.set = own
        try:
            with own.on(self.device):
                yield
        except BaseException:
            self.set = None  # it may have failed before it set back what it set
            raise
        if self.context.shares_process:
            _check(own)

    def forget(self, driver: int) -> None:
        """A driver is gone."""
        self.of.pop(driver, None)
        self.random_states.pop(driver, None)

    def _switch_to(self, command: Command) -> None:
        """Each driver has random numbers of its own, which begin where its stages are loaded."""
        if self.driver == command.driver and not isinstance(command.body, Load):
            return
        if self.driver in self.of:
            self.random_states[self.driver] = RandomState.current(self.gpus)
        self.driver = command.driver
        if isinstance(command.body, Load):
            seed_all(command.body.seed + self.context.index)
            torch.manual_seed(command.body.seed + self.context.index)  # of GPUs that are used later, too
        elif command.driver in self.random_states:
            self.random_states[command.driver].restore()


def _check(surroundings: Surroundings) -> None:
    changed = surroundings.changed_settings()
    if changed:
        raise DriverError(
            f"the script changed {', '.join(changed)} while a step ran, which changes the step too, because this "
            "worker is part of the script's process; wait for the step first: run_async(...).result(), or run(...)"
        )
