"""The instructions of a worker, and the one table of what is known of each kind: ``KINDS``.

An instruction is a small frozen value with one exact text:

| text                     | meaning                                                                                |
|--------------------------|----------------------------------------------------------------------------------------|
| ``F2.0``                 | the forward pass of stage 2 on micro-batch 0                                           |
| ``B2.0``                 | its whole backward pass                                                                |
| ``R2.0``                 | the forward pass once more, for the backward: the first one has kept its inputs only   |
| ``I2.0``, ``W2.0``       | the halves of its backward pass: gradients of the inputs, gradients of the weights     |
| ``C2.0``                 | choose the next token of each row, from the logits that stage 2 has given                |
| ``send x.0 to 3``        | put value ``x`` of micro-batch 0 into the channel to worker 3, and go on               |
| ``receive x.0 from 1``   | take value ``x`` of micro-batch 0 from the channel from worker 1, or wait for it       |
| ``free x.0``             | drop value ``x`` of micro-batch 0                                                      |
| ``add x.0 to y``         | add value ``x`` of micro-batch 0 to value ``y`` of it, and drop ``x``                  |
| ``reduce emb.weight``    | add up the gradients of a parameter of which there are copies, over all of them        |

Before that come ``send gradients of emb.weight to 0`` and ``receive gradients of emb.weight from 3``, and after it
``send sum of emb.weight to 3`` and ``receive sum of emb.weight from 0``. In replicas of a pipeline, all parameters have copies;
those of a stage are added up in parts, as ``stage 2 part 0``. A step that only accumulates gradients passes over all of these.

In replicas of a pipeline, ``send notes to 3`` and ``receive notes from 3`` move what the batch norms of a worker's stages have
noted, to the worker with the same stages in another replica. A step whose batch norms note nothing passes over both.

Outside of a step, workers run programs with other sends and receives (exchanges.py): ``send parameters of stage 2 part 0 to 3``
passes on parameters that a divided optimizer has updated here, and ``send state of worker 1 to 2`` a copy of what worker
1 holds, from which it can go on.

Gradients of one value that are made on one worker are added there, in the order that the program says: see `Program`.

A worker does not wait for a send, unless a channel is full. What is chosen is for the next run: see `Program`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from operator import attrgetter
from typing import Any, Final, Literal

from pippy.drivers.plan.language.scanner import Form, Scanner


class Op(StrEnum):
    """The kinds of computation.

    >>> Op("I").name
    'BACKWARD_INPUT'
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    CHOOSE = "C"


Phase = Literal["F", "B", "C"]
MicrobatchValue = tuple[str, int]  # a value and its micro-batch
ValueOf = Callable[[Any], MicrobatchValue]  # of an instruction
WorkerOf = Callable[[Any], int]  # of an instruction
GivenCosts = Callable[[str], Sequence[float | Fraction] | None]  # by the name of a cost, that of each stage, if given


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of instruction: a row of the table.

    ``form`` is its text. ``takes`` is the value that must be here, ``gives`` the one that is here afterwards, and ``drops``
    the one that is not here any more. What it ``changes`` is a value that must be here, too. A kind that puts its value into a
    channel says to which worker in ``sends_to``; one that takes it from a channel, in ``receives_from``.

    A computation has a ``meaning`` for legends and the ``colour`` of its boxes. It comes ``after`` other passes of its stage
    and micro-batch, ``excludes`` others, and holds by ``live`` more stage-micro-batches when it is done. ``phase`` is the pass
    whose values it takes and gives: the program's edges say which these are. ``cost`` is its time, by stage. In a program with
    slices of sequences it takes its ``turn`` after the same pass of the slice before it (1), or of the one behind it (-1).

    What takes and gives no edge of the program is a part of an ``exchange``.

    >>> KINDS[Free].drops(Free("x", microbatch=0))
    ('x', 0)
    """

    form: Form
    meaning: str = ""
    colour: str | None = None
    takes: ValueOf | None = None
    gives: ValueOf | None = None
    drops: ValueOf | None = None
    changes: ValueOf | None = None
    sends_to: WorkerOf | None = None
    receives_from: WorkerOf | None = None
    after: tuple[Op, ...] = ()
    excludes: tuple[Op, ...] = ()
    live: int = 0
    phase: Phase | None = None
    cost: Callable[[GivenCosts], Sequence[float | Fraction]] | None = None
    exchange: "Exchange | None" = None
    turn: int = 0

    @property
    def adds_up(self) -> bool:
        """Whether it is a part of a sum of gradients."""
        return self.exchange == Exchange.SUM


class Exchange(StrEnum):
    """What workers pass to each other that is no edge of a program: in a step, or in a program of its own."""

    SUM = "sum"
    NOTES = "notes"
    PARAMETERS = "parameters"
    STATE = "state"

    @property
    def in_steps(self) -> bool:
        """Whether it is in the programs of steps."""
        return self in (Exchange.SUM, Exchange.NOTES)


class Instruction:
    """What every instruction has: a text, and a row in the table.

    >>> Send("x", microbatch=0, to=3).kind.colour is None
    True
    """

    __slots__ = ()

    @property
    def key(self) -> "InstructionKey":
        """What its kind is found by, here and wherever something is done for each kind."""
        return type(self)

    @property
    def kind(self) -> Kind:
        """Its row in the table."""
        return KINDS[type(self)]

    def __str__(self) -> str:
        return self.kind.form.text(self)


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """One pass of one stage over one micro-batch.

    >>> str(Compute(Op.FORWARD, stage=2, microbatch=0))
    'F2.0'
    """

    op: Op
    stage: int
    microbatch: int

    @property
    def key(self) -> Op:
        return self.op

    @property
    def kind(self) -> Kind:
        return KINDS[self.op]


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Put a value into the channel to another worker.

    >>> str(Send("activation_1", microbatch=0, to=2))
    'send activation_1.0 to 2'
    """

    value: str
    microbatch: int
    to: int


