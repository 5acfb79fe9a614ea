"""Makes a lowered program from a Pipe and a schedule: computations, sends, receives, frees and reductions of every worker.

The schedule says when and where each stage computes. The Pipe's graph says which values the stages pass to each other;
this is the same for every micro-batch. The program combines the two.

Two programs make tokens, `prompt` and `token`, each from a graph that gives the logits of the next token.

In these the stage that gives the logits is followed by C, which chooses the next token of each row. A `token` program takes
what the run before has chosen in place of the input ``input_ids``.

    prompt  worker 0  F0.0  send a.0 to 1                          worker 1  receive a.0 from 0  F1.0  C1.0  send token.0 to 0
    token   worker 0  receive token.0 from 1  F0.0  send a.0 to 1  worker 1  as for a prompt
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pippy.drivers.base.errors import LoweringError
from pippy.drivers.lowering.flow import TOGETHER, RemoteInterpreter, Work, outputs_of, taken
from pippy.drivers.plan.language.edges import Edge, Pass, Replicated
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.proofs.validate import validate
from pippy.ir.base.names import stage_index
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.verify.verify import check_rules


@dataclass(frozen=True)
class Lowered:
    """A program for one Pipe, and the facts about the Pipe that a worker needs to run it.

    ``work`` has for each pass of a stage its calls, with the values that they take and give. ``inputs`` has for each input
    of the model the workers of a pipeline that need it; it is sent once to each of them. ``outputs`` has for each value that
    the model returns the worker that makes it. The worker keeps this value for its answer, also when the program frees it.
    These are workers of the first replica, if there are more.
    """

    program: Program
    work: Mapping[Pass, tuple[Work, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, int]


def lower(pipe: Pipe, schedule: Program, buffer: int | None = None) -> Lowered:
    """Lower a schedule for a Pipe, and prove the result. ``buffer`` is how many sent values a channel can hold.

    Whole backwards (B) of the schedule stay whole, and halves (I, W) stay halves. Backwards that the loss does
    not need are left out; without a loss, all are left out. A program that already has its communication, for example one
    that was written by hand, is not changed; its edges must be those of the Pipe.

    >>> from torch import nn
    >>> from pippy.drivers.plan import make_schedule
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.MSELoss())
    >>> lowered = lower(pipe, make_schedule("1f1b", workers=2, chunks=1))
    >>> for instruction in lowered.program.orders[1]:
    ...     print(instruction)
    receive _0.0 from 0
    F1.0
    free _0.0
    B1.0
    send _0_grad_from_submod_1.0 to 0
    free _0_grad_from_submod_1.0
    >>> lowered.inputs
    {'input_1': (0,), 'target': (1,)}
    """
    if not isinstance(pipe, Pipe) or not isinstance(schedule, Program):
        raise LoweringError(
            f"lower takes a Pipe and a program of make_schedule; these are a {type(pipe).__name__} and a "
            f"{type(schedule).__name__}"
        )
    compiled = compiled_of(pipe)
    if schedule.stages != compiled.num_stages:
        raise LoweringError(
            f"{schedule.schedule} is for {schedule.stages} stages, and the Pipe has {compiled.num_stages}; make a schedule "
            f"with as many stages (workers times stages_per_worker), or cut the model into {schedule.stages} stages"
        )
    check_rules(compiled)
    interpreter = RemoteInterpreter(compiled)
    training = bool(schedule.backward) and compiled.loss is not None
    work = by_pass(interpreter.run_until(lambda node: node.op == "output"), training)
    replicated = _replicated(compiled, interpreter) if training else ()
    notes = _noting(compiled, interpreter) if schedule.replicas > 1 else ()
    _check_backward(schedule, work)
    edges = tuple(edges_between(work))
    program = _fitted(schedule, edges, work, replicated, notes, value_sizes(interpreter, work))
    validate(program, buffer)
    worker_of = program.placement.worker_of
    return Lowered(
        program,
        {key: tuple(_taking_sums(each, program) for each in calls) for key, calls in work.items()},
        dict(inputs_by_worker(interpreter, work, worker_of)),
        dict(_outputs(interpreter, worker_of)),
    )


def by_pass(work: list[Work], training: bool) -> dict[Pass, tuple[Work, ...]]:
    """What each pass computes. Without ``training`` there are no backwards."""
    passes: dict[Pass, tuple[Work, ...]] = {}
    for each in work:
        if each.phase == "F" or training:
            key = Pass(each.phase, each.stage)  # type: ignore[arg-type]
            passes[key] = (*passes.get(key, ()), each)
    return passes


def edges_between(work: Mapping[Pass, tuple[Work, ...]]) -> Iterator[Edge]:
    """The values that one pass makes and others take. Values inside a pass, such as the loss's input, are not edges."""
    makers = {name: key for key, calls in work.items() for call in calls for name in call.gives if name}
    targets: dict[str, list[Pass]] = {name: [] for name in makers}
    for key, calls in work.items():
        for name in dict.fromkeys(name for call in calls for name in taken(call)):
            if name in makers and makers[name] != key:
                targets[name].append(key)
    return (Edge(name, makers[name], tuple(takers)) for name, takers in targets.items() if takers)


