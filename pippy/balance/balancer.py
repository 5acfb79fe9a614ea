"""The pass that balances: from a traced graph without marks to one with marks, and a report.

    figures  the bytes of each operation      ─┐
    profile  its time, if that is measured    ─┼▶ a row of units that cannot be cut ──▶ the best cuts ──▶ marks, report
    policy   what stages have alike           ─┘                                         ▲       │
                                                              with memory_limit: again ──┴── peaks of the stages, counted

A `Balancer` has the arguments; it is called with the traced graph.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import fx

from pippy.balance.partition import SLACK, runs
from pippy.balance.policies import Split, named_cuts, read_split, without_numbers
from pippy.balance.profile import Profile, profile
from pippy.balance.report import Balance
from pippy.balance.stopwatch import Clock
from pippy.balance.weighing import Figures, Weighing, figures_of
from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.choice.problem import byte_count
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.language.program import Program
from pippy.ir.base import source
from pippy.ir.base.errors import BalanceError, InputError
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import brief, count_with_noun
from pippy.ir.call.signature import bind
from pippy.ir.compile import compile_traced
from pippy.ir.cut.constraints import Constraint, constraints
from pippy.ir.cut.uses import crossing, mark, marks
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.record.compiled import Traced
from pippy.ir.request import Request

# Finds cuts by the memory of their stages, counted on fake tensors as drivers count.
#
# What the operations of a stage keep is measured one by one, so their sum is about what the stage holds. What it holds is
# counted for one set of cuts at a time. So these steps are repeated until the stages are within the limit:
#
#     1 search the best cuts whose stages are within it, with as many bytes besides as each stage was counted to hold more
#     2 count the peaks of their stages
#
# Each time a stage is seen to take more than before. If no cuts are left, the lightest cuts are searched in the same way. They
# do not depend on the limit. So if their peak breaks it, the error can name that peak as a limit under which there are cuts.


HeldBy = Callable[[Sequence[int]], Sequence[int]]  # what the stages of cuts hold


def cuts_within(weighing: Weighing, limit: int, held: HeldBy) -> list[int]:
    """The best cuts under a limit. Raises BalanceError if there are none."""
    besides = [0] * weighing.stages
    while (cuts := weighing.search(limit, besides)) is not None:
        if max(held(cuts)) <= limit:
            return cuts
        besides = _seen(weighing, cuts, held, besides)
    lightest = lightest_counted(weighing, held)
    if lightest is None:
        raise weighing.refusal(limit)
    least = max(held(lightest))
    if least > limit:
        raise weighing.refusal(limit, least)
    return lightest


def lightest_counted(weighing: Weighing, held: HeldBy, slack: float = 0.0) -> list[int] | None:
    """The lightest cuts that are found, whatever the limit; None if there are no cuts."""
    tried: list[list[int]] = []
    besides = [0] * weighing.stages
    while (cuts := weighing.lightest(besides, slack)) is not None and cuts not in tried:
        tried.append(cuts)
        besides = _seen(weighing, cuts, held, besides)
    return min(tried, key=lambda each: max(held(each)), default=None)


def _seen(weighing: Weighing, cuts: Sequence[int], held: HeldBy, before: Sequence[int]) -> list[int]:
    return [max(most, peak - kept) for most, peak, kept in zip(before, held(cuts), weighing.searched(cuts))]


class CountedCuts:
    """Counts the stages of a traced graph without marks, for one micro-batch: the example of the request.

    ``uncounted`` is the reason if the model could not run on fake tensors.
    """

    def __init__(self, weighing: Weighing, request: Request, in_flight: int | None) -> None:
        self.weighing, self.traced, self.request, self.in_flight = weighing, weighing.traced, request, in_flight
        self.uncounted = ""
        self._peaks: dict[tuple[int, ...], list[int] | None] = {}

    def held(self, cuts: Sequence[int]) -> list[int]:
        """What each stage of these cuts holds: its peak, or if that is not known, nearly what it keeps."""
        return self.peaks(cuts) or self.weighing.memories(cuts)

    def peaks(self, cuts: Sequence[int]) -> list[int] | None:
        """The most bytes that each stage holds. None if it is not known: without arguments or a loss, and if the model cannot
        run on fake tensors."""
        if (key := tuple(cuts)) not in self._peaks:
            counted = None if self.weighing.profile is None or self.uncounted else self._counted(cuts)
            parameters = self.weighing.parameter_bytes(cuts)
            self._peaks[key] = counted and [most + own for most, own in zip(counted, parameters)]
        return self._peaks[key]

    def _counted(self, cuts: Sequence[int]) -> list[int] | None:
        """The peaks beside parameters, gradients and the state of an optimizer."""
        pipe = self._pipe([self.weighing.figures.nodes[cut] for cut in cuts])
        compiled = compiled_of(pipe)
        if compiled.loss is None or not torch.is_grad_enabled():
            return None
        devices = [each.device for each in self.traced.model.parameters() if not each.is_meta]
        try:
            division = divide_call(compiled, 1, *self.request.arguments)
            sizes = count_pipe(pipe, division, devices[0] if devices else torch.device("cpu"), halves=False)
        except DriverError as error:
            self.uncounted = str(error.__cause__).partition("\n")[0]
            return None
        return [*peak_bytes(lower(pipe, self._program(compiled.num_stages)).program, _of_micro_batches(sizes))]

    def _pipe(self, before: Sequence[fx.Node]) -> Pipe:
        balanced = self.traced.balanced
        mark(self.traced, before)
        try:
            return Pipe(self.traced, compile_traced(self.traced, self.request))
        finally:
            self.traced.balanced = balanced
            for node in marks(self.traced):
                self.traced.graph.erase_node(node)

    def _program(self, stages: int) -> Program:
        if self.in_flight is not None:
            return make_schedule("fill_drain", workers=stages, chunks=self.in_flight)
        return make_schedule("1f1b", workers=stages, chunks=stages + 1)


def _of_micro_batches(sizes: PipeBytes) -> PipeBytes:
    """What is held for micro-batches: parameters, their gradients, which are there from the first step on, and the state of an
    optimizer are left out. So are the inputs of micro-batches whose turn has not come.
    """
    stages = (
        replace(each, parameters=0, gradients=0, early_gradients=0, first_backward=each.backward)
        for each in sizes.stages
    )
    return replace(sizes, stages=tuple(stages), inputs_stay=False)


PARAM_SCALE = 4.0  # a parameter, its gradient, and the two moments of Adam


class Balancer:
    """Cuts a traced graph by arguments of `pippy.pipeline`, which explains them. Arguments that are not about balancing, as
    ``loss_fn`` and ``example_args``, are a ``request``, or given by name.

    `pipeline` makes one by itself. With `Pipe.from_sequential` it is given as ``cut``:

    >>> from torch import nn
    >>> from pippy import Pipe
    >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> [len(list(stage.children())) for _, stage in Pipe.from_sequential(net, cut=Balancer([3, 2])).stages()]
    [3, 2]
    """

    def __init__(
        self,
        split: Split = "auto",
        num_stages: int | str | None = None,
        *,
        request: Request | None = None,
        memory_limit: int | str | None = None,
        param_scale: float | None = None,
        in_flight: int | None = None,
        progress: bool | None = None,
        clock: Clock = time.perf_counter_ns,
        **asked: Any,
    ) -> None:
        self.request = Request(**asked) if request is None else request
        _check_memory(param_scale, in_flight)
        self.policy = self.asked = read_split(split, num_stages, self.request.has_example)
        self.memory_limit, self.in_flight = _bytes_of(memory_limit), in_flight
        self.param_scale = PARAM_SCALE if param_scale is None else param_scale
        self.progress, self.clock = progress, clock

    def __call__(self, traced: Traced) -> Balance:
        """Mark ``traced``, and return the report about the stages."""
        _check_can_be_cut(traced, self.asked.stages)
        is_meta = any(tensor.is_meta for tensor in traced.model.parameters())
        self.policy = without_numbers(self.asked) if is_meta else self.asked
        spec = self.request.multi_use_param_spec
        figures = figures_of(traced, spec, self.param_scale)
        profile = self._profile(traced) if self.request.has_example else None
        if profile is not None:
            figures.crossing = crossing(traced, profile.sizes, spec)
            figures.constraints = [*constraints(traced, spec, profile.changed), *_untravelling(figures, profile)]
        weighing = Weighing(traced, figures, profile, self.policy, self.in_flight)
        counted = CountedCuts(weighing, self.request, self.in_flight)
        cuts = self._cuts(weighing, counted)
        by_memory = self.memory_limit is not None or self.policy.measure == "memory"
        peaks = counted.peaks(cuts) if by_memory else None
        mark(traced, [figures.nodes[cut] for cut in cuts])
        if uneven := weighing.unevenness(cuts):
            source.warn(uneven)
        elif self.policy.assumes and cuts:
            source.warn(_what_parameters_cost(self.policy.stages))
        return self._report(weighing, cuts, peaks, counted.uncounted)

    def _cuts(self, weighing: Weighing, counted: CountedCuts) -> list[int]:
        limit = self.memory_limit
        if self.policy.names:
            cuts = named_cuts(weighing.traced, self.policy.names)
            if limit is not None:
                weighing.check_limit(limit, counted.held(cuts))
            return cuts
        if limit is not None:
            return cuts_within(weighing, limit, counted.held)
        lightest = lightest_counted(weighing, counted.held, SLACK) if self.policy.measure == "memory" else None
        return lightest or weighing.best_cuts()

    def _report(self, weighing: Weighing, cuts: Sequence[int], peaks: Sequence[int] | None, uncounted: str) -> Balance:
        by_peak = peaks if self.policy.measure == "memory" else None
        bound, alone = weighing.bound(cuts) if by_peak is None else (ceil(sum(by_peak) / len(by_peak)), None)
        stages = tuple(
            weighing.stage(number, run, None if peaks is None else peaks[number])
            for number, run in enumerate(runs(cuts, weighing.count))
        )
        optimal = self.policy.kind not in ("names", "counts") and by_peak is None
        note, within = self._memory_note(weighing.profile, uncounted), max(SLACK, weighing.uncertain)
        return Balance(self.policy.text, self.policy.measure, stages, bound, alone, optimal, note, within)

    def _profile(self, traced: Traced) -> Profile:
        request = self.request
        name = None if request.loss_fn is None else traced.name_for_target()
        try:
            values = bind(replace(traced, target_name=name), *request.arguments)
        except InputError as error:
            raise InputError(f"example_args are not arguments of this Pipe: {error}") from None
        return profile(
            traced,
            values,
            request.loss_fn,
            None if name is None else values.get(name),
            timed=self.policy.kind == "time",
            trains=request.output_loss_value_spec is not False and torch.is_grad_enabled(),
            progress=self.progress,
            clock=self.clock,
        )

    def _memory_note(self, profile: Profile | None, uncounted: str) -> str:
        parameters = f"memory: {self.param_scale:g} × the bytes of parameters that are trained"
        if profile is None:
            return f"{parameters}; activations are not known without example_args"
        flight = (
            "as many micro-batches as 1F1B keeps in flight" if self.in_flight is None else f"{self.in_flight} at a time"
        )
        why = f"; peaks are not counted, as the model cannot run with fake tensors: {uncounted}" if uncounted else ""
        return f"{parameters}, and what is kept for backwards, {flight}{why}"


def _what_parameters_cost(stages: int) -> str:
    return (
        f"num_stages={stages} without example arguments gives the stages equal numbers of parameters, which is not equal time: "
        "the slowest of 4 stages of ResNet-50 takes 2.76 times the mean so, and 1.03 times the mean with measured times; give "
        "example_args, the arguments of one micro-batch, or say split='parameters'"
    )


def _bytes_of(limit: object) -> int | None:
    try:
        return None if limit is None else byte_count(limit, "memory_limit=")
    except ArgumentError as error:
        raise BalanceError(str(error)) from None


def _check_memory(scale: object, in_flight: object) -> None:
    if scale is not None and (not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1 <= scale < 1e6):
        raise BalanceError(
            f"param_scale is {brief(scale)}; give how often the bytes of a parameter count: 2 for a parameter and its "
            "gradient, 4 with the two moments of Adam"
        )
    what = "the number of micro-batches whose activations a stage holds at a time"
    check_count("in_flight", in_flight, what, BalanceError, none="for as many as under 1F1B")


def _check_can_be_cut(traced: Traced, stages: int) -> None:
    if stages > 1 and traced.untraced:
        cannot = f"{type(traced.model).__name__} cannot be cut into {stages} stages, for one must call it as a whole"
        raise BalanceError(f"{cannot}. {traced.untraced}")
    nodes = marks(traced)
    if nodes:
        shown = "\n".join(source.excerpt_of(node) for node in nodes[:5])
        raise BalanceError(
            f"the model is to be balanced, but has {count_with_noun(len(nodes), 'mark')} that cut it already:\n{shown}\n"
            "What to do: leave out split and num_stages to cut at the marks; or take the marks away (pipe_split() out of the "
            "code, annotations with clear_split_points(model))"
        )


def _untravelling(figures: Figures, profile: Profile) -> list[Constraint]:
    """Constraints for values that cannot be sent: the operation that makes one and all that use it are in one stage."""
    number = {node: index for index, node in enumerate(figures.nodes)}
    together = []
    for node in profile.untravelling:
        last = max((number[user] for user in node.users if user in number), default=number[node])
        together.append(Constraint(number[node], last, f"{node.name} cannot travel to another stage"))
    return [each for each in together if each.first < each.last]
