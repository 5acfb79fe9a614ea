"""A model's operations under one policy: the cost of each, those that must be in one stage, and the best cuts."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from pippy.balance.partition import Row, RunWeight, best_cuts, lightest_cuts, lower_bound, most_stages, runs
from pippy.balance.policies import Policy, matching_layers
from pippy.balance.profile import Profile, callee_of
from pippy.balance.report import StageBalance
from pippy.ir.base.errors import BalanceError
from pippy.ir.base.names import stage_name
from pippy.ir.base.node_notes import IS_LAYER
from pippy.ir.base.readable import brief, bytes_text
from pippy.ir.base.trees import nbytes
from pippy.ir.cut.constraints import Constraint, constraints
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.cut.uses import crossing, inside_lists, operations, uses_of_tensors
from pippy.ir.record.compiled import Traced
from pippy.ir.run.checkpointed_parts import is_begin, is_end

# Counts the layers, parameters and bytes of each operation of a traced graph. Nothing runs.


@dataclass
class Figures:
    """The operations in order, and their layers, parameters and bytes.

    ``layers`` is 1 for an operation that uses parameters, or for each if none does. ``parameters`` counts each parameter
    where it is first used, ``computed`` where an operation computes with it, as a lookup does not. ``held`` has the bytes of
    tensors that every stage with a use has, ``bytes`` those of tensors that only the first such stage has; a trained
    parameter counts ``param_scale`` times. ``crossing`` are the bytes that cross a cut before the operation, and ``inside``
    is the number of modules of lists, one inside the other, that this cut would divide.
    """

    nodes: list[fx.Node]
    layers: list[int]
    parameters: list[int]
    computed: list[int]
    bytes: list[int]
    held: list[dict[Hashable, int]]
    crossing: list[int]
    inside: list[int]
    constraints: list[Constraint]


def figures_of(traced: Traced, spec: MultiUseParamSpec = None, param_scale: float = 1.0) -> Figures:
    """The figures of a traced graph.

    >>> from torch import nn
    >>> from pippy.ir.trace.trace import trace
    >>> figures = figures_of(trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))))
    >>> figures.layers, figures.parameters, figures.bytes
    ([1, 0, 1], [10, 0, 6], [40, 0, 24])
    """
    nodes = operations(traced)
    count = len(nodes)
    if not count:
        raise BalanceError(f"{type(traced.model).__name__} computes nothing: its forward has no operation to balance")
    figures = Figures(
        nodes,
        [int(IS_LAYER.of(node)) for node in nodes],
        [0] * count,
        [0] * count,
        [0] * count,
        [{} for _ in nodes],
        crossing(traced, spec=spec),
        inside_lists(traced),
        constraints(traced, spec),
    )
    for key, uses in uses_of_tensors(traced).items():
        if not uses.all:
            continue
        if is_lazy(uses.tensor):
            raise BalanceError(
                f"{uses.name!r} has no size yet: a lazy module gets its parameters in its first forward. Call the model once, "
                "then balance it"
            )
        trains = isinstance(uses.tensor, nn.Parameter) and uses.tensor.requires_grad
        size = round(nbytes(uses.tensor) * (param_scale if trains else 1))
        copied = bool(uses.by_leaf) and len(uses.all) > 1
        for index in uses.all if copied else ():
            figures.held[index][key] = size
        if isinstance(uses.tensor, nn.Parameter):
            for index in uses.all:
                figures.layers[index] = 1
                figures.computed[index] += 0 if _looks_up(callee_of(nodes[index], traced)) else uses.tensor.numel()
        first = uses.all[0]
        figures.parameters[first] += uses.tensor.numel() if isinstance(uses.tensor, nn.Parameter) else 0
        figures.bytes[first] += 0 if copied else size
    if not any(figures.layers):
        figures.layers = [int(not is_begin(node) and not is_end(node)) for node in nodes]
    return figures


def _looks_up(called: Any) -> bool:
    return isinstance(called, (nn.Embedding, nn.EmbeddingBag)) or called in (F.embedding, F.embedding_bag)


_UNEVEN = 0.75  # of the work in one stage
_WORTH_BALANCING = 10_000  # parameters: however a smaller model is cut, its stages take no time
_TRANSFORMERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_MOST_UNCERTAIN = 0.25  # stages may be so much heavier for a lower price, where times cannot tell
_NAMES_SHOWN = 40
_REASONS_SHOWN = 6


class Weighing:
    """The operations of ``traced`` with their weights. A cut is the number of the operation behind it.

    ``costs`` are what the policy makes alike, ``memory`` about the bytes of a stage; both have a RunWeight for each stage.
    """

    def __init__(
        self, traced: Traced, figures: Figures, profile: Profile | None, policy: Policy, in_flight: int | None
    ) -> None:
        self.traced, self.figures, self.profile, self.policy = traced, figures, profile, policy
        self.count, self.stages = len(figures.nodes), policy.stages
        self.layers, self.constraints = figures.layers, list(figures.constraints)
        if policy.pattern is not None:
            matches = matching_layers(traced, policy.pattern)
            begins = {match.first for match in matches}
            self.constraints += [match for match in matches if match.first < match.last]
            self.layers = [int(index in begins) for index in range(self.count)]
        # Under 1F1B the stage before the last holds one micro-batch more than the last, and so on.
        self.waiting = waiting = [
            self.stages - stage if in_flight is None else in_flight for stage in range(self.stages)
        ]
        self.parameters = RunWeight(figures.bytes, figures.held)
        loads = {each: self._memory_load(each) for each in set(waiting)}
        self.memory = [loads[each] for each in waiting]
        self.costs = self._cost_loads()
        timed = profile if policy.measure == "time" else None
        self.uncertain = 0.0 if timed is None else min(timed.uncertain, _MOST_UNCERTAIN)
        self.edges = self._allowed_edges()

    def _cost_loads(self) -> list[RunWeight]:
        measure = self.policy.measure
        if measure == "memory":
            return self.memory
        if self.policy.kind == "parameters" and not any(self.figures.parameters):
            raise BalanceError("the model has no parameters to balance; split='uniform' counts its operations instead")
        if measure == "parameters":
            return [RunWeight(self.figures.parameters)] * self.stages
        if measure == "time":
            return [RunWeight(self._times())] * self.stages
        return [RunWeight(self.layers)] * self.stages

    def _memory_load(self, in_flight: int) -> RunWeight:
        """The bytes of a run, nearly: what several operations save is with the first of them alone."""
        if self.profile is None:
            return self.parameters
        kept = self.profile.kept(0, self.count)
        weights = [own + in_flight * more for own, more in zip(self.parameters.weights, kept)]
        return replace(self.parameters, weights=weights)

    def _times(self) -> list[int]:
        assert self.profile is not None
        times = [cost.forward + cost.backward for cost in self.profile.costs]
        times[-1] += self.profile.loss.forward + self.profile.loss.backward  # the loss runs with the last stage
        return times

    def _allowed_edges(self) -> list[int]:
        """The operations before which a cut is allowed, with both ends."""
        steps = [0] * (self.count + 1)
        for each in self.constraints:
            steps[each.first + 1] += 1
            steps[each.last + 1] -= 1
        depth, edges = 0, [0]
        for index in range(1, self.count):
            depth += steps[index]
            if not depth:
                edges.append(index)
        return [*edges, self.count]

    def _row(self, memory_limit: int | None = None, besides: Sequence[int] | None = None) -> Row:
        """The units between allowed edges, to be cut by the policy. Each stage holds ``besides`` more bytes than are weighed.

        Without a limit and without ``besides``, memory is left out.
        """
        edges, counts = self.edges, self.policy.counts
        weighed = [] if memory_limit is None and besides is None else self.memory
        layers, units = _summed(self.layers, edges), _merged([*self.costs, *weighed], edges)
        # By counts, what has no parameters stays with the layer before it, however long it takes.
        costs = [RunWeight(layers)] * self.stages if counts else [units[load] for load in self.costs]
        prices, measured = self._prices(edges), self.policy.measure == "time"
        limits = [] if memory_limit is None else [memory_limit] * self.stages
        memory = [replace(units[load], besides=more) for load, more in zip(weighed, besides or [0] * self.stages)]
        return Row(self.stages, costs, layers, prices, memory, limits, counts, counts, measured, self.uncertain)

    def _prices(self, edges: Sequence[int]) -> list[int]:
        """The bytes that cross each cut. Of equal ones, a cut between the modules of a list is cheaper than one inside."""
        crossing, inside = self.figures.crossing, self.figures.inside
        scale = 1 + (self.stages - 1) * max(inside)
        return [crossing[edge] * scale + inside[edge] for edge in edges[:-1]]

    def best_cuts(self) -> list[int]:
        """The best cuts. Raises BalanceError with the reason if there are none."""
        found = self.search()
        if found is None:
            raise self.refusal()
        return found

    def search(self, memory_limit: int | None = None, besides: Sequence[int] | None = None) -> list[int] | None:
        """The best cuts under the limit, if each stage holds ``besides`` more bytes; None if there are none."""
        found = self._best(self._row(memory_limit, besides))
        if found is None and self.policy.counts and self._best(self._row()) is None:
            self.edges = list(range(self.count + 1))  # cut as it was asked; the splitter refuses it if it must
            found = self._best(self._row(memory_limit, besides))
        return None if found is None else [self.edges[unit] for unit in found]

    def lightest(self, besides: Sequence[int], slack: float = 0.0) -> list[int] | None:
        """The cuts whose heaviest stage has the least memory; within the slack of it, those that send least."""
        found = lightest_cuts(self._row(besides=besides), slack)
        return None if found is None else [self.edges[unit] for unit in found]

    def _best(self, row: Row) -> list[int] | None:
        return self._even_cuts(row) or best_cuts(row)

    def searched(self, cuts: Sequence[int]) -> list[int]:
        """The bytes of the stages of these cuts by which they were searched."""
        return [load.of(*run) for load, run in zip(self.memory, runs(cuts, self.count))]

    def memories(self, cuts: Sequence[int]) -> list[int]:
        """The bytes of the stages of these cuts between computations, nearly."""
        return [self.memory_of(*each) for each in enumerate(runs(cuts, self.count))]

    def memory_of(self, stage: int, run: tuple[int, int]) -> int:
        """The bytes of one stage."""
        kept = 0 if self.profile is None else sum(self.profile.kept(*run))
        return self.parameters.of(*run) + self.waiting[stage] * kept

    def parameter_bytes(self, cuts: Sequence[int]) -> list[int]:
        """The bytes of the parameters and buffers in the stages of these cuts."""
        return [self.parameters.of(*run) for run in runs(cuts, self.count)]

    def _even_cuts(self, row: Row) -> list[int] | None:
        """If the policy counts layers: cuts with which no stage has two layers more than another; None if there are none."""
        if self.policy.measure not in ("layers", "matches"):
            return None
        least, rest = divmod(sum(row.layers), self.stages)
        if least == 0:
            return None
        return best_cuts(replace(row, least=[least] * self.stages, most=[least + (rest > 0)] * self.stages))

    def check_limit(self, limit: int, held: Sequence[int]) -> None:
        """Raise if a stage of cuts that were made by hand, which holds so much, needs more memory than it may."""
        for stage, needs in enumerate(held):
            if needs > limit:
                raise BalanceError(
                    f"{stage_name(stage)}, cut by hand, needs {_bytes(needs)}, more than memory_limit={_bytes(limit)}; cut "
                    "elsewhere, or have split='size' look for cuts under the limit"
                )

    def refusal(self, memory_limit: int | None = None, least: int | None = None) -> BalanceError:
        """Why there are no cuts. ``least`` is the least limit under which some were found."""
        kept = self.traced.kept_whole
        parts = "".join(f"\n  {path}: {why}" for path, why in list(kept.items())[:_REASONS_SHOWN])
        note = f"\nNo cut can be inside of these parts, which cannot be traced:{parts}" if kept else ""
        return BalanceError(self._why_not(memory_limit, least) + note)

    def _why_not(self, memory_limit: int | None, least: int | None) -> str:
        row, counts = self._row(), list(self.policy.counts)
        layers, apart = sum(row.layers), most_stages(row.layers)
        noun = ("matching layer" if self.policy.pattern else "layer") + "s" * (layers != 1)
        if counts and sum(counts) != layers:
            return (
                f"split={brief(counts)} counts {sum(counts)} layers, but the model has {layers}: {self._layer_names()}"
            )
        if layers < self.stages:
            return (
                f"the model cannot be cut into {self.stages} stages, of which each needs a layer: it has {layers} {noun}: "
                f"{self._layer_names()}; give num_stages={layers} at most"
            )
        if best_cuts(row) is None:
            what = (
                f"split={brief(counts)} cuts where" if counts else f"only {apart} of {layers} {noun} can be cut apart:"
            )
            reasons = dict.fromkeys(each.why for each in self.constraints)
            shown = "".join(f"\n  {why}" for why in list(reasons)[:_REASONS_SHOWN])
            return f"the model cannot be cut into {self.stages} stages: {what} operations must stay together:{shown}"
        assert memory_limit is not None and least is not None
        return (
            f"memory_limit={_bytes(memory_limit)} is too little: however the model is cut into {self.stages} stages"
            f"{' of these layers' if counts else ''}, one of them needs {_bytes(least)}. Allow that, or take "
            "more stages, smaller micro-batches, a smaller in_flight, or an optimizer with less state (param_scale)"
        )

    def _layer_names(self) -> str:
        names = [self.name(index) for index in range(self.count) if self.layers[index]]
        half = _NAMES_SHOWN // 2
        return ", ".join(names if len(names) <= _NAMES_SHOWN else [*names[:half], "…", *names[-half:]])

    def name(self, index: int) -> str:
        """The user's name for an operation: the module that it calls, or its name in the graph."""
        node = self.figures.nodes[index]
        return str(node.target) if node.op == "call_module" else node.name

    def _ends(self, start: int, end: int) -> tuple[str, str]:
        """The first and the last layer of a run, or its first and last operation if it has no layer."""
        inside = range(start, end)
        named = [index for index in inside if self.figures.layers[index]] or list(inside)
        return self.name(named[0]), self.name(named[-1])

    def bound(self, cuts: Sequence[int]) -> tuple[int, str | None]:
        """The lowest cost that the heaviest stage can have, and the layers that alone cost it; None if it is the mean."""
        edges = sorted({*self.edges, *cuts})
        units = _merged(self.costs, edges)
        row = Row(
            self.stages, [units[load] for load in self.costs], _summed(self.layers, edges), [0] * (len(edges) - 1)
        )
        bound, alone = lower_bound(row)
        if alone is None:
            return bound, None
        first, last = self._ends(edges[alone], edges[alone + 1])
        return bound, first if first == last else f"{first} to {last}"

    def stage(self, number: int, run: tuple[int, int], peak: int | None = None) -> StageBalance:
        """The row of one stage in the report."""
        start, end = run
        memory = self.memory_of(number, run)
        sends = self.figures.crossing[end] if self.profile is not None and end < self.count else None
        return StageBalance(
            stage_name(number),
            *self._ends(start, end),
            sum(self.layers[start:end]),
            (peak or memory) if self.policy.measure == "memory" else self.costs[number].of(start, end),
            sum(self.figures.parameters[start:end]),
            memory,
            sends,
            peak,
            self._forward_time(start, end),
        )

    def unevenness(self, cuts: Sequence[int]) -> str:
        """What to say of cuts that leave one stage with most of the work; empty if none has, or if they were made by hand.

        The work is the measured time, or else the parameters that operations compute with.
        """
        is_small, timed = sum(self.figures.computed) < _WORTH_BALANCING, self.policy.measure == "time"
        if is_small or self.stages == 1 or self.policy.kind in ("names", "counts"):
            return ""
        work = self._times() if timed else self.figures.computed
        most, stages = _UNEVEN * sum(work) / (1 - self.uncertain), _summed(work, [0, *cuts, self.count])
        if max(stages) <= most:
            return ""
        name, share = stage_name(stages.index(max(stages))), max(stages) / sum(work)
        heaviest = work.index(max(work)) if max(work) > most else None
        what = "measured time" if timed else "parameters that compute (those of embeddings do not)"
        return f"the {self.stages} stages are uneven: {name} has {share:.0%} of the {what}. {self._how_even(heaviest)}"

    def _how_even(self, heaviest: int | None) -> str:
        """What to do where one stage has most of the work; ``heaviest`` is the operation that alone has, if there is one."""
        fewer = "; or ask for fewer stages" * (self.stages > 2)
        given = "" if self.profile else "give example_args, the arguments of one micro-batch, and "
        by_time = f"{given}leave out split=, so that"
        if heaviest is None:
            by_marks = self.policy.measure == "time"
            return f"What to do: {'cut it by marks' if by_marks else f'{by_time} the measured time is balanced'}{fewer}"
        called, name = callee_of(self.figures.nodes[heaviest], self.traced), self.name(heaviest)
        why = f"No cut can be inside of {name!r} ({type(called).__name__}). What to do: "
        followed = isinstance(called, _TRANSFORMERS) or name in self.traced.kept_whole
        if self.profile is None and followed:  # with an example
            return f"{why}{by_time} it is cut between its layers by measured time"
        return f"{why}if it has several layers, make a module of each{fewer}"

    def _forward_time(self, start: int, end: int) -> int | None:
        if self.profile is None or self.policy.measure != "time":
            return None
        loss = self.profile.loss.forward if end == self.count else 0
        return sum(cost.forward for cost in self.profile.costs[start:end]) + loss


def _summed(values: Sequence[int], edges: Iterable[int]) -> list[int]:
    return [sum(values[start:end]) for start, end in pairwise(edges)]


def _merged(loads: Sequence[RunWeight], edges: Sequence[int]) -> dict[RunWeight, RunWeight]:
    """The loads for the units between these edges."""
    return {
        load: replace(load, weights=_summed(load.weights, edges), held=_held_together(load, edges))
        for load in dict.fromkeys(loads)
    }


def _held_together(load: RunWeight, edges: Sequence[int]) -> list[dict[Hashable, int]]:
    return [
        {thing: amount for each in load.held[start:end] for thing, amount in each.items()}
        for start, end in pairwise(edges if load.held else ())
    ]


def _bytes(count: int) -> str:
    return f"{count:,} ({bytes_text(count)})"
