"""What was chosen so that a step fits, what it costs, and what else there was. Print it to read it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pippy.drivers.plan.choice.byte_sizes import byte_text
from pippy.drivers.plan.choice.choose import Chosen, lightest_of_fastest
from pippy.drivers.plan.choice.search import Found, Way

SHOWN = 12  # ways that are listed


@dataclass(frozen=True)
class Fitted(Chosen[Way]):
    """The way to run a step that was chosen: schedule, micro-batches, and the stages that compute forwards again.

    ``candidates`` are all ways that fit, the fastest first. ``limits`` are the bytes that each worker may hold. ``measured``
    says whether the times come from steps that ran, or are guesses from the operations of the stages.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.choice.search import MicroBatch, Problem, search
    >>> from pippy.drivers.plan.cost.costs import Costs
    >>> from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
    >>> micro_batch = MicroBatch(Costs(0.001, 0.001, 0.001), PipeBytes((StageBytes(kept=1024), StageBytes(kept=1024))))
    >>> problem = Problem(make_schedule("1f1b", workers=1, chunks=1, stages_per_worker=2), (2048,), lambda n: micro_batch, (1,))
    >>> fitted = Fitted.of(search(problem), problem.limits)
    >>> print(str(fitted).splitlines()[1])
      worker 0, stages 0 1: 2 KiB of 2 KiB
    >>> fitted.checkpoint
    {}
    """

    unlimited: Way
    limits: tuple[int, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    measured: bool = True

    @classmethod
    def of(cls, found: Found, limits: Sequence[int], measured: bool = True) -> "Fitted":
        """What to take of what a search found."""
        assert found.ways and found.unlimited is not None
        return cls(
            lightest_of_fastest(found.ways), found.ways, found.unlimited, tuple(limits), found.left_out, measured
        )

    @property
    def chunks(self) -> int:
        """How many micro-batches."""
        return self.chosen.chunks

    @property
    def checkpoint(self) -> dict[int, str]:
        """The stages that compute forwards again, as `checkpoint=` takes them."""
        return {stage: mode for stage, mode in sorted(self.chosen.modes.items()) if mode != "never"}

    @property
    def why(self) -> str:
        """What was chosen and what it costs, in a sentence."""
        predicted = "predicted" if self.measured else "guessed"
        text = f"{_named(self.chosen)}: its step is {predicted} to take {_milliseconds(self.chosen.seconds)}"
        slower = self.chosen.seconds / self.unlimited.seconds - 1 if self.unlimited.seconds else 0.0
        if slower < 0.005:
            return text + ", and without the limit none would take less"
        return (
            f"{text}; without the limit {_named(self.unlimited)} would take {_milliseconds(self.unlimited.seconds)} and hold "
            f"{byte_text(max(self.unlimited.peak_bytes or (0,)))}, so the limit costs {slower:.0%}"
        )

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        yield self.why
        placement = self.program.placement
        for worker, (peak, limit) in enumerate(zip(self.chosen.peak_bytes or (), self.limits)):
            stages = placement.stages_of(worker)
            again = _again({stage: mode for stage, mode in self.checkpoint.items() if stage in stages})
            noun = "stages" if len(stages) > 1 else "stage"
            yield (
                f"  worker {worker}, {noun} {' '.join(map(str, stages))}: {byte_text(peak)} of {byte_text(limit)}"
                f"{', computes again: ' + again if again else ''}"
            )
        yield from table(self.candidates, self.chosen)
        yield from (f"  left out: {name}: {why}" for name, why in self.left_out)


def table(ways: Sequence[Way], chosen: Way | None = None) -> Iterator[str]:
    """A line for each of the fastest ways, and for the chosen one."""
    shown = [way for at, way in enumerate(ways) if at < SHOWN or way is chosen]
    rows = [["schedule", "micro-batches", "time", "fullest worker", "computes again", ""]]
    for way in shown:
        rows.append([
            way.name,
            str(way.chunks),
            _milliseconds(way.seconds),
            byte_text(max(way.peak_bytes or (0,))),
            _again({stage: mode for stage, mode in sorted(way.modes.items()) if mode != "never"}) or "-",
            "<- chosen" if way is chosen else "",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            cell.rjust(width) if at in (1, 2, 3) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
    if len(ways) > len(shown):
        yield f"  and {len(ways) - len(shown)} slower ones"


def _named(way: Way) -> str:
    return f"{way.name} with {way.chunks} micro-batch{'es' * (way.chunks != 1)}"


def _again(modes: Mapping[int, str]) -> str:
    return ", ".join(f"{stage} {mode}" for stage, mode in modes.items())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
