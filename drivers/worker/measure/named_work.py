"""Names for what a worker does, in the traces of torch.profiler: its commands, and each of their instructions.

A name says what the trace must tell apart: `trace_events.py` reads it again.

    pippy 412||F2.0                       an instruction of command 412
    pippy 412|3|send relu.0 to 1          one that sends something to worker 3 of the cluster
    pippy 412||Step                       the command

Without a profiler nothing is named.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.profiles import StopProfile
from pippy.drivers.worker.measure.calls import BoundCall

_MARK = "pippy "


@dataclass(frozen=True)
class NamedWork:
    """A command, or an instruction of it; and the worker that this sends to, or receives from.

    >>> NamedWork.read(str(NamedWork(412, "send relu.0 to 1", peer=3)))
    NamedWork(command=412, text='send relu.0 to 1', peer=3)
    >>> NamedWork.read("aten::relu")
    """

    command: int
    text: str
    peer: int | None = None

    def __str__(self) -> str:
        return f"{_MARK}{self.command}|{'' if self.peer is None else self.peer}|{self.text}"

    @staticmethod
    def read(name: str) -> "NamedWork | None":
        """What has this name in a trace; None if it is something else."""
        if not name.startswith(_MARK):
            return None
        command, peer, text = name.removeprefix(_MARK).split("|", 2)
        return NamedWork(int(command), text, int(peer) if peer else None)


def named_command(number: int, body: Any) -> AbstractContextManager[Any]:
    """A context around a command. What ends the profile is no part of it."""
    if not is_profiled() or isinstance(body, StopProfile):
        return nullcontext()
    return record_function(str(NamedWork(number, type(body).__name__)))


def named_instruction(number: int, instruction: Instruction, ranks: Sequence[int] | None = None) -> Any:
    """A context around an instruction of a command. ``ranks`` are the workers that it names, if it gives them by index."""
    if not is_profiled():
        return nullcontext()
    peer_of = instruction.kind.sends_to or instruction.kind.receives_from
    peer = None if peer_of is None else peer_of(instruction)
    return record_function(
        str(NamedWork(number, str(instruction), peer if ranks is None or peer is None else ranks[peer]))
    )


def is_profiled() -> bool:
    """Whether torch.profiler runs in this thread."""
    return torch.autograd._profiler_enabled()


class NamedInstructions:
    """Names the instructions of a program in the steps that are profiled.

    >>> NamedInstructions([], []).watching([])
    []
    """

    def __init__(self, order: Sequence[Instruction], ranks: Sequence[int]) -> None:
        self.order, self.ranks = order, ranks

    def watching(self, code: Sequence[BoundCall]) -> Sequence[BoundCall]:
        """The program's instructions, each inside of its name."""
        return [(self._named(each, handle), operands) for each, (handle, operands) in zip(self.order, code)]

    def _named(self, instruction: Instruction, handle: Callable[..., None]) -> Callable[..., None]:
        def named(step: Any, *operands: Any) -> None:
            with named_instruction(step.number, instruction, self.ranks):
                handle(step, *operands)

        return named