@dataclass(frozen=True, slots=True)
class Receive(Instruction):
    """Take a value from the channel from another worker.

    >>> str(Receive("activation_1", microbatch=0, source=1))
    'receive activation_1.0 from 1'
    """

    value: str
    microbatch: int
    source: int


@dataclass(frozen=True, slots=True)
class Free(Instruction):
    """Drop a value that this worker made or received and does not need any more.

    >>> str(Free("activation_1", microbatch=0))
    'free activation_1.0'
    """

    value: str
    microbatch: int


@dataclass(frozen=True, slots=True)
class Add(Instruction):
    """Add a gradient to another one of the same value, which becomes the sum, and drop it.

    >>> str(Add("x_grad_from_submod_1", microbatch=0, into="x_grad_from_submod_5"))
    'add x_grad_from_submod_1.0 to x_grad_from_submod_5'
    """

    value: str
    microbatch: int
    into: str


@dataclass(frozen=True, slots=True)
class SendGradients(Instruction):
    """Put this worker's gradients of a sum into the channel to the worker that adds them up.

    >>> str(SendGradients("emb.weight", to=0))
    'send gradients of emb.weight to 0'
    """

    sum: str
    to: int


@dataclass(frozen=True, slots=True)
class ReceiveGradients(Instruction):
    """Take another worker's gradients of a sum from the channel.

    >>> str(ReceiveGradients("stage 2 part 0", source=3))
    'receive gradients of stage 2 part 0 from 3'
    """

    sum: str
    source: int


@dataclass(frozen=True, slots=True)
class Reduce(Instruction):
    """Add up the gradients of a sum: this worker's, and those that it has received.

    >>> str(Reduce("emb.weight"))
    'reduce emb.weight'
    """

    sum: str


@dataclass(frozen=True, slots=True)
class SendSum(Instruction):
    """Put a sum into the channel to another worker.

    >>> str(SendSum("emb.weight", to=3))
    'send sum of emb.weight to 3'
    """

    sum: str
    to: int


@dataclass(frozen=True, slots=True)
class ReceiveSum(Instruction):
    """Take a sum from the channel from the worker that has added it up.

    >>> str(ReceiveSum("emb.weight", source=0))
    'receive sum of emb.weight from 0'
    """

    sum: str
    source: int


@dataclass(frozen=True, slots=True)
class SendNotes(Instruction):
    """Put what batch norms have noted in this step into the channel to the worker with the same stages in another replica.

    >>> str(SendNotes(to=3))
    'send notes to 3'
    """

    to: int


@dataclass(frozen=True, slots=True)
class ReceiveNotes(Instruction):
    """Take what the batch norms of another replica have noted in this step, to count it together with this worker's.

    >>> str(ReceiveNotes(source=1))
    'receive notes from 1'
    """

    source: int


@dataclass(frozen=True, slots=True)
class SendParameters(Instruction):
    """Put parameters that were updated here, those whose gradients are in a sum, into the channel to another worker.

    >>> str(SendParameters("stage 2 part 0", to=3))
    'send parameters of stage 2 part 0 to 3'
    """

    sum: str
    to: int


@dataclass(frozen=True, slots=True)
class ReceiveParameters(Instruction):
    """Take updated parameters from the channel from the worker that has updated them.

    >>> str(ReceiveParameters("emb.weight", source=0))
    'receive parameters of emb.weight from 0'
    """

    sum: str
    source: int


@dataclass(frozen=True, slots=True)
class SendState(Instruction):
    """Put the copy of a worker's state into the channel to another worker, which may be the one that it is of.

    >>> str(SendState(of=1, to=2))
    'send state of worker 1 to 2'
    """

    of: int
    to: int


@dataclass(frozen=True, slots=True)
class ReceiveState(Instruction):
    """Take the copy of a worker's state from the channel from another worker.

    >>> str(ReceiveState(of=1, source=1))
    'receive state of worker 1 from 1'
    """

    of: int
    source: int


own_value = attrgetter("value", "microbatch")
sum_value = attrgetter("into", "microbatch")
NOTES: Final = "notes of batch norms"  # the name of a value, which no edge can have

