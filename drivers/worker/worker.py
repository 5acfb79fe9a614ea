"""A worker: it runs the controller's commands in order, on one thread, and answers each of them.

Settings, autocast and the state of the random numbers surround the commands of a driver. A worker has the process for itself,
or is a thread beside a script's (`WorkerContext.shares_process`). The settings and random numbers of a script's process are the
script's: there the worker only looks whether the settings are those of the call that it was sent, and draws from the script's
random numbers.

What is logged under ``pippy`` in a worker's process is kept until an answer to the controller takes it along. Nothing is sent
for a record, and nothing waits for it: the next answer has it, of a command or of a ping. Where that takes long, the first
records are kept, and of the others their number.
"""

import gc
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError, PeerLost
from pippy.drivers.base.process_signs import show_stack_when_asked
from pippy.drivers.plan.language.instructions import Compute, Receive
from pippy.drivers.protocol import commands
from pippy.drivers.protocol.programs import ForgetPeers, Generate, Load, Unload
from pippy.drivers.protocol.state import AskWritten
from pippy.drivers.protocol.steps import RunTrial, Step
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.executor import Executor, Running
from pippy.drivers.worker.measure.profiler import named
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.base.errors import GuardError, PippyError, shows_all
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.readable import count_with_noun, shortened
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.run.random_state import RandomState, seed_all

_MOST = 1000  # records
_LONGEST = 8000  # characters of one
_traceback = logging.Formatter().formatException


