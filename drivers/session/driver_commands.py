"""The commands of one driver, and what the controller knows of the gradients on its workers."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.commands import ZeroGrad
from pippy.drivers.protocol.programs import Load, Unload
from pippy.drivers.protocol.state import WorkerHooks
from pippy.drivers.protocol.steps import StageFlags, Step, StepResult
from pippy.drivers.session.command_log import AcceptAnswers, PendingCommand, accept_all
from pippy.drivers.session.session import Returned, Session
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import describe
from pippy.ir.run.random_state import RandomStep


@dataclass(frozen=True)
class StepNumbers:
    """A seed, how many steps there were that train, and how many that do not.

    Those that train are counted by themselves, so that an evaluation in between does not change their random numbers.

    >>> numbers = StepNumbers(7).after(trains=True)
    >>> numbers
    StepNumbers(seed=7, steps=1, evaluations=0)
    >>> numbers.next(trains=True)
    RandomStep(seed=7, number=1, trains=True)
    """

    seed: int
    steps: int = 0
    evaluations: int = 0

    def next(self, trains: bool) -> RandomStep:
        """The step that comes next, of those that train or of the others."""
        return RandomStep(self.seed, self.steps if trains else self.evaluations, trains)

    def after(self, trains: bool) -> "StepNumbers":
        """The numbers after that step."""
        if trains:
            return replace(self, steps=self.steps + 1)
        return replace(self, evaluations=self.evaluations + 1)

    def state(self) -> dict[str, int]:
        """As a dict."""
        return asdict(self)


def first_numbers(keyed_random: Any) -> StepNumbers | None:
    """The numbers of a new driver, from what it was given as ``keyed_random``; None if its random numbers have no key.

    >>> first_numbers(3)
    StepNumbers(seed=3, steps=0, evaluations=0)
    >>> first_numbers("yes")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: keyed_random='yes': give a seed; or True for the seed of torch.manual_seed; or False
    """
    if isinstance(keyed_random, bool):
        return StepNumbers(torch.initial_seed()) if keyed_random else None
    try:
        return StepNumbers(operator.index(keyed_random))
    except TypeError:
        raise DriverError(
            f"keyed_random={describe(keyed_random)}: give a seed; or True for the seed of torch.manual_seed; or False"
        ) from None


def checked_numbers(state: Any, now: StepNumbers | None) -> StepNumbers | None:
    """The numbers that a state says, for a driver that has those of ``now``."""
    if now is None:
        if state is None:
            return None
        raise DriverError(
            f"random_state={describe(state)}: the random numbers of this driver have no key, since it was made with "
            "keyed_random=False; make it without that"
        )
    wanted = now.state().keys()
    fits = isinstance(state, Mapping) and state.keys() == wanted
    if not fits or not all(isinstance(each, int) and not isinstance(each, bool) for each in state.values()):
        raise DriverError(
            f"random_state={describe(state)}: give a dict of whole numbers with {', '.join(wanted)}, as driver.random_state is"
        )
    return StepNumbers(**state)


class NonFiniteGradients:
    """Follows the gradients of a driver by the names of parameters, from the step that made them until they are dropped.

    Gradients may be dropped while the step that makes them still runs, so that the answer comes later. So steps are numbered,
    and what is dropped is noted with the number of the last step that was posted.
    """

    def __init__(self, placed: PlacedPipe, names: Iterable[str]) -> None:
        self.placed, self.parameters = placed, tuple(names)
        self.steps = self._all_dropped = 0
        self._dropped: dict[str, int] = {}
        self._names: set[str] = set()

    def memento(self) -> Callable[[], None]:
        """What puts back what is known now, as often as it is called."""
        steps, all_dropped, dropped, names = self.steps, self._all_dropped, {**self._dropped}, {*self._names}

        def put_back() -> None:
            self.steps, self._all_dropped, self._dropped, self._names = steps, all_dropped, {**dropped}, {*names}

        return put_back

    def step(self, accept: AcceptAnswers) -> AcceptAnswers:
        """A step with a scaled loss is posted. Returns what accepts its answers, ``accept`` first."""
        self.steps += 1
        number = self.steps

        def accept_and_note(answers: Mapping[int, StepResult]) -> None:
            accept(answers)
            self._names.update(name for name in self._named(answers) if self._dropped_at(name) < number)

        return accept_and_note

    def _named(self, answers: Mapping[int, StepResult]) -> list[str]:
        """The parameters that the workers found a gradient of which is not finite, in any copy."""
        reported = {(worker, place) for worker, answer in answers.items() for place in answer.nonfinite}
        return [name for name in self.parameters if reported and not reported.isdisjoint(self.placed.locations(name))]

    def _dropped_at(self, name: str) -> int:
        return max(self._all_dropped, self._dropped.get(name, 0))

    def drop_all(self) -> None:
        """All gradients are dropped."""
        self._all_dropped = self.steps
        self._dropped.clear()
        self._names.clear()

    def drop(self, names: Iterable[str]) -> None:
        """The gradients of some parameters are dropped."""
        dropped = dict.fromkeys(names, self.steps)
        self._dropped.update(dropped)
        self._names -= dropped.keys()

    def stepped(self, names: Iterable[str]) -> bool:
        """Whether a step with a scaled loss was posted since the gradients of these parameters were dropped."""
        return any(self._dropped_at(name) < self.steps for name in names)

    def among(self, names: Iterable[str]) -> set[str]:
        """Those of the parameters whose gradient is not finite. All steps must have been waited for."""
        return self._names.intersection(names)


Given = ParamSpec("Given")
Self = TypeVar("Self")
Flags = Mapping[int, Mapping[str, StageFlags]]  # by worker and stage
Hooks = Mapping[int, WorkerHooks]  # by worker


class GradientState(Enum):
    """What the workers have to do before their gradients can be read.

    >>> GradientState.TO_DROP.value
    'zero_grad() was called, and the next command tells the workers'
    """

    REDUCED = "there are none, or those of replicated parameters have been added up"
    UNREDUCED = "each copy of a replicated parameter has a gradient of its own"
    TO_DROP = "zero_grad() was called, and the next command tells the workers"


@dataclass(frozen=True)
class KnownGradients:
    """What the controller knows of the gradients on the workers, and of the steps that made them.

    ``zeroed`` has the optimizers whose gradients the next command drops. If it ``has_gradients``, those of parameters are there
    whose names are not ``dropped``. ``steps`` counts those since the last update; ``unapplied`` says that one of them trained.
    """

    state: GradientState = GradientState.REDUCED
    zeroed: frozenset[int] = frozenset()
    has_gradients: bool = False
    dropped: frozenset[str] = frozenset()
    steps: int = 0
    steps_of_last_update: int = 0
    unapplied: bool = False
    numbers: StepNumbers | None = None


def in_turn(method: Callable[Concatenate[Self, Given], Returned]) -> Callable[Concatenate[Self, Given], Returned]:
    """A method of a driver or of its `DriverCommands` that sends something: those that other threads call wait for its end.

    It waits in turn for what other threads have under way for other drivers of the cluster.
    """

    @wraps(method)
    def inner(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        commands: DriverCommands = self if isinstance(self, DriverCommands) else self.commands  # type: ignore[attr-defined]
        return commands.session.in_turn(partial(method, self, *args, **kwargs), commands.driver)

    return inner


class DriverCommands:
    """Sends the commands of one driver to its workers, and follows what becomes of the gradients there.

    A command that fails, or that Ctrl-C or a time limit ends, is given up. The workers then have the gradients of before
    it, and the controller goes back to the state of before it. ``known.state`` is one of three:

        what happens                               REDUCED       UNREDUCED     TO_DROP
        -----------------------------------------  ------------  ------------  ------------
        zero_grad()                                TO_DROP       TO_DROP       TO_DROP
        a training step                            UNREDUCED *   UNREDUCED     UNREDUCED *
        a training step that adds up copies        REDUCED       REDUCED       REDUCED
        another step                               REDUCED       UNREDUCED     REDUCED
        a call that adds up copies first           REDUCED       REDUCED       REDUCED
        another call                               REDUCED       UNREDUCED     REDUCED
        a command is given up                      the state before it; TO_DROP if zero_grad() was called since

        * REDUCED if the Pipe has no replicated parameters

    In TO_DROP every command goes to all workers, and has them drop their gradients first. ``known.zeroed`` has the optimizers
    that drop only the gradients of their own parameters, in the same way: no state changes by that.

    Copies are best added up in the last step before an update. Which step that is nobody says beforehand, so it is taken to
    be as many steps as last time: `last_before_update` says whether the next one is it.

    The flags of modules and parameters, and the hooks of parameters, go along with a step if they are not those that the
    workers were told last, or if the step that told them was given up: ``flags_due``.

    Which step the random numbers of a step are of goes along with it: the next one of ``numbers``. A step that is given up
    does not count, so that it draws the same when it is repeated.

    What surrounds a call goes along with its command if the workers were told otherwise last, or if that command was given
    up: ``told``.
    """

    def __init__(
        self,
        session: Session,
        driver: int,
        workers: Sequence[int],
        has_copies: bool,
        nonfinite: NonFiniteGradients,
        numbers: StepNumbers | None = None,
    ) -> None:
        self.session, self.driver, self.workers, self.has_copies = session, driver, tuple(workers), has_copies
        self.nonfinite, self.known = nonfinite, KnownGradients(numbers=numbers)
        self.flags: Flags = {}
        self.hooks: Hooks = {}
        self.flags_due = False
        self.told: Surroundings | None = None
        self.starts: dict[int, int] = {}  # of the processes that hold the stages
        self.left: dict[int, int] = {}  # of those that held stages before, and may hold them still
        self.recovering = False
        self.fetched: list[tuple[torch.Tensor, int]] = []  # gradients that the script was given, and their versions
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def load(self, loads: Mapping[int, Load], flags: Flags) -> None:
        """Send the workers their stages, with these flags. They are dropped when this object is."""
        self.flags, self.starts = flags, self._starts_now()
        try:
            self.call(loads)
        except BaseException:  # some workers may hold their stages already
            self.session.drop(self.driver, self.workers)
            raise
        self._drop_when_gone(self.workers)

    def _drop_when_gone(self, workers: Sequence[int]) -> None:
        self._finalizer = weakref.finalize(self, self.session.drop, self.driver, tuple(workers))
        self._finalizer.atexit = False

    def place(self, workers: Sequence[int], has_copies: bool) -> None:
        """From now on these workers are to hold the stages: none of them does yet. Those of before may hold them still."""
        assert self._finalizer is not None
        self.left |= {**self._starts_now(), **self.starts}
        self.workers, self.has_copies = tuple(workers), has_copies
        self.starts, self.flags, self.hooks = {}, {}, {}
        self._finalizer.detach()
        self._drop_when_gone(list(dict.fromkeys([*self.workers, *self.left])))

    def unload_left(self) -> None:
        """Have workers that are to hold stages no more drop all that belongs to the driver."""
        log, elsewhere = self.session.log, self.left.keys() - {*self.workers}
        left = [worker for worker in elsewhere - log.gone if log.starts[worker] == self.left[worker]]
        if left:
            self.call(dict.fromkeys(sorted(left), Unload()))
        self.left = {}

    def _starts_now(self) -> dict[int, int]:
        return {worker: self.session.log.starts[worker] for worker in self.workers}

    def replaced(self) -> list[int]:
        """The workers in whose places there are other processes, which hold nothing of the driver."""
        return [worker for worker, start in self._starts_now().items() if self.starts.get(worker) != start]

    def memento(self) -> Callable[[], None]:
        """What puts back what is known now of gradients and steps, when the workers have again what they have now."""
        known = self.known
        return lambda: self._note(**vars(known))

    def _note(self, **known: Any) -> None:
        self.known = replace(self.known, **known)

    @property
    def numbers(self) -> StepNumbers | None:
        """The numbers of the next step; None if random numbers have no key."""
        return self.known.numbers

    def go_on_at(self, numbers: StepNumbers | None) -> None:
        """The next step has these numbers."""
        self._note(numbers=numbers)

    def set_aside(self) -> None:
        """The workers have set their gradients aside, and go on without any."""
        self._note(state=GradientState.REDUCED)

    def begin_update(self) -> None:
        """The steps since the last update do not count, and their gradients are dropped."""
        self._note(steps=0)
        self.zero_grad()

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """Inside, commands are sent though workers were replaced; if the block succeeds, they hold what they did before."""
        starts = self._starts_now()
        self.told, self.flags_due, self.recovering = None, True, True
        self.session.log.half_changed_drivers.add(self.driver)  # until it succeeds
        try:
            yield
            self.starts = starts
            self.session.log.half_changed_drivers.discard(self.driver)
        finally:
            self.recovering = False

    def _check_whole(self) -> None:
        """Raise if the workers do not hold what they did, because one was lost."""
        if self.session.broken:
            return  # that is said when something is sent
        replaced = [repr(self.session.workers[worker].name) for worker in self.replaced() if worker in self.starts]
        if replaced:
            now = "is gone" if self.session.log.gone.intersection(self.replaced()) else "replaced"
            why = f"worker {', '.join(replaced)} was lost and {now}, and holds nothing of this driver"
        elif self.driver in self.session.log.half_changed_drivers:
            why = "a worker was lost while this driver changed what others hold, or recovered, so they may be half changed"
        else:
            return
        raise DriverError(f"{why}; call driver.recover(), which goes on from the last save or protect")

    @in_turn
    def close(self) -> None:
        """Have the workers drop all that belongs to the driver."""
        self._note(has_gradients=False)
        if self._finalizer is not None and self._finalizer.alive:
            if not self.session.broken:
                self.wait()
                present = {*self.workers, *self.left} - self.session.log.gone
                self._finalizer.detach()  # also if a worker is lost meanwhile: the others have dropped it
                self.session.call(PendingCommand(dict.fromkeys(sorted(present), Unload()), self.driver))
            self._finalizer.detach()

    # Steps

    @property
    def last_before_update(self) -> bool:
        """Whether the next step is taken to be the last before the parameters are updated."""
        return self.known.steps + 1 == self.known.steps_of_last_update

    def flags_to_send(self, flags: Flags, hooks: Hooks) -> tuple[Flags, Hooks] | None:
        """The flags and hooks for the next step; None if the workers have these."""
        if flags != self.flags or hooks is not self.hooks:
            self.flags, self.hooks, self.flags_due = flags, hooks, True
        return (flags, hooks) if self.flags_due else None

    def post_step(
        self,
        steps: Mapping[int, Step],
        trains: bool,
        reduce: bool,
        limit: float | None,
        surroundings: Surroundings,
        accept: AcceptAnswers = accept_all,
    ) -> PendingCommand:
        """Send a step to the workers; `Session.wait` waits for it. ``reduce`` says that it adds up copies.

        ``accept`` takes the answers, and raises if the step must not count.
        """
        with uninterrupted(), self.session.lock:  # else an answer might undo what is noted here
            numbers = self.known.numbers
            if numbers is not None:
                random, numbers = numbers.next(trains), numbers.after(trains)
                steps = {worker: replace(step, random=random) for worker, step in steps.items()}
            posted = self.session.post(self._command(steps, surroundings, limit, accept))
            self.told, self.flags_due = surroundings, False
            unreduced = self.known.state is GradientState.UNREDUCED or (trains and self.has_copies)
            state = GradientState.UNREDUCED if unreduced and not reduce else GradientState.REDUCED
            self._note(state=state, zeroed=frozenset(), steps=self.known.steps + 1, numbers=numbers)
            if trains:
                self._note(unapplied=True, has_gradients=True, dropped=frozenset())
        return posted

    # Other commands

    @in_turn
    def wait(self) -> None:
        """Wait for all that was sent. A step may fail, and change the state."""
        self.session.wait_all()

    @in_turn
    def call(self, bodies: Mapping[int, Any], limit: float | None = None) -> dict[int, Any]:
        """Send each worker its part of a command, and wait for the answers, ``limit`` seconds at most."""
        self.wait()
        surroundings = Surroundings.current()
        answers = self.session.call(self._command(bodies, surroundings, limit))
        self.told = surroundings
        dropped = self.known.state is GradientState.TO_DROP
        self._note(zeroed=frozenset(), state=GradientState.REDUCED if dropped else self.known.state)
        return {worker: answers[worker] for worker in bodies}  # the others only dropped their gradients

    @in_turn
    def call_reducing(self, command: Callable[[bool], Mapping[int, Any]]) -> dict[int, Any]:
        """Like `call`, for a command that adds up the copies' gradients first if it is told to: it is made with that flag."""
        answers = self.call(command(self.known.state is GradientState.UNREDUCED))
        self._note(state=GradientState.REDUCED)
        return answers

    def check_not_edited(self) -> None:
        """Raise if the script has edited gradients that it was given, which the workers do not see."""
        edited, self.fetched = any(each._version != version for each, version in self.fetched), []
        if edited:
            raise DriverError(
                "gradients that driver.gradients() or driver.get_grad() gave were changed in place, but they are copies, and "
                "the workers keep theirs. To change gradients, call driver.clip_grad_norm_ or driver.clip_grad_value_, or put "
                "hooks on the parameters before the step (parameter.register_hook); to compute with a copy, clone() it"
            )

    def zero_grad(self) -> None:
        """Drop all gradients: the next command says so."""
        self.fetched = []
        self._note(state=GradientState.TO_DROP, zeroed=frozenset(), has_gradients=False)
        self.nonfinite.drop_all()
        self.parameters_updated()

    def zero_grad_of(self, optimizer: int, names: Iterable[str]) -> None:
        """Drop the gradients of the parameters that an optimizer has, those with these names: the next command says so."""
        names = [*names]
        self.nonfinite.drop(names)
        self._note(dropped=self.known.dropped.union(names))
        if self.known.state is not GradientState.TO_DROP:
            self._note(zeroed=self.known.zeroed | {optimizer})
        self.parameters_updated()

    def has_gradient(self, name: str) -> bool:
        """Whether the workers may have a gradient of the parameter with this name."""
        return self.known.has_gradients and name not in self.known.dropped

    def parameters_updated(self) -> None:
        """The steps so far made one update."""
        self.fetched = []
        self._note(unapplied=False)
        if self.known.steps:
            self._note(steps_of_last_update=self.known.steps, steps=0)

    def check_open(self) -> None:
        """Raise if the driver was closed."""
        if self._finalizer is not None and not self._finalizer.alive:
            raise DriverError("this driver was closed; make another")

    def _command(
        self,
        bodies: Mapping[int, Any],
        surroundings: Surroundings,
        limit: float | None,
        accept: AcceptAnswers = accept_all,
    ) -> PendingCommand:
        """A command to send now. It is for all workers if they are to drop gradients, or if the surroundings have changed."""
        self.check_open()
        if not self.recovering:
            self._check_whole()
        zero: ZeroGrad = self.known.state is GradientState.TO_DROP or tuple(sorted(self.known.zeroed)) or False
        changed = surroundings if surroundings != self.told else None
        if zero or changed:
            bodies = {**dict.fromkeys(self.workers), **bodies}
        undo = partial(self._undo, self.known, self.flags_due)
        return PendingCommand(bodies, self.driver, zero, undo, limit, changed, accept)

    def _undo(self, before: KnownGradients, flags_due: bool) -> None:
        now, self.told, self.flags_due = self.known, None, self.flags_due or flags_due
        if now.state is not GradientState.TO_DROP:  # else zero_grad() was called since
            self.known = replace(before, steps_of_last_update=now.steps_of_last_update)
        self._note(zeroed=now.zeroed | before.zeroed, numbers=before.numbers)