def value_sizes(interpreter: RemoteInterpreter, work: Mapping[Pass, tuple[Work, ...]]) -> dict[str, int]:
    """The bytes of the values between stages and of their gradients, for the example of the Pipe, as far as they are known."""
    compiled = interpreter.compiled
    found = {
        name: compiled.value_bytes[compiled.wiring.values[node.name]]
        for node, name in interpreter.names.items()
        if compiled.wiring.values[node.name] in compiled.value_bytes
    }
    calls = [each for its in work.values() for each in its]
    takes = {each.call: each.takes for each in calls if each.phase == "F"}
    for each in calls:
        for gradient, value in zip(each.gives, takes[each.call]) if each.phase == "B" else ():
            if gradient and value in found:
                found[gradient] = found[value]
    return found


def _added(work: Mapping[Pass, tuple[Work, ...]], edges: Iterable[Edge]) -> Iterator[tuple[str, ...]]:
    """The gradients of each value that has several from other passes, in the order in which a backward adds them up."""
    between = {edge.value for edge in edges}
    for calls in work.values():
        for taken_together in (each for call in calls for each in call.takes if isinstance(each, tuple)):
            given = tuple(name for name in taken_together if name in between)
            if len(given) > 1:
                yield given


def _taking_sums(work: Work, program: Program) -> Work:
    """The same work with sums in place of what a worker adds up before."""
    takes = [
        tuple(name for name in each if name not in program.sum_of) if isinstance(each, tuple) else each
        for each in work.takes
    ]
    return replace(work, takes=tuple(takes))


def _check_backward(schedule: Program, work: Mapping[Pass, tuple[Work, ...]]) -> None:
    needed = {key.stage for key in work if key.phase == "B"}
    missing = sorted(needed - set(schedule.backward))
    if missing:
        raise LoweringError(
            f"{schedule.schedule} has no backward of stages {missing}, which the loss depends on; give each of the "
            f"stages {sorted(needed)} a backward"
        )


def _fitted(
    schedule: Program,
    edges: tuple[Edge, ...],
    work: Mapping[Pass, tuple[Work, ...]],
    replicated: tuple[Replicated, ...],
    notes: tuple[int, ...],
    sizes: Mapping[str, int],
) -> Program:
    """The schedule with the Pipe's edges. A program that has edges already must have the same ones."""
    added = tuple(_added(work, edges))
    if schedule.edges is not None:
        _check_same("edge", set(map(str, schedule.edges)), set(map(str, edges)))
    if schedule.lowered:
        _check_same("replicated", set(map(str, schedule.replicated)), set(map(str, replicated)))
        _check_same("notes", set(map(str, schedule.notes)), set(map(str, notes)))
        if schedule.added:  # else all gradients travel, as in programs that were written before there were sums
            _check_same("added", set(map(" ".join, schedule.added)), set(map(" ".join, added)))
        return schedule
    backward = [key.stage for key in work if key.phase == "B"]
    return add_communication(schedule.for_graph(edges, backward, replicated, notes, added), sizes=sizes)


def _check_same(what: str, theirs: set[str], ours: set[str]) -> None:
    if theirs != ours:
        lines = [f"  {what} {each}   (only in the program)" for each in sorted(theirs - ours)]
        lines += [f"  {what} {each}   (only in the Pipe)" for each in sorted(ours - theirs)]
        raise LoweringError("the program was made for another Pipe:\n" + "\n".join(lines))


def _replicated(compiled: Compiled, interpreter: RemoteInterpreter) -> tuple[Replicated, ...]:
    groups = []
    for group in compiled.replicated_params:
        stages = {index if (index := stage_index(stage)) is not None else interpreter.loss_stage for stage in group}
        stage, local = next(iter(group.items()))
        name = compiled.qualnames.canonical[compiled.remap_qualname(f"{stage}.{local}")]
        groups.append(Replicated(name, tuple(sorted(stages))))
    return tuple(groups)


def _noting(compiled: Compiled, interpreter: RemoteInterpreter) -> tuple[int, ...]:
    """The stages with batch norms that count whole mini-batches."""
    calls = compiled.split_gm.graph.find_nodes(op="call_module")
    modules = ((call, each) for call in calls for each in compiled.stage(str(call.target)).modules())
    return tuple(sorted({interpreter.stage_of(call) for call, each in modules if isinstance(each, DeferredBatchNorm)}))