class LogHandler(logging.Handler):
    """Keeps up to ``most`` records.

    >>> handler = LogHandler(most=1)
    >>> for number in range(3):
    ...     handler.handle(logging.makeLogRecord({"name": "pippy", "levelno": 20, "msg": "record %d", "args": (number,)}))
    True
    True
    True
    >>> [each.message for each in handler.take()], handler.take()
    (['record 0', '2 records of this worker were dropped here, as no answer took them'], ())
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__()
        self.most, self.dropped = most, 0
        self._records: deque[commands.WorkerLogRecord] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) >= self.most:
            self.dropped += 1
            return
        try:
            message = record.getMessage() + (f"\n{_traceback(record.exc_info)}" if record.exc_info else "")
        except Exception:
            self.handleError(record)
            return
        message = shortened(message, _LONGEST)
        place = record.pathname if hasattr(record, "pathname") else "", record.lineno, record.funcName or ""
        self._records.append(commands.WorkerLogRecord(record.name, record.levelno, message, record.created, *place))

    def take(self) -> tuple[commands.WorkerLogRecord, ...]:
        """The records since the last call."""
        if not self._records:
            return ()
        taken = [self._records.popleft() for _ in range(len(self._records))]
        dropped, self.dropped = self.dropped, 0
        if dropped:
            text = f"{count_with_noun(dropped, 'record')} of this worker were dropped here, as no answer took them"
            taken.append(commands.WorkerLogRecord(LOGGER.name, logging.WARNING, text, time.time(), __file__, 0, ""))
        return tuple(taken)

    @contextmanager
    def of_this_process(self, level: int) -> Iterator[None]:
        """Inside, all records of this level and above come here, and go nowhere else."""
        before = LOGGER.handlers, LOGGER.propagate, LOGGER.level
        LOGGER.handlers, LOGGER.propagate = [self], False
        LOGGER.setLevel(level)
        try:
            yield
        finally:
            LOGGER.handlers, LOGGER.propagate = before[:2]
            LOGGER.setLevel(before[2])


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
    def around(self, command: commands.Command) -> Iterator[None]:
        """The surroundings in which a command is carried out."""
        if isinstance(command, commands.CommandElsewhere) and command.surroundings is not None:
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

    def _switch_to(self, command: commands.Command) -> None:
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


_log = logging.getLogger(__name__)


class Worker:
    """Runs the commands from its queue of messages until the queue ends."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.device = torch.device(context.device or "cpu")
        self.drivers: dict[int, DriverState] = {}
        self.surroundings = WorkerSurroundings(context)
        self.to_clean_up: deque[commands.GiveUp] = deque()  # commands that were given up; urgent messages add to it
        self.given_up_through = -1
        self.command: commands.Command | None = None
        self.log = LogHandler()

    def run(self) -> None:
        """Run commands until the queue of messages ends."""
        shared = self.context.shares_process  # then records reach the script's handlers by themselves
        if not shared:
            show_stack_when_asked()
        with nullcontext() if shared else self.log.of_this_process(self.context.log_level):
            try:
                self._run()
            finally:
                for driver in list(self.drivers):
                    self._forget(driver)

    def _run(self) -> None:
        messages, transport = self.context.messages, self.context.transport
        if self.context.copies is not None:
            self.context.copies.accelerator.set_current()  # before anything of the user's runs in this thread
        while True:
            transport.wait_for(messages.fileno())
            command, reply = messages.get()
            answer = self.answer(command)
            try:
                reply(answer)
            except Exception as error:  # it cannot be pickled
                self._undo(command)
                reply(commands.Answer(failure=self._failure(command, error)))

    def answer(self, command: commands.Command) -> commands.Answer:
        """Run one command. An error is part of the answer."""
        self._clean_up(command.number)
        if command.number <= self.given_up_through:
            return commands.Answer(failure=commands.Failure("given up", ""))
        self.command = command
        try:
            value, told = self._obey(command), self.tell()
            return commands.Answer(value) if told is None else commands.AnswerTelling(value, told=told)
        except Interrupted:
            failure = commands.Failure("given up", "")
        except PeerLost as error:
            failure = self._failure(command, error, peer=error.peer)
        except BaseException as error:  # a user's model or optimizer may raise anything, also sys.exit()
            failure = self._failure(command, error)
        finally:
            self.command = None
        self._undo(command)
        return commands.Answer(failure=failure)

    def given_up(self) -> bool:
        """Whether the command that is running was given up meanwhile."""
        return self.command is not None and self.command.number <= self.given_up_through

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if isinstance(message, commands.GiveUp):
            self.to_clean_up.append(message)
            self.given_up_through = message.last
            self.context.transport.interrupt()
        elif isinstance(message, commands.Dump):
            return self.dump()
        elif isinstance(message, commands.AskWays):
            return self.context.transport.ways()
        elif isinstance(message, AskWritten):
            state = self.drivers.get(message.driver)
            return state.disk.ask() if state else commands.Failure("the worker has dropped the driver", "")
        elif isinstance(message, commands.Ping):
            return self.tell()
        return None

    def tell(self) -> commands.News | None:
        """What an answer takes along."""
        compiling, records = self.compiling(), self.log.take()
        return None if compiling is None and not records else commands.News(compiling, records)

    def compiling(self) -> tuple[int, int] | None:
        """While it compiles pieces of stages: how many are done, and how many there are."""
        found = [each.graphs.progress for each in list(self.drivers.values()) if each.graphs is not None]
        return next((each for each in found if each is not None), None)

    def dump(self) -> str:
        """What the worker is doing or waiting for, in a line."""
        who = f"worker {self.context.index} (pid {os.getpid()})"
        return f"{who} waits for a command" if self.command is None else f"{who}: {self.doing()}"

    def doing(self) -> str:
        """The command that it runs, the instruction in it, and what that waits for."""
        command = self.command
        if command is None:
            return "no command"
        doing = f"command {command.number}, {type(command.body).__name__}"
        state = self.drivers.get(command.driver)
        running = state.running if state else None
        if running is not None:
            doing += f", {_place(running)}: {running.current()}"
        elif state is not None and state.datasets.loading:
            doing += ", loading its inputs"
        compiling = self.compiling()
        if compiling is not None:
            doing += f", compiling piece {compiling[0] + 1} of {compiling[1]}"
        waiting = self.context.transport.waiting_for()
        waits = f"; waits for {_awaited(running, waiting[0])}" if waiting else ""
        return f"{doing}{waits}"

    def _obey(self, command: commands.Command) -> Any:
        self._drop(command.dropped)
        if isinstance(command.body, Unload):
            self._drop((command.driver,))
            return None
        if isinstance(command.body, ForgetPeers):
            self.context.transport.forget(command.body.peers)
            for state in self.drivers.values():
                state.profiler.close()  # the one that is lost takes its part with it
            return None
        with self.surroundings.around(command):
            return self._obey_inside(command)

    def _obey_inside(self, command: commands.Command) -> Any:
        body = command.body
        transport = self.context.transport
        if isinstance(body, Load):
            self._load(command.driver, body)
            return None
        with named(body):
            result = self.drivers[command.driver].obey(command)
            transport.finish()  # an answer says that it has succeeded, on the device too
        return result

    def _load(self, driver: int, load: Load) -> None:
        """Hold stages for a driver, in place of those that it had here. Copies of states, for recoveries, stay."""
        kept = {} if driver not in self.drivers else self.drivers[driver].neighbours.kept
        self._free([driver])
        self.drivers[driver] = DriverState(load, self.context, self.given_up, kept)
        _log.debug("holds stages of driver %d", driver)

    def _drop(self, drivers: Sequence[int]) -> None:
        """Drop what belongs to these drivers."""
        for driver in drivers:
            self.surroundings.forget(driver)
        self._free(drivers)

    def _free(self, drivers: Sequence[int]) -> None:
        """Drop what drivers hold, and free its memory at once: stages may be large, and are in reference cycles."""
        gone = [driver for driver in drivers if self._forget(driver)]
        if gone:
            gc.collect()
            self.context.transport.trim()
            if self.context.copies is not None:
                self.context.copies.accelerator.free_cache()

    def _forget(self, driver: int) -> bool:
        """Drop a driver's state. Returns whether there was one."""
        state = self.drivers.pop(driver, None)
        if state is not None:
            state.close()
        return state is not None

    def _clean_up(self, number: int) -> None:
        """Drop the gradients and values of commands that were given up before the command with this number."""
        while self.to_clean_up and self.to_clean_up[0].last < number:
            given_up = self.to_clean_up.popleft()
            for state in self.drivers.values():
                state.drop(given_up.first, given_up.last)
            self.context.transport.discard_before(given_up.last + 1)
            self.context.transport.clear_interrupt()

    def _undo(self, command: commands.Command) -> None:
        """Drop the gradients of a command that failed, and what it has not sent."""
        self.context.transport.drop_unsent()
        state = self.drivers.get(command.driver)
        if state is not None:
            state.running = None
            state.drop(command.number, command.number)

    def _failure(self, command: commands.Command, error: BaseException, peer: int | None = None) -> commands.Failure:
        state = self.drivers.get(command.driver)
        running = state.running if state else None
        text = _trace(error)
        message = f"{type(error).__name__}: {_said(error)}"
        if running is None or not isinstance(command.body, Step | RunTrial | Generate):
            what = "Step" if isinstance(command.body, RunTrial) else type(command.body).__name__
            if running is not None:
                adding = "adding up the gradients of replicated parameters: " * running.current().kind.adds_up
                what += f", {adding}{running.current()}"
            return commands.Failure(message, text, where=what, peer=peer)
        guard = next((str(each) for each in (error, error.__cause__) if isinstance(each, GuardError)), "")
        instruction = running.current()
        stage = instruction.stage if isinstance(instruction, Compute) else None
        microbatch = getattr(instruction, "microbatch", None)
        if microbatch is not None and isinstance(running, Executor) and not isinstance(command.body, Generate):
            microbatch += running.earlier
        return commands.Failure(message, text, _place(running), str(instruction), stage, microbatch, peer, guard)


def _trace(error: BaseException) -> str:
    """The traceback of an error; of one that explains another, as that of a model, it is that of the other."""
    explained = error.__cause__ if isinstance(error, PippyError) and not shows_all() else None
    return "".join(traceback.format_exception(explained or error))


def _place(running: Running) -> str:
    run = running.run_of if isinstance(running, Executor) else ""
    return f"{run}instruction {running.at + 1} of {len(running.order)}"


def _awaited(running: Running | None, step: int) -> str:
    """What the worker waits for: of the instruction that runs, if any does."""
    if running is None or (instruction := running.current()).kind.gives is None:
        return "nothing"
    value, microbatch = instruction.kind.gives(instruction)
    of = f" of micro-batch {microbatch}" * isinstance(instruction, Receive)
    return f"{value}{of} of step {step}, from worker {running.source()}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text could not be made: {type(second).__name__})"
