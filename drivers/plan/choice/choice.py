"""What was chosen, why, and what else there was: the answer to a problem. Print it to read it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from pippy.drivers.plan.choice.problem import TIE, Candidate, Modes, Problem, byte_text, lightest_of_fastest
from pippy.drivers.plan.language.program import Program

SHOWN = 12  # candidates that are listed
_TEXTS = ("schedule", "computes again", "")  # columns that are aligned to the left


@dataclass(frozen=True)
class Choice:
    """The answer to a problem: the best candidate, and all that keep the limits, the fastest first.

    ``unlimited`` is the fastest if there were no limits, and ``nearest`` the candidate that lacks least if none keeps them.
    ``left_out`` has the schedules that cannot be made or that break a limit, each with the reason. ``measured`` says whether
    the costs come from steps that ran, or are guesses from the operations of the stages. ``elsewhere`` has the fastest
    candidates on other placements of the same stages.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.choice.problem import MemoryLimit
    >>> from pippy.drivers.plan.choice.search import choose
    >>> from pippy.drivers.plan.cost.simulate import Costs
    >>> from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
    >>> program = make_schedule("1f1b", workers=1, chunks=1, stages_per_worker=2)
    >>> sizes = PipeBytes((StageBytes(kept=1024), StageBytes(kept=1024)))
    >>> choice = choose(Problem.of(program, Costs(0.001, 0.001, 0.001), [MemoryLimit((2048,))], sizes=sizes))
    >>> print(str(choice).splitlines()[1])
      worker 0, stages 0 1: 2 KiB of 2 KiB
    >>> choice.checkpoint
    {}
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    unlimited: Candidate | None
    nearest: Candidate | None
    left_out: tuple[tuple[str, str], ...]
    measured: bool = True
    elsewhere: tuple[tuple[str, Candidate], ...] = ()

    @cached_property
    def chosen(self) -> Candidate:
        """The best candidate."""
        return lightest_of_fastest(self.candidates)

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.chosen.name

    @property
    def program(self) -> Program:
        """The chosen program."""
        return self.chosen.program

    @property
    def chunks(self) -> int:
        """How many micro-batches."""
        return self.chosen.chunks

    @property
    def checkpoint(self) -> Modes:
        """The stages that compute forwards again, as `checkpoint=` takes them."""
        return self.chosen.checkpoint

    @property
    def refusal(self) -> str:
        """Why there is no candidate."""
        return "no schedule stays within the limits:" + "".join(f"\n  {name}: {why}" for name, why in self.left_out)

    @property
    def why(self) -> str:
        """What was chosen and why, in a sentence."""
        predicted = "predicted" if self.measured else "guessed"
        step = f"{_named(self.chosen)}: its step is {predicted} to take {_milliseconds(self.chosen.seconds)}"
        return step + self._cost_of_limits() + self._compared()

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        yield self.why
        yield from self._reason()
        yield from map(self._worker, range(self.program.workers))
        yield from self._table()
        for shape, other in self.elsewhere:
            yield (
                f"  with placement={shape!r}, {other.name} would take {_milliseconds(other.seconds)}: that takes another "
                "driver, because stages stay where they are"
            )
        yield from (f"  left out: {name}: {why}" for name, why in self.left_out)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _cost_of_limits(self) -> str:
        """What the limits cost."""
        if not self.problem.limits or self.unlimited is None:
            return ""
        limits, s = ("limits", "") if len(self.problem.limits) > 1 else ("limit", "s")
        slower = self.chosen.seconds / self.unlimited.seconds - 1 if self.unlimited.seconds else 0.0
        if slower < 0.005:
            return f", and without the {limits} none would take less"
        held = "" if self.unlimited.peak_bytes is None else f" and hold {byte_text(max(self.unlimited.peak_bytes))}"
        return (
            f"; without the {limits} {_named(self.unlimited)} would take {_milliseconds(self.unlimited.seconds)}{held}, so the "
            f"{limits} cost{s} {slower:.0%}"
        )

    def _compared(self) -> str:
        """How the chosen candidate compares with the others that keep the limits."""
        fastest, *others = self.candidates
        if not others:
            return "; nothing else fits"
        if self.chosen is not fastest:
            return f"; {self._short(fastest)} would take hardly less, and its workers would not hold less"
        beaten = [each for each in others if each.seconds > fastest.seconds * (1 + TIE)]
        alike = [self._short(each) for each in others if each not in beaten]
        text = ""
        if beaten:
            text += f"; {self._short(beaten[0])} would take {beaten[0].seconds / fastest.seconds - 1:.0%} longer"
        return text + (f"; {', '.join(alike)} would take about as long, and hold no less" if alike else "")

    def _reason(self) -> Iterator[str]:
        """Why its step is short: how long a worker computes and waits in it, and would with what is next to it and slower."""
        chosen, slower = self.chosen, [each for each in self.candidates if each.seconds > self.chosen.seconds]
        if not chosen.waits:
            return
        alike = [each for each in slower if each.name == chosen.name]
        fewer = max((each for each in alike if each.chunks < chosen.chunks), key=attrgetter("chunks"), default=None)
        more = min((each for each in alike if each.chunks > chosen.chunks), key=attrgetter("chunks"), default=None)
        others = (each for each in slower if each.chunks == chosen.chunks and each.name != chosen.name)
        other = next((each for each in others if each.seconds > chosen.seconds * (1 + TIE)), None)
        said = [
            f"  why: on average a worker computes {_milliseconds(chosen.computes)} and waits {_milliseconds(chosen.waits)}"
        ]
        for each, because in ((fewer, ""), (more, ", because each computation takes time to begin,")):
            said += [f"in {_micro_batches(each)} it would {_computes_and_waits(each, because)}"] if each else []
        said += [f"under {other.name} it would {_computes_and_waits(other)}"] if other else []
        yield "; ".join(said)

    def _worker(self, worker: int) -> str:
        """What a worker does and holds."""
        stages, chosen = self.program.placement.stages_of(worker), self.chosen
        parts = [limit.text(limit.held(chosen)[worker], limit.most[worker]) for limit in self.problem.limits]
        if not parts:
            live = chosen.peak_live[worker]
            parts = [f"{live} stage-micro-batch{'es' * (live != 1)}"]
            parts += [] if chosen.peak_bytes is None else [byte_text(chosen.peak_bytes[worker])]
        again = _again({stage: mode for stage, mode in self.checkpoint.items() if stage in stages})
        parts += [f"computes again: {again}"] if again else []
        return f"  worker {worker}, stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}: {', '.join(parts)}"

    def _table(self) -> Iterator[str]:
        """A line for each of the fastest candidates, and for the chosen one."""
        shown = [each for at, each in enumerate(self.candidates) if at < SHOWN or each is self.chosen]
        rows = [("schedule", "micro-batches", "time", "live", "fullest worker", "computes again", "")]
        rows += [
            (
                each.name,
                str(each.chunks),
                _milliseconds(each.seconds),
                " ".join(map(str, each.peak_live)),
                "-" if each.peak_bytes is None else byte_text(max(each.peak_bytes)),
                _again(each.checkpoint) or "-",
                "<- chosen" if each is self.chosen else "",
            )
            for each in shown
        ]
        columns = [[head, *cells] for head, *cells in zip(*rows) if set(cells) != {"-"}]
        aligned = [
            [cell.ljust(width) if head in _TEXTS else cell.rjust(width) for cell in (head, *cells)]
            for head, *cells in columns
            for width in [max(map(len, (head, *cells)))]
        ]
        yield from (("  " + "  ".join(row)).rstrip() for row in zip(*aligned))
        if len(self.candidates) > len(shown):
            yield f"  and {len(self.candidates) - len(shown)} slower ones"

    def _short(self, candidate: Candidate) -> str:
        """The name of a candidate, and the number of its micro-batches if there were several to choose from."""
        return candidate.name if len(self.problem.chunks) == 1 else _named(candidate)


def _named(candidate: Candidate) -> str:
    return f"{candidate.name} with {_micro_batches(candidate)}"


def _micro_batches(candidate: Candidate) -> str:
    return f"{candidate.chunks} micro-batch{'es' * (candidate.chunks != 1)}"


def _computes_and_waits(candidate: Candidate, because: str = "") -> str:
    return f"compute {_milliseconds(candidate.computes)}{because} and wait {_milliseconds(candidate.waits)}"


def _again(modes: Modes) -> str:
    return ", ".join(f"{stage} {mode}" for stage, mode in modes.items())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