def inputs_by_worker(
    interpreter: RemoteInterpreter, work: Mapping[Pass, tuple[Work, ...]], worker_of: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The inputs of the model, each with the workers whose stages take it."""
    for node in interpreter.compiled.split_gm.graph.find_nodes(op="placeholder"):
        name = interpreter.names[node]
        users = {key.stage for key, calls in work.items() for call in calls if key.phase == "F" and name in call.takes}
        yield name, tuple(sorted({worker_of[stage] for stage in users}))


def _outputs(interpreter: RemoteInterpreter, worker_of: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    returned = set(interpreter.compiled.split_gm.graph.output_node().all_input_nodes)
    for call in interpreter.compiled.split_gm.graph.find_nodes(op="call_module"):
        for value in outputs_of(call):
            if value in returned:
                yield interpreter.names[value], worker_of[interpreter.stage_of(call)]


_IDS = "input_ids"


class TokenGraph:
    """A graph that gives the logits of the next token, whose stages are placed on workers.

    ``told`` are the workers that are told of tokens: they have a stage that takes them, or one that would not learn from
    other stages that all rows have ended. ``token`` is the name of what is chosen, and ``logits`` of what it is chosen from.
    """

    def __init__(self, compiled: Compiled, placement: Placement) -> None:
        self.interpreter, self.placement = RemoteInterpreter(compiled), placement
        flow = self.interpreter.run_until(lambda node: node.op == "output")
        self.names = set(self.interpreter.names.values())
        result = self.interpreter.names[compiled.split_gm.graph.output_node().args[0]]  # type: ignore[index]
        self.logits, self.token = self._new_name("logits"), self._new_name("token")
        by_stage = by_pass(flow, training=False)
        self.work = {key: _renamed(calls, {result: self.logits}) for key, calls in by_stage.items()}
        self._send_together()
        made_by_stages = {name for calls in self.work.values() for each in calls for name in each.gives}
        self._first = [
            key.stage
            for key, calls in self.work.items()
            if any(_IDS in each.takes for each in calls) or made_by_stages.isdisjoint(calls[0].takes)
        ]
        self.told = {placement.worker_of[stage] for stage in self._first}

    def lower(self, name: str, chunks: int, told: Collection[int], continues: bool) -> Lowered:
        """The program called ``name``, proven. It sends tokens to the workers ``told``, for their next run."""
        interpreter, placement = self.interpreter, self.placement
        instead = {_IDS: self.token} if continues else {}
        work = {key: tuple(_renamed(calls, instead)) for key, calls in self.work.items()}
        every = (each for calls in work.values() for each in calls)
        chooses, call = next((each.stage, each.call) for each in every if self.logits in each.gives)
        work[Pass("C", chooses)] = (Work("C", chooses, call, 0, (self.logits,), (self.token,)),)
        others = [placement.stages_of(worker)[0] for worker in told if worker not in self.told]
        edges = [each for each in edges_between(work) if each.value != self.token]
        token = Edge(
            self.token, Pass("C", chooses), tuple(Pass("F", stage) for stage in sorted([*self._first, *others]))
        )
        plain = make_schedule("forward_only", workers=placement.workers, chunks=chunks, placement=placement)
        orders = [
            [step for each in order for step in (each, replace(each, op=Op.CHOOSE))[: 1 + (each.stage == chooses)]]
            for order in plain.computations
        ]
        program = replace(
            plain,
            schedule=name,
            orders=tuple(map(tuple, orders)),
            edges=(token, *edges),  # with the same number in all programs
            continues=continues,
        )
        program = add_communication(program)
        validate(program)
        return Lowered(program, work, dict(inputs_by_worker(interpreter, work, placement.worker_of)), {})

    def _send_together(self) -> None:
        """Let all values that a stage gives to another worker go there as one, so that a token costs one message.

        They are put together behind the stage, and taken apart in front of the first stage there that takes one of them.
        """
        for source, (made, *_) in [(key, tuple(calls)) for key, calls in self.work.items()]:
            for worker in set(range(self.placement.workers)) - {self.placement.worker_of[source.stage]}:
                takers = [key for key in self.work if key.stage in self.placement.stages_of(worker)]
                taken = {name for key in takers for each in self.work[key] for name in each.takes}
                there = {name: self._new_name(f"{name}_on_{worker}") for name in made.gives if name and name in taken}
                if len(there) < 2:
                    continue
                as_one = self._new_name(f"values_of_{source.stage}_for_{worker}")
                first = min(key for key in takers for each in self.work[key] if not there.keys().isdisjoint(each.takes))
                for key in takers:
                    self.work[key] = _renamed(self.work[key], there)
                self.work[source].append(Work("F", source.stage, TOGETHER, 0, tuple(there), (as_one,)))
                self.work[first].insert(0, Work("F", first.stage, TOGETHER, 0, (as_one,), tuple(there.values())))

    def _new_name(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def _renamed(calls: Iterable[Work], instead: Mapping[str, str]) -> list[Work]:
    """The calls with other names for their values."""

    def names(given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(instead.get(name, name) for name in given)

    return [replace(each, takes=names(each.takes), gives=names(each.gives)) for each in calls]
