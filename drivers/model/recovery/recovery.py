"""`driver.recover`: after a worker was lost, or a step has failed, the run goes on from its newest point.

    replace_lost_workers            other processes are in the places of lost workers, and hold nothing; or those are gone
        │
        ▼ settle                    if the run goes on with other workers: the driver places its stages on these
        ▼ rebuild                   those that hold nothing are sent what is theirs: stages, programs, optimizers
        ▼ restore                   all workers, and what was given by name, go back to the point
    the next step

A point is a finished `save`, `load` or `protect`, or the start, as long as no optimizer has made a step.

`replace_lost_workers` puts other processes in the places of the workers that a cluster has lost, or leaves the places empty.
The other workers keep what they hold.

    lost workers:    those that died, and those that do not answer a ping
    fork server:     kills what is left of them ──▶ forks others, with new sockets to the controller
                                                ──▶ or none: those workers are gone, and may be started later
    other workers:   give up their commands, and drop their connections with lost workers
    controller:      goes on; the first message that needs it connects two workers again

A worker that was replaced, or is gone, holds nothing. Each driver that had stages there refuses its commands until it has
recovered.
"""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pippy.drivers.base.errors import CheckpointError, ClusterError, WorkerLostError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.model.recovery.points import ControllerState, DiskPoint, MemoryPoint, exchange_of_states
from pippy.drivers.model.state.filling import Filling
from pippy.drivers.model.state.loading import Loading, load_objects
from pippy.drivers.model.state.saving import GivenObjects
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import KeepState, RestoreState, WorkerState
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base import source
from pippy.ir.base.names import named_state
from pippy.ir.pipe import Pipe

_log = logging.getLogger(__name__)


