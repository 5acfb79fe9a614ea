"""Steps and updates of a driver that are undone: on the workers, and in what the controller knows of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.model.recovery.points import ControllerState
from pippy.drivers.protocol.state import HoldState, PutBackState
from pippy.drivers.session.driver_commands import DriverCommands, GradientState


@contextmanager
def aside(commands: DriverCommands, optimizers: Sequence[PipelineOptimizer]) -> Iterator[None]:
    """A context for steps and updates. It begins without gradients; at its end the driver is as before."""
    commands.call(dict.fromkeys(commands.workers, HoldState()))
    before = ControllerState.current(commands, optimizers, None)
    commands.gradients = GradientState.REDUCED
    try:
        yield
    except BaseException as error:
        commands.session.give_up(error)
        raise
    finally:
        with first_waits():  # or some workers would have theirs again, and others not
            try:
                if not commands.session.broken:  # else `recover` goes back
                    commands.call(dict.fromkeys(commands.workers, PutBackState()))
            finally:
                before.put_back()
