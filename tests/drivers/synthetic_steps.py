"""Makes the record of a step without running it: a program on a simulated clock, with given times for all instructions."""

from collections.abc import Callable

from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.language.instructions import Compute, Instruction, Receive, Send
from pippy.drivers.protocol.steps import WorkerRecord
from pippy.drivers.report.record import RecordedStep

BYTES = 1000  # of every value
Seconds = Callable[[Instruction], float]


def stepped(
    program=None,
    seconds: Seconds = lambda instruction: float(isinstance(instruction, Compute)),
    flight: float = 0.0,
    starting: float = 0.0,
    ending: float = 0.0,
    adding: float | None = None,
    ahead=None,
    clocks=None,
    names=None,
    begin: float = 0.0,
    cpu: float | None = None,
) -> RecordedStep:
    """A recorded step. Values are ``flight`` seconds on their way; worker i's clock is ``ahead[i]`` seconds ahead."""
    program = program or add_communication(make_schedule("1f1b", workers=3, chunks=4))
    ends = [[0.0] * len(order) for order in program.orders]
    now = [begin + starting] * program.workers
    position = [0] * program.workers
    sent: dict[tuple[str, int, int], float] = {}
    while any(at < len(order) for at, order in zip(position, program.orders)):
        before = list(position)
        for worker, order in enumerate(program.orders):
            while position[worker] < len(order):
                instruction = order[position[worker]]
                if isinstance(instruction, Receive):
                    key = instruction.value, instruction.microbatch, worker
                    if key not in sent:
                        break
                    now[worker] = max(now[worker], sent[key] + flight)
                elif isinstance(instruction, Send):
                    sent[instruction.value, instruction.microbatch, instruction.to] = now[worker]
                now[worker] += seconds(instruction)
                ends[worker][position[worker]] = now[worker]
                position[worker] += 1
        assert position != before, "the program is stuck"
    added = [None if adding is None else each + ending for each in now]
    ahead = ahead or [0.0] * program.workers
    noted = []
    for worker, order in enumerate(program.orders):
        sizes = {at: BYTES for at, instruction in enumerate(order) if isinstance(instruction, Send)}
        clock = "here" if clocks is None else clocks[worker]
        ended = now[worker] + ending + (adding or 0.0)
        record = WorkerRecord(
            clock, begin, begin + starting, ends[worker], added[worker], ended, sizes, 1 << 20, "resident", cpu
        )
        noted.append(record.shifted(ahead[worker]))
    finish = max(each.ended - before for each, before in zip(noted, ahead))
    names = names or [f"worker{worker}" for worker in range(program.workers)]
    return RecordedStep(program, tuple(names), tuple(noted), begin - 0.5, finish + 0.5)


def slow_stage(seconds: float, slow=2, stages=4, chunks=4, **options) -> RecordedStep:
    """A step in which one stage takes ``seconds`` for each pass, and all others one."""
    program = add_communication(make_schedule("1f1b", workers=stages, chunks=chunks))

    def cost(instruction):
        return (seconds if instruction.stage == slow else 1.0) if isinstance(instruction, Compute) else 0.0

    return stepped(program, cost, **options)