class NotReplaced(ClusterError):
    """No process could be started in the places of lost workers; ``why`` says which, without what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}; the workers that are left hold what they held: call recover() again when this is repaired, or "
            "recover(fewer=True) to go on with those, or close this cluster"
        )
        self.why = why


Wanted = Callable[[frozenset[int]], Collection[int]]


def replace_lost_workers(cluster: Cluster, wanted: Wanted = lambda lost: lost) -> tuple[int, ...]:
    """Replace the workers that are lost, if there are any. Gives their numbers.

    ``wanted`` is called with the numbers of the lost workers, and says which are to be replaced: it may leave some out, which
    are gone then, and name some that were gone before. If it raises, nothing has changed. The other workers have the cluster's
    ``timeout`` to end what they do. If this fails, or Ctrl-C ends it, the cluster cannot be used until another call succeeds.
    """
    if cluster.closed:
        raise ClusterError("this cluster is closed; open another")
    return cluster.session.in_turn(partial(_replace, cluster, wanted))


def _replace(cluster: Cluster, wanted: Wanted) -> tuple[int, ...]:
    session, log = cluster.session, cluster.session.log
    if not session.broken:
        with suppress(Exception):  # a step may have failed; if a worker is lost, this finds it
            session.wait_all()
        for worker in list(cluster.engine.deaths())[:1]:
            session.mark_lost(worker, "it died")
    if session.broken:
        why = cluster.engine.fixed
        if log.lost is None:
            raise ClusterError(session.broken)
        if why is not None:
            raise ClusterError(
                f"{log.lost.removesuffix(session.recovery_advice)}; no other process can take its place: {why}"
            )
    with session.lock:  # the waits of all threads have ended
        if session.broken:
            log.to_replace |= session.lost_workers()
        again = sorted(wanted(frozenset(log.to_replace)))
        gone = sorted(log.to_replace.difference(again))
        if not again and not gone:
            return ()
        try:
            cluster.engine.end(gone)
            replaced = cluster.engine.replace(again) if again else {}
        except (OSError, ClusterError) as error:
            names = ", ".join(repr(cluster.workers[worker]) for worker in again or gone)
            raise NotReplaced(f"no process could be started in the place of worker {names}: {error}") from error
        try:
            session.mend(replaced, gone)
        except WorkerLostError:
            raise
        except BaseException:
            if not session.broken:
                session.mark_lost(min(again or gone), "an earlier attempt to replace it was not finished")
            raise
        for worker, address in replaced.items():
            _log.info("worker %r has another process: pid %d on %s", cluster.workers[worker], address.pid, address.host)
        for worker in gone:
            _log.info("worker %r is gone: the run goes on without it", cluster.workers[worker])
        return tuple(replaced)


class Recovery:
    """The points of one driver, and the way back to the newest of them."""

    def __init__(
        self,
        pipe: Pipe,
        placed: PlacedPipe,
        commands: DriverCommands,
        cluster: Cluster,
        filling: Filling,
        loading: Loading,
        optimizers: Sequence[PipelineOptimizer],
        scalers: Sequence[PipelineGradScaler],
    ) -> None:
        self.pipe, self.placed, self.commands, self.cluster = pipe, placed, commands, cluster
        self.filling, self.loading, self.optimizers, self.scalers = filling, loading, optimizers, scalers
        self.start = ControllerState.current(commands, (), None)
        self.points: list[DiskPoint | MemoryPoint] = []  # the newest of each kind, the newest last
        self._protected = 0
        self.left_out = ""  # why the newest checkpoint is no point

    @property
    def scaler(self) -> PipelineGradScaler | None:
        """The scaler of the driver, which is the latest that was made."""
        return self.scalers[-1] if self.scalers else None

    # Points

    def saving(self, given: GivenObjects) -> Callable[[str], None]:
        """Note that a checkpoint is being saved. Returns a function to call with its path when it is in place."""
        state = self._now()
        return lambda path: self._note(DiskPoint(path, {**given.optimizers, **given.objects}, state))

    def loaded(self, path: str, given: Mapping[str, Any], whole: bool) -> None:
        """Note that a checkpoint was loaded; ``is_whole`` says whether it had all tensors of the model."""
        self._note(DiskPoint(path, dict(given), self._now(), whole))

    def begin_at(self) -> None:
        """Note that the random numbers of the start were set."""
        if not any(each.stepped for each in self.optimizers):
            self.start = ControllerState.current(self.commands, (), None)

    def _now(self) -> ControllerState:
        return ControllerState.current(self.commands, self.optimizers, self.scaler)

    def _note(self, point: DiskPoint) -> None:
        if not point.is_whole and point.state.stepped:
            self.left_out = f"; {point.path} has a part of the model only"
            return
        if point.lacks:
            classes = [each.optimizer_class.__name__ for each in self.optimizers if each.number in point.lacks]
            self.left_out = f"; {point.path} has no state of the optimizer {', '.join(classes)}: give it to save()"
            return
        self._add(point)

    def protect(self, objects: GivenObjects, values: Mapping[str, Any]) -> None:
        """Have each worker copy its state, and keep the copy of a neighbour."""
        workers, starts = self.placed.workers, tuple(self.commands.session.log.starts)
        neighbours = dict(zip(workers, (*workers[1:], workers[0])))
        stages = {worker: self.placed.calls_on(worker) for worker in workers}
        divided = any(each.divided for each in self.optimizers)
        before = next((each.number for each in self.points if isinstance(each, MemoryPoint)), None)
        self._protected += 1
        state = self._now()
        program = exchange_of_states((worker, worker, to) for worker, to in neighbours.items() if to != worker)
        self.commands.call({each: KeepState(self._protected, program.order_of(each), before) for each in workers})
        own_values = values["values"], values["states"], values["extra"]
        holders = {worker: list(dict.fromkeys((worker, to))) for worker, to in neighbours.items()}
        self._add(MemoryPoint(self._protected, *own_values, objects.objects, stages, holders, starts, divided, state))

    def _add(self, point: DiskPoint | MemoryPoint) -> None:
        self.points = [each for each in self.points if type(each) is not type(point)] + [point]
        self.left_out = ""

    # Going back

    def recover(
        self, send_again: Callable[[Collection[int]], None], wanted: Wanted, settle: Callable[[], None]
    ) -> dict[str, Any]:
        """Replace lost workers, and go back to the newest point. Returns the point's values.

        ``send_again`` sends workers what they had beside stages and optimizers. ``wanted`` says which of the lost workers are
        replaced, and ``settle``, called after that, has the driver place its stages on the workers with which it goes on.
        """
        self.commands.check_open()
        once = partial(self.commands.session.in_turn, partial(self._recover, send_again, wanted, settle))
        try:
            return once()
        except (
            WorkerLostError
        ):  # nobody had noticed it yet, or it was lost meanwhile; if that goes on, the caller decides
            return once()

    def _recover(
        self, send_again: Callable[[Collection[int]], None], wanted: Wanted, settle: Callable[[], None]
    ) -> dict[str, Any]:
        commands = self.commands
        self._check_points()
        replace_lost_workers(self.cluster, wanted)
        commands.session.wait_given_up()
        point = self._newest_left()
        settle()
        with commands.recovery():
            commands.zero_grad()
            all_anew = point is None or (isinstance(point, DiskPoint) and not point.is_whole)
            self._rebuild(self.placed.workers if all_anew else commands.replaced(), send_again)
            if point is None:
                values = self._to_start()
            else:
                values = self._to_kept(point) if isinstance(point, MemoryPoint) else self._to_saved(point)
            commands.unload_left()
        there = "the start" if point is None else "copies in memory" if isinstance(point, MemoryPoint) else point.path
        _log.info("recovered: the run goes on from %s", there)
        return values

    def _newest_left(self) -> DiskPoint | MemoryPoint | None:
        """The newest point that lost workers have left complete; None for the start."""
        for point in reversed(self.points):
            if isinstance(point, DiskPoint):
                return point
            self.points.remove(point)
            left = point.left(self.commands.session.log.starts)
            gone = left.gone()
            if not gone:
                self.points.append(left)
                return left
            names = ", ".join(repr(self.cluster.workers[worker]) for worker in sorted(gone))
            self.left_out = f"; what protect() copied of worker {names} was lost with the worker that had the copy"
            self._check_points()
            on_disk = next((each.path for each in self.points if isinstance(each, DiskPoint)), "the start")
            source.warn(f"the run goes on from {on_disk}{self.left_out}")
        return None

    def _check_points(self) -> None:
        """Raise if there is no state to recover."""
        if self.points:
            return
        changed = any(each.stepped for each in self.optimizers)
        if changed or not self.filling.can_begin_again:
            why = (
                "an optimizer has made steps" if changed else "load_state_dict() gave the workers what is nowhere else"
            )
            raise CheckpointError(
                f"there is no state to recover: {why}, and nothing was saved or protected since{self.left_out}. To "
                "survive the loss of a worker, call driver.save(folder, optimizer=optimizer, step=step, ...) or "
                "driver.protect(...) now and then"
            )

    def _rebuild(self, workers: Collection[int], send_again: Callable[[Collection[int]], None]) -> None:
        """Send workers their stages and optimizers, without a state."""
        if workers:
            self.commands.call(self.placed.loads(workers))
            for optimizer in self.optimizers:
                optimizer.make_again(workers)
            send_again(workers)

    def _to_start(self) -> dict[str, Any]:
        self.filling.begin_again()
        self.start.restore(self.commands, self.optimizers, self.scaler)
        return {}

    def _to_kept(self, point: MemoryPoint) -> dict[str, Any]:
        self._make_fresh(point.state.options.keys())
        workers = self.placed.workers
        sources = {worker: point.sources(worker, self.placed.calls_on(worker)) for worker in workers}
        moves = point.moves(sources)
        with first_waits():  # or a part would be restored, and a part not
            self.commands.call(point.bodies(sources, moves))
            self.points[-1] = point.moved(moves, workers, self.commands.session.log.starts)
            load_objects(copy.deepcopy(point.states), point.objects)
            for name, value in point.extra.items():
                self.pipe.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
            point.state.restore(self.commands, self.optimizers, self.scaler)
        return copy.deepcopy(dict(point.values))

    def _make_fresh(self, there: Collection[int]) -> None:
        """Make the optimizers again whose state is not in the point."""
        for optimizer in self.optimizers:
            if optimizer.number not in there:
                optimizer.make_again(self.placed.workers)

    def _to_saved(self, point: DiskPoint) -> dict[str, Any]:
        self._make_fresh(point.optimizers)
        self._store_unsaved()
        values = self.loading.load(point.path, False, point.objects, all_random=True)
        point.state.restore(self.commands, self.optimizers, self.scaler)
        return dict(values)

    def _store_unsaved(self) -> None:
        """Give buffers that are not persistent the values of the Pipe, as in another process that loads a checkpoint."""
        saved = {id(each) for each in self.pipe.state_dict(keep_vars=True).values()}
        left = {
            name: each.detach().cpu()
            for name, each in named_state(self.pipe)
            if id(each) not in saved and not each.is_meta and self.placed.locations(name)
        }
        if left:
            stores = self.placed.for_all_copies(left)
            self.commands.call(
                {worker: RestoreState(WorkerState(tensors)) for worker, tensors in stores.items() if tensors}
            )
