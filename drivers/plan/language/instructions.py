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

    What takes and gives no edge of the program is a part of the ``exchange`` of a payload.

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
    exchange: "Payload | None" = None
    turn: int = 0

    @property
    def adds_up(self) -> bool:
        """Whether it is a part of a sum of gradients."""
        return self.exchange in (Payload.GRADIENTS, Payload.SUM)


class Payload(StrEnum):
    """What workers pass to each other that is no edge of a program, as the text of instructions has it."""

    GRADIENTS = "gradients of {of:sum}"
    SUM = "sum of {of:sum}"
    NOTES = "notes"
    PARAMETERS = "parameters of {of:sum}"
    STATE = "state of worker {of:worker}"

    @property
    def in_steps(self) -> bool:
        """Whether it is passed on in the programs of steps. Else that takes a program of its own."""
        return self not in (Payload.PARAMETERS, Payload.STATE)


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
        return KINDS[self.key]

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
class Reduce(Instruction):
    """Add up the gradients of a sum: this worker's, and those that it has received.

    >>> str(Reduce("emb.weight"))
    'reduce emb.weight'
    """

    of: str


@dataclass(frozen=True, slots=True)
class SendExchanged(Instruction):
    """Put what is no edge of a program into the channel to another worker. ``of`` is the sum or the worker that it is of.

    >>> str(SendExchanged(Payload.GRADIENTS, to=0, of="emb.weight"))
    'send gradients of emb.weight to 0'
    """

    payload: Payload
    to: int
    of: Any = ""

    @property
    def key(self) -> "InstructionKey":
        return SendExchanged, self.payload


@dataclass(frozen=True, slots=True)
class ReceiveExchanged(Instruction):
    """Take what is no edge of a program from the channel from another worker.

    >>> str(ReceiveExchanged(Payload.STATE, source=2, of=1))
    'receive state of worker 1 from 2'
    """

    payload: Payload
    source: int
    of: Any = ""

    @property
    def key(self) -> "InstructionKey":
        return ReceiveExchanged, self.payload


own_value = attrgetter("value", "microbatch")
sum_value = attrgetter("into", "microbatch")
NOTES: Final = "notes of batch norms"  # the name of a value, which no edge can have


# Of a computation, its operation; of what is exchanged, its class and its payload; of any other instruction, its class.
InstructionKey = Op | type[Instruction] | tuple[type[Instruction], Payload]


def passed_on(payload: Payload) -> dict[InstructionKey, Kind]:
    """The rows of the two kinds that pass on a payload. It is a value of all micro-batches, which has its text as name."""
    text: Callable[[object], str] = (lambda _: NOTES) if payload == Payload.NOTES else Form(payload).text

    def value_of(each: Any) -> MicrobatchValue:
        return text(each), 0

    there = Kind(Form(f"send {payload} to {{to}}"), takes=value_of, sends_to=attrgetter("to"), exchange=payload)
    here = Kind(
        Form(f"receive {payload} from {{source}}"),
        gives=value_of,
        receives_from=attrgetter("source"),
        exchange=payload,
    )
    return {(SendExchanged, payload): there, (ReceiveExchanged, payload): here}


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
    **{key: kind for payload in Payload for key, kind in passed_on(payload).items()},
    Reduce: Kind(Form("reduce {of:sum}"), exchange=Payload.SUM),
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
            fields: dict[str, Any] = kind.form.scan(scanner)
            if isinstance(key, tuple):
                return key[0](key[1], **fields)  # type: ignore[call-arg]
            return Compute(key, **fields) if isinstance(key, Op) else key(**fields)
    words = dict.fromkeys(kind.form.beginning.split()[0] for kind in KINDS.values())
    raise scanner.error(f"expected an instruction ({', '.join(words)})")
