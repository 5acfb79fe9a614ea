"""The instructions of a worker. Each is a small frozen value with one exact text.

| text                     | meaning                                                                                |
|--------------------------|----------------------------------------------------------------------------------------|
| ``F2.0``                 | the forward pass of stage 2 on micro-batch 0                                           |
| ``B2.0``                 | its whole backward pass                                                                |
| ``R2.0``                 | the forward pass once more, for the backward: the first one has kept its inputs only   |
| ``I2.0``, ``W2.0``       | the halves of its backward pass: gradients of the inputs, gradients of the weights     |
| ``send x.0 to 3``        | put value ``x`` of micro-batch 0 into the channel to worker 3, and go on               |
| ``receive x.0 from 1``   | take value ``x`` of micro-batch 0 from the channel from worker 1, or wait for it       |
| ``free x.0``             | drop value ``x`` of micro-batch 0                                                      |
| ``reduce emb.weight``    | add this worker's gradient of a replicated parameter to the sum over all copies        |
| ``reduce stage 2``       | add this worker's gradients of stage 2 to the sums over all replicas of the pipeline   |

A worker does not wait for a send or a reduction, unless a channel is full. The sum of a reduction is there when the step ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pippy.drivers.plan.language.scanner import NAME, QUALIFIED_NAME, Scanner


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


@dataclass(frozen=True, slots=True)
class Compute:
    """One pass of one stage over one micro-batch.

    >>> str(Compute(Op.FORWARD, stage=2, microbatch=0))
    'F2.0'
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Put a value into the channel to another worker.

    >>> str(Send("activation_1", microbatch=0, to=2))
    'send activation_1.0 to 2'
    """

    value: str
    microbatch: int
    to: int

    def __str__(self) -> str:
        return f"send {self.value}.{self.microbatch} to {self.to}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a value from the channel from another worker.

    >>> str(Receive("activation_1", microbatch=0, source=1))
    'receive activation_1.0 from 1'
    """

    value: str
    microbatch: int
    source: int

    def __str__(self) -> str:
        return f"receive {self.value}.{self.microbatch} from {self.source}"


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a value that this worker made or received and does not need any more.

    >>> str(Free("activation_1", microbatch=0))
    'free activation_1.0'
    """

    value: str
    microbatch: int

    def __str__(self) -> str:
        return f"free {self.value}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add this worker's gradient of a replicated parameter to the sum over all copies, and go on.

    >>> str(Reduce("emb.weight"))
    'reduce emb.weight'
    """

    parameter: str

    def __str__(self) -> str:
        return f"reduce {self.parameter}"


@dataclass(frozen=True, slots=True)
class ReduceStage:
    """Add this worker's gradients of a stage to the sums over all replicas of the pipeline, and go on.

    >>> str(ReduceStage(2))
    'reduce stage 2'
    """

    stage: int

    def __str__(self) -> str:
        return f"reduce stage {self.stage}"


Instruction = Compute | Send | Receive | Free | Reduce | ReduceStage


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
    for word, scan in GRAMMAR.items():
        if scanner.accept(word):
            found = scan(scanner)
            scanner.end()
            return found
    raise scanner.error(f"expected an instruction ({', '.join(word.strip() for word in GRAMMAR)})")


def scan_compute(op: Op) -> Callable[[Scanner], Compute]:
    def scan(scanner: Scanner) -> Compute:
        stage = scanner.number("a stage number")
        scanner.literal(".")
        return Compute(op, stage, scanner.number("a micro-batch number"))

    return scan


def scan_value(scanner: Scanner) -> tuple[str, int]:
    value = scanner.take(NAME, "the name of a value")
    scanner.literal(".")
    return value, scanner.number("a micro-batch number")


def scan_send(scanner: Scanner) -> Send:
    value, microbatch = scan_value(scanner)
    scanner.literal(" to ")
    return Send(value, microbatch, scanner.number("a worker number"))


def scan_receive(scanner: Scanner) -> Receive:
    value, microbatch = scan_value(scanner)
    scanner.literal(" from ")
    return Receive(value, microbatch, scanner.number("a worker number"))


def scan_free(scanner: Scanner) -> Free:
    return Free(*scan_value(scanner))


def scan_reduce(scanner: Scanner) -> Reduce | ReduceStage:
    if scanner.accept("stage "):
        return ReduceStage(scanner.number("a stage number"))
    return Reduce(scanner.take(QUALIFIED_NAME, "the qualified name of a parameter"))


# How the text of each kind of instruction begins, and the function that reads the rest.
GRAMMAR: dict[str, Callable[[Scanner], Instruction]] = {
    **{op.value: scan_compute(op) for op in Op},
    "send ": scan_send,
    "receive ": scan_receive,
    "free ": scan_free,
    "reduce ": scan_reduce,
}
