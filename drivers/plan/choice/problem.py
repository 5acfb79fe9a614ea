"""The problem of a choice: which programs there are to choose from, what they cost, and which limits they have to keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippy.drivers.plan.choice.candidate import Candidate, MicroBatch
from pippy.drivers.plan.choice.limits import Limit, live_counts
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.passes.recompute import Checkpoint, modes_of


@dataclass(frozen=True)
class Problem:
    """What is to be chosen: any schedule on one placement, the number of micro-batches, the stages that compute again.

    ``program`` is any program with the placement, and the edges between the stages. ``chunks`` are the numbers of micro-batches
    to choose from, and ``micro_batch`` says what one costs and holds when the mini-batch is cut into so many. ``checkpoint``
    says which forwards are computed again; None leaves that to the choice. ``limits`` have to be kept by all workers.

    >>> from pippy.drivers.plan.choice.limits import LiveLimit
    >>> problem = Problem.of(make_schedule("1f1b", workers=2, chunks=4), Costs(), [LiveLimit((1, 1))])
    >>> problem.refusal(Candidate(problem.program, problem.micro_batch(4)))
    'it holds 2 stage-micro-batches on worker 0, and the limit is 1'
    """

    program: Program
    micro_batch: Callable[[int], MicroBatch]
    chunks: tuple[int, ...]
    limits: tuple[Limit, ...] = ()
    checkpoint: Checkpoint | None = None

    @classmethod
    def of(
        cls,
        program: Program,
        costs: Costs,
        limits: Sequence[Limit] = (),
        checkpoint: Checkpoint | None = "never",
        sizes: PipeBytes | None = None,
    ) -> "Problem":
        """The choice of another schedule for a program: as many micro-batches, the same stages on the same workers."""
        return cls(program, lambda _: MicroBatch(costs, sizes), (program.chunks,), tuple(limits), checkpoint)

    def made(self, name: str, chunks: int) -> Program:
        """A schedule on the placement, for the edges if there are any, which computes nothing again."""
        given, options = self.program, dict[str, Any]()
        if name == "list":
            micro_batch = self.micro_batch(chunks)
            modes = [] if self.checkpoint is None else modes_of(self.checkpoint, given.stages)
            memory = live_counts(self.limits, given.placement, chunks, micro_batch.sizes, modes)
            options = {"costs": micro_batch.costs, "memory": memory, "edges": given.edges, "added": given.added}
        made = make_schedule(name, workers=given.placement.workers, chunks=chunks, placement=given.placement, **options)
        if given.edges is None:
            return made
        return made.for_graph(given.edges, given.backward, given.replicated, added=given.added)

    def refusal(self, candidate: Candidate) -> str:
        """Says which limit a candidate breaks. It is empty if the candidate keeps all."""
        return next((why for limit in self.limits if (why := limit.refusal(candidate))), "")

    def lack(self, candidate: Candidate) -> tuple[float, ...]:
        """By how much each limit is broken: 1 where it is kept. The first limits come first."""
        return tuple(
            max(1.0, *(held / most for held, most in zip(limit.held(candidate), limit.most))) for limit in self.limits
        )

    def on(self, placement: Placement) -> "Problem":
        """The same problem with the stages elsewhere. Limits stay as they are."""
        moved = replace(
            self.program, placement=placement, orders=((),) * placement.workers, memory=None, checkpoints=(), hosts=None
        )
        return replace(self, program=moved)