InstructionKey = Op | type[Instruction]  # of a computation, its operation; of any other instruction, its class


def passed_on(
    send: type[Instruction], receive: type[Instruction], what: str, exchange: Exchange, value: str = ""
) -> dict[InstructionKey, Kind]:
    """The rows of two kinds that pass on a value of all micro-batches, which ``value`` names, or else the text of ``what``."""
    text: Callable[[object], str] = (lambda _: value) if value else Form(what).text

    def value_of(each: Any) -> MicrobatchValue:
        return text(each), 0

    there = Kind(Form(f"send {what} to {{to}}"), takes=value_of, sends_to=attrgetter("to"), exchange=exchange)
    here = Kind(
        Form(f"receive {what} from {{source}}"), gives=value_of, receives_from=attrgetter("source"), exchange=exchange
    )
    return {send: there, receive: here}


# All that is known of each kind. A kind whose text begins as that of another goes before it.
KINDS: dict[InstructionKey, Kind] = {
    Op.FORWARD: Kind(
        Form("F{stage}.{microbatch}"),
        meaning="forward",
        colour="#7fabea",
        live=1,
        phase="F",
        turn=1,
        cost=lambda costs: costs("forward") or (),
    ),
    Op.RECOMPUTE: Kind(
        Form("R{stage}.{microbatch}"),
        meaning="forward again",
        colour="#8f9bc9",
        after=(Op.FORWARD,),
        excludes=(Op.BACKWARD, Op.BACKWARD_INPUT),
        live=1,
        cost=lambda costs: costs("recompute") or costs("forward") or (),
    ),
    Op.BACKWARD: Kind(
        Form("B{stage}.{microbatch}"),
        meaning="backward",
        colour="#57b077",
        after=(Op.FORWARD,),
        excludes=(Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
        live=-1,
        phase="B",
        turn=-1,
        cost=lambda costs: costs("backward") or cost_of_halves(costs),
    ),
    Op.BACKWARD_INPUT: Kind(
        Form("I{stage}.{microbatch}"),
        meaning="backward, inputs",
        colour="#63cbd6",
        after=(Op.FORWARD,),
        excludes=(Op.BACKWARD,),
        phase="B",
        turn=-1,
        cost=lambda costs: costs("backward_input") or (),
    ),
    Op.BACKWARD_WEIGHT: Kind(
        Form("W{stage}.{microbatch}"),
        meaning="backward, weights",
        colour="#a870d2",
        after=(Op.BACKWARD_INPUT,),
        excludes=(Op.BACKWARD,),
        live=-1,
        cost=lambda costs: costs("backward_weight") or (),
    ),
    Op.CHOOSE: Kind(
        Form("C{stage}.{microbatch}"),
        meaning="choose tokens",
        colour="#d1bc93",
        after=(Op.FORWARD,),
        phase="C",
        cost=lambda costs: [0 for _ in costs("forward") or ()],
    ),
    **passed_on(SendGradients, ReceiveGradients, "gradients of {sum}", Exchange.SUM),
    Reduce: Kind(Form("reduce {sum}"), exchange=Exchange.SUM),
    **passed_on(SendSum, ReceiveSum, "sum of {sum}", Exchange.SUM),
    **passed_on(SendNotes, ReceiveNotes, "notes", Exchange.NOTES, value=NOTES),
    **passed_on(SendParameters, ReceiveParameters, "parameters of {sum}", Exchange.PARAMETERS),
    **passed_on(SendState, ReceiveState, "state of worker {of}", Exchange.STATE),
    Send: Kind(Form("send {value}.{microbatch} to {to}"), takes=own_value, sends_to=attrgetter("to")),
    Receive: Kind(
        Form("receive {value}.{microbatch} from {source}"), gives=own_value, receives_from=attrgetter("source")
    ),
    Free: Kind(Form("free {value}.{microbatch}"), takes=own_value, drops=own_value),
    Add: Kind(Form("add {value}.{microbatch} to {into}"), takes=own_value, drops=own_value, changes=sum_value),
}


def cost_of_halves(costs: GivenCosts) -> Sequence[float | Fraction]:
    return [i + w for i, w in zip(costs("backward_input") or (), costs("backward_weight") or ())]


def parse_instruction(text: str, line: int = 1) -> Instruction:
    """Read the exact text of one instruction; anything else is a ParseError.

    >>> parse_instruction("send x.0 to 3")
    Send(value='x', microbatch=0, to=3)
    >>> parse_instruction("F2:0")
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ParseError: line 1, column 3: expected '.', found ':0'
    """
    return scan_instruction(Scanner(text, line))


def scan_instruction(scanner: Scanner) -> Instruction:
    """Read an instruction from here to the end of the scanner's line."""
    for key, kind in KINDS.items():
        if scanner.accept(kind.form.beginning):
            fields: list[Any] = kind.form.scan(scanner)
            return Compute(key, *fields) if isinstance(key, Op) else key(*fields)
    words = dict.fromkeys(kind.form.beginning.split()[0] for kind in KINDS.values())
    raise scanner.error(f"expected an instruction ({', '.join(words)})")
