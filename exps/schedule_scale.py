"""How long does it take to compile and validate a large program, and does the time grow with its length?

Command: ``make bench``, or ``python exps/schedule_scale.py``

Finding: 131,072 computations (interleaved 1F1B, p=64, m=512, v=2), 651,264 instructions once lowered, take 7.8 s on
two shared cores: 1.8 to make, which validates, 2.5 to lower, 3.5 to validate. From 64 chunks to 512 the time for
each computation grows from 36 to 59 microseconds. Python's cycle collector causes this, although there are no cycles.
Without it, the time stays at 32 to 38 microseconds, so it is linear.
"""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.language.program import Program

T = TypeVar("T")
WORKERS, STAGES_PER_WORKER = 64, 2
CHUNKS = [64, 128, 256, 512]
LIMIT = 10.0  # seconds, to make, lower and validate the largest program
COLUMNS = ["make", "lower", "validate", "parse", "simulate"]


def timed(work: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def make(chunks: int) -> Program:
    return make_schedule("interleaved_1f1b", workers=WORKERS, chunks=chunks, stages_per_worker=STAGES_PER_WORKER)


def measure(chunks: int) -> tuple[int, float]:
    """Print one row. Returns the number of computations of the program, and the seconds to compile and validate it."""
    program, making = timed(lambda: make(chunks))
    lowered, lowering = timed(lambda: add_communication(program))
    _, validating = timed(lambda: validate(lowered))
    _, parsing = timed(lambda: parse_program(str(lowered)))
    _, simulating = timed(lambda: simulate(program))
    count = sum(map(len, program.orders))
    seconds = [making, lowering, validating, parsing, simulating]
    print(
        f"{chunks:6} {count:12} {sum(map(len, lowered.orders)):12}" + "".join(f"{second:10.2f}" for second in seconds)
    )
    return count, making + lowering + validating


def main() -> None:
    print("chunks computations instructions" + "".join(f"{column:>10}" for column in COLUMNS))
    for collector in ("on", "off"):
        (gc.enable if collector == "on" else gc.disable)()
        rows = [measure(chunks) for chunks in CHUNKS]
        each = " ".join(f"{seconds / count * 1e6:.0f}" for count, seconds in rows)
        total = rows[-1][1]
        print(f"make, lower, validate with the garbage collector {collector}: {total:.1f} s of {LIMIT:.0f};", end=" ")
        print(f"microseconds per computation {each}")
        if total > LIMIT:
            raise SystemExit("too slow")


if __name__ == "__main__":
    main()
