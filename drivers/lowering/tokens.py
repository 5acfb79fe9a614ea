"""Makes the programs that make tokens, `prompt` and `token`, each from a graph that gives the logits of the next token.

The stage that gives the logits is followed by C, which chooses the next token of each row. A `token` program takes what the run
before has chosen in place of the input ``input_ids``.

    prompt  worker 0  F0.0  send a.0 to 1                          worker 1  receive a.0 from 0  F1.0  C1.0  send token.0 to 0
    token   worker 0  receive token.0 from 1  F0.0  send a.0 to 1  worker 1  as for a prompt
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pippy.drivers.lowering.flow import TOGETHER, RemoteInterpreter, Work
from pippy.drivers.lowering.lower import Lowered, by_pass, edges_between, inputs_by_worker
from pippy.drivers.plan.language.edges import Edge, Pass
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.proofs.validate import validate
from pippy.ir.record.compiled import Compiled

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
