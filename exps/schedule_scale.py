"""How long does it take to make and validate a large program, and does the time grow with its length?

Command: ``make bench``, or ``python exps/schedule_scale.py``

Finding: to be measured
"""

import time
from collections.abc import Callable
from typing import TypeVar

from pippy.drivers.schedules import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.schedules.program import Program

T = TypeVar("T")
WORKERS, STAGES_PER_WORKER = 64, 2
CHUNKS = [64, 128, 256, 512]
LIMIT = 10.0  # seconds, to make, lower and validate the largest program


def timed(work: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def measure(chunks: int) -> tuple[int, float]:
    """Print one row; returns how many computations the program has, and the seconds to compile and validate it."""
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


def make(chunks: int) -> Program:
    return make_schedule("interleaved_1f1b", workers=WORKERS, chunks=chunks, stages_per_worker=STAGES_PER_WORKER)


def main() -> None:
    columns = ["make", "lower", "validate", "parse", "simulate"]
    print("chunks computations instructions" + "".join(f"{column:>10}" for column in columns))
    rows = [measure(chunks) for chunks in CHUNKS]
    per_computation = " ".join(f"{seconds / count * 1e6:.0f}" for count, seconds in rows)
    print(f"make, lower, validate: {rows[-1][1]:.1f} s of {LIMIT:.0f}; microseconds per computation: {per_computation}")
    if rows[-1][1] > LIMIT:
        raise SystemExit("too slow")


if __name__ == "__main__":
    main()
