"""Recordings: what `driver.record()` gives. The steps that ran, with methods that report, draw and save them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from pippy.drivers.base.errors import DriverError
from pippy.drivers.count.driver_memory import DriverMemory
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.report.drawings import perfetto_trace, step_svg
from pippy.drivers.report.findings import findings
from pippy.drivers.report.model_names import NAMELESS, ModelNames
from pippy.drivers.report.page import comparison, page
from pippy.drivers.report.step_data import UNKNOWN_SIZE, BatchSize, StepData
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import brief, count_with_noun

NOTHING_RECORDED = "nothing was recorded; run steps inside `with driver.record() as recording:`, then report or save"


class RecordedStep(StepData):
    """A step as it ran, its data and its drawings. Its times are seconds, from the moment when the first worker began."""

    def __repr__(self) -> str:
        return f"<RecordedStep of {self.makespan * 1e3:.3g} ms: {self.program!r}>"

    def _repr_html_(self) -> str:
        return self.svg()

    def findings(self) -> list[str]:
        """Sentences about the step: the slowest stage, where the time went, and what helps."""
        return findings(self)

    def trace(self) -> str:
        """Trace events, as JSON: https://ui.perfetto.dev and chrome://tracing open them."""
        return perfetto_trace([self])

    def save_trace(self, path: str | Path) -> None:
        """Write the trace events to a file."""
        Path(path).write_text(self.trace(), encoding="utf-8")

    def svg(self) -> str:
        """The timeline as an SVG picture: measured above, predicted below."""
        return step_svg(self)

    def save_svg(self, path: str | Path) -> None:
        """Write the picture to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")


@dataclass
class Recording:
    """The recorded steps, the latest last. At most ``limit`` of them are kept; ``dropped`` counts the others.

    With ``memory``, workers note what they hold, too. ``model`` has the names of the modules in each stage.

    >>> Recording(limit=0)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: limit=0: give how many of the latest steps a recording has at most, 1 or more
    """

    limit: int = 100
    steps: list[RecordedStep] = field(default_factory=list)
    dropped: int = 0
    memory: bool = False
    model: ModelNames = NAMELESS

    def __post_init__(self) -> None:
        check_count("limit", self.limit, "how many of the latest steps a recording has at most", DriverError)

    def __repr__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        latest = f", the latest {self.steps[-1]!r}" if self.steps else ""
        return f"<Recording of {count_with_noun(len(self.steps), 'step')}{dropped}{latest}>"

    def _repr_html_(self) -> str:
        if not self.steps:
            return escape(repr(self))
        report = escape(self._page("A recorded step", None, None))
        return f'<iframe srcdoc="{report}" style="width: 100%; height: 40em; border: 0"></iframe>'

    @property
    def typical(self) -> RecordedStep:
        """The step of median length among those that ran the same program as the last one: a report shows it."""
        if not self.steps:
            raise DriverError(NOTHING_RECORDED)
        alike = [each for each in self.steps if each.program == self.steps[-1].program]
        return sorted(alike, key=lambda each: each.makespan)[(len(alike) - 1) // 2]

    def report(
        self,
        path: str | Path,
        *,
        title: str = "A recorded step",
        step: int | None = None,
        memory: DriverMemory | None = None,
    ) -> None:
        """Write an HTML page about one step. It opens from disk and needs no network.

        ``memory`` is what `driver.memory` gave for this step: it is drawn beside what was measured with
        `driver.record(memory=True)`, or alone.
        ``step`` is the index of the step in ``steps``. If it is left out, the page shows the `typical` one.
        """
        Path(path).write_text(self._page(title, step, memory), encoding="utf-8")

    def compare(
        self,
        other: "Recording",
        path: str | Path,
        *,
        names: tuple[str, str] = ("before", "after"),
        title: str = "Two recordings",
    ) -> None:
        """Write an HTML page with the `typical` steps of this recording and of another side by side.

        ``names`` are what the page calls them, this one first.
        """
        if not isinstance(other, Recording):
            raise DriverError(f"compare() takes another Recording, as `driver.record()` gives it, not {brief(other)}")
        if not (isinstance(names, tuple | list) and len(names) == 2 and all(isinstance(each, str) for each in names)):
            raise DriverError(f"names={brief(names)}: give two strings, for this recording and for the other")
        steps = self.typical, other.typical
        text = comparison(steps, (self.steps, other.steps), (names[0], names[1]), title)
        Path(path).write_text(text, encoding="utf-8")

    def _page(self, title: str, step: int | None, memory: DriverMemory | None) -> str:
        if not self.steps:
            raise DriverError(NOTHING_RECORDED)
        if step is not None and not -len(self.steps) <= step < len(self.steps):
            there = count_with_noun(len(self.steps), "step")
            raise DriverError(f"step={step}: the recording has {there}; give 0 to {len(self.steps) - 1}, or none")
        chosen = self.typical if step is None else self.steps[step]
        if memory is not None and memory.program != chosen.program:
            raise DriverError(
                f"memory= was counted for {memory.program!r}, and this step ran {chosen.program!r}; give what driver.memory() "
                "gives for the arguments of the step"
            )
        return page(chosen, self.steps, self.dropped, title, None if memory is None else memory.workers)

    def save_trace(self, path: str | Path) -> None:
        """Write the trace events of all kept steps to one file."""
        if not self.steps:
            raise DriverError(NOTHING_RECORDED)
        Path(path).write_text(perfetto_trace(self.steps), encoding="utf-8")

    def begin(
        self, program: Program, ranks: Sequence[int], names: Sequence[str], batch: BatchSize = UNKNOWN_SIZE
    ) -> Callable[[Mapping[int, StepResult]], None]:
        """Note that a step is sent now. Returns a function, to be called with the answers by rank when they have come."""
        posted = time.monotonic()

        def note(results: Mapping[int, StepResult]) -> None:
            noted = [results[rank].record for rank in ranks]
            records = tuple(each for each in noted if each is not None)
            self.steps.append(RecordedStep(program, tuple(names), records, posted, time.monotonic(), self.model, batch))
            self.dropped += len(self.steps[: -self.limit])
            del self.steps[: -self.limit]

        return note
