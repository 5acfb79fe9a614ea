"""`driver.recover`: after a worker was lost, or a step has failed, the run goes on from its newest point.

    replace_lost_workers            other processes are in the places of lost workers, and hold nothing
        │
        ▼ rebuild                   those are sent what they had: stages, programs, optimizers
        ▼ restore                   all workers, and what was given by name, go back to the point
    the next step

A point is a finished `save` or `load`, or the start, as long as no optimizer has made a step.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pippy.drivers.clusters.cluster import Cluster
from pippy.drivers.commands import Commands
from pippy.drivers.control.messages import Store
from pippy.drivers.errors import CheckpointError
from pippy.drivers.filling import Filling
from pippy.drivers.generation.generation import Generation
from pippy.drivers.grad_scaler import PipelineGradScaler
from pippy.drivers.loading import Loading
from pippy.drivers.optimizer import PipelineOptimizer
from pippy.drivers.placed_pipe import PlacedPipe
from pippy.drivers.programs import DriverPrograms
from pippy.drivers.recovery.points import ControllerState, DiskPoint
from pippy.drivers.recovery.replace_workers import replace_lost_workers
from pippy.drivers.saving import GivenObjects
from pippy.ir.names import named_state
from pippy.ir.pipe import Pipe


class Recovery:
    """The points of one driver, and the way back to the newest of them."""

    def __init__(
        self,
        pipe: Pipe,
        placed: PlacedPipe,
        commands: Commands,
        cluster: Cluster,
        filling: Filling,
        optimizers: Sequence[PipelineOptimizer],
    ) -> None:
        self.pipe, self.placed, self.commands, self.cluster = pipe, placed, commands, cluster
        self.filling, self.optimizers = filling, optimizers
        self.scaler: PipelineGradScaler | None = None
        self.start = ControllerState.current(commands, (), None)
        self.point: DiskPoint | None = None
        self.left_out = ""  # why the newest checkpoint is no point

    # Points

    def saving(self, given: GivenObjects) -> Callable[[str], None]:
        """A checkpoint is being saved. Returns what is called with its path when it is in place."""
        state = self._now()
        return lambda path: self._note(DiskPoint(path, {**given.optimizers, **given.objects}, state))

    def loaded(self, path: str, given: Mapping[str, Any], whole: bool) -> None:
        """A checkpoint was loaded; ``whole`` says that it had all of the model."""
        self._note(DiskPoint(os.path.abspath(path), dict(given), self._now(), whole))

    def begin_at(self) -> None:
        """The random numbers of the start were set."""
        if not any(each.stepped for each in self.optimizers):
            self.start = ControllerState.current(self.commands, (), None)

    def _now(self) -> ControllerState:
        return ControllerState.current(self.commands, self.optimizers, self.scaler)

    def _note(self, point: DiskPoint) -> None:
        if not point.whole and point.state.stepped:
            self.left_out = f"; {point.path} has a part of the model only"
            return
        if point.lacks:
            classes = [each.optimizer_class.__name__ for each in self.optimizers if each.number in point.lacks]
            self.left_out = f"; {point.path} has no state of the optimizer {', '.join(classes)}: give it to save()"
            return
        self.point, self.left_out = point, ""

    # Going back

    def recover(
        self, loading: Loading, programs: DriverPrograms, generation: Generation, limit: float | None
    ) -> dict[str, Any]:
        """Replace what is lost, and go back to the newest point. Gives its values."""
        commands = self.commands
        commands.check_open()
        with commands.dispatch.sending:
            point = self._newest()
            replace_lost_workers(self.cluster, limit)
            commands.dispatch.wait_given_up(limit)
            with commands.recovery():
                commands.zero_grad()
                self._rebuild(commands.replaced() if point and point.whole else self.placed.workers, programs)
                generation.forget()
                if point is None:
                    return self._to_start()
                return self._to(point, loading)

    def _newest(self) -> DiskPoint | None:
        """The newest point; None for the start."""
        if self.point is not None:
            return self.point
        changed = any(each.stepped for each in self.optimizers)
        if changed or not self.filling.can_begin_again:
            why = (
                "an optimizer has made steps" if changed else "load_state_dict() gave the workers what is nowhere else"
            )
            raise CheckpointError(
                f"there is nothing to go on from: {why}, and nothing was saved since{self.left_out}; a run that is to survive "
                "its workers calls driver.save(folder, optimizer=optimizer, step=step, ...) now and then"
            )
        return None

    def _rebuild(self, workers: Collection[int], programs: DriverPrograms) -> None:
        """Send some workers all that they have had but for its state."""
        if workers:
            self.commands.call(self.placed.loads(workers))
            for optimizer in self.optimizers:
                optimizer.make_again(workers)
            programs.send_again(workers)

    def _to_start(self) -> dict[str, Any]:
        self.filling.begin_again()
        self.start.restore(self.commands, self.optimizers, self.scaler)
        return {}

    def _to(self, point: DiskPoint, loading: Loading) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if optimizer.number not in point.optimizers:
                optimizer.make_again(self.placed.workers)
        self._store_unsaved()
        values = loading.load(point.path, False, point.given, all_random=True)
        point.state.restore(self.commands, self.optimizers, self.scaler)
        return dict(values)

    def _store_unsaved(self) -> None:
        """Buffers that are not persistent are those of the Pipe again, as in another process that loads a checkpoint."""
        saved = {id(each) for each in self.pipe.state_dict(keep_vars=True).values()}
        left = {
            name: each.detach().cpu()
            for name, each in named_state(self.pipe)
            if id(each) not in saved and not each.is_meta and self.placed.locations(name)
        }
        if left:
            stores = self.placed.for_all_copies(left)
            self.commands.call({worker: Store(own) for worker, own in stores.items() if own})


def finish_saving(finish: Callable[[], None]) -> None:
    """Wait for a checkpoint that is written beside the run. If it failed, the newest point is the one before."""
    with suppress(Exception):
        finish()
