"""What `driver.memory` gives: what each worker holds in a step, as a table and over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pippy.drivers.plan.cost.held_bytes import Held, HeldBytes, PipeBytes, held_bytes, lowered_program
from pippy.drivers.plan.language.program import Program
from pippy.ir.base.readable import bytes_text, html_table, text_table


@dataclass(frozen=True)
class DriverMemory:
    """What each worker holds in a step, in bytes. ``str()`` of it is a table of what it holds at its peak, by kind.

    ``sizes`` are the bytes of each stage and value that ``program`` was counted with. ``with_state`` says whether the state of
    an optimizer is known. ``count_check`` counts what the check of the first step takes on workers, of a step with these peaks,
    and ``in_script`` are the bytes that the plain model takes for it in the script's process.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> stage = StageBytes(parameters=2048, gradients=2048, kept=512, forward=512)
    >>> print(DriverMemory(make_schedule("1f1b", workers=2, chunks=4), PipeBytes((stage, stage)), with_state=False))
    worker   parameters   gradients   optimizer    kept   inputs   values   working      peak   at
    ────────────────────────────────────────────────────────────────────────────────────────────────
    0           2.0 KiB     2.0 KiB           ?   512 B      0 B      0 B     512 B   5.0 KiB   F0.2
    1           2.0 KiB     2.0 KiB           ?     0 B      0 B      0 B     512 B   4.5 KiB   F1.1
    no optimizer yet: its state comes on top
    """

    program: Program
    sizes: PipeBytes
    with_state: bool = True
    count_check: Callable[[Sequence[int]], tuple[int, ...]] | None = field(default=None, repr=False, compare=False)
    in_script: int = 0

    @cached_property
    def check(self) -> tuple[int, ...]:
        """The most bytes that each worker holds in the check before the first step; empty if there is no check."""
        return () if self.count_check is None else self.count_check(self.peaks)

    @cached_property
    def workers(self) -> tuple[HeldBytes, ...]:
        """What each worker of the program holds: at its peak, by kind, and over time."""
        return held_bytes(self.program, self.sizes)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each worker holds at a time."""
        return tuple(each.peak.total for each in self.workers)

    @property
    def series(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """For each worker: each instruction, the most bytes held while it runs, and the bytes held after it."""
        orders = lowered_program(self.program).orders
        return tuple(
            tuple(zip((*map(str, order), "end"), held.most, held.after)) for order, held in zip(orders, self.workers)
        )

    def _table(self) -> list[list[str]]:
        head = ["worker", *Held._fields, "peak", "at"]
        rows = []
        for worker, (held, series) in enumerate(zip(self.workers, self.series)):
            cells = [bytes_text(count) for count in held.peak]
            if not self.with_state:
                cells[Held._fields.index("optimizer")] = "?"
            rows.append([str(worker), *cells, bytes_text(held.peak.total), series[held.at][0]])
        return [head, *rows]

    @property
    def _note(self) -> str:
        check = f"the check of the first step: {bytes_text(self.in_script)} more in the script's process"
        return "\n".join(
            ["no optimizer yet: its state comes on top"] * (not self.with_state) + [check] * bool(self.in_script)
        )

    def __str__(self) -> str:
        head, *rows = self._table()
        return "\n".join([text_table(head, rows, words=(0, len(head) - 1)), *filter(None, [self._note])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._table()) + self._note
