"""A worker's part of a program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.peers import NeedsPeers, others_in
from pippy.ir.base.trees import map_instances


@dataclass(frozen=True)
class InputIndex:
    """Stands for an input in the template of a `CallForm`."""

    index: int


def filled(template: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """A template with the inputs in their places. Without a template, the inputs.

    >>> filled((InputIndex(1), [InputIndex(0), "x"]), inputs=["a", "b"])
    ('b', ['a', 'x'])
    """
    if template is None:
        return inputs
    return map_instances(InputIndex, lambda each: inputs[each.index], template)


@dataclass(frozen=True)
class CallForm:
    """How the graph calls a stage: with its inputs in order, or with the arguments ``template``.

    An `InputIndex` in the template stands for an input. ``seen`` has the numbers and names of the inputs that the stage must
    not change in place.
    """

    name: str
    template: Any = None
    seen: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class OutOfOrderLimits:
    """Limits for a worker that runs out of order.

    It holds at most ``limit`` micro-batches of its stages at a time; None stands for the program's own peak. ``depth`` is
    the number of workers that a micro-batch visits from here to the last stage: as many micro-batches keep them all busy.
    """

    limit: int | None
    depth: int


@dataclass(frozen=True)
class AddProgram(NeedsPeers):
    """A worker's part of a program, under a number: sent once, run in many steps.

    ``value_numbers`` numbers the values that are sent between workers, notes of batch norms included. The numbers before these
    are those of buckets: of their gradients and sums, and behind them of their updated parameters.
    ``ranks`` has the cluster's worker for each worker of the program; ``worker`` is this one's number in it. ``returns`` lists
    the values that go back to the controller. Without ``out_of_order``, the worker keeps the order of its instructions.
    ``share`` are the micro-batches that it computes. ``slices`` is how many slices a row of them has, if the stages keep keys
    and values from one slice of a sequence to the next; 0 if they keep none.
    """

    program: int
    order: tuple[Instruction, ...]
    work: Mapping[Pass, tuple[Work, ...]]
    calls: Mapping[str, CallForm]
    value_numbers: Mapping[str, int]
    ranks: tuple[int, ...]
    worker: int
    returns: tuple[str, ...]
    single_loss: bool
    share: range
    out_of_order: OutOfOrderLimits | None = None
    slices: int = 0

    def peers(self, worker: int) -> set[int]:
        """The workers that it sends to, or receives from."""
        return {self.ranks[other] for other in others_in(self.order)}
