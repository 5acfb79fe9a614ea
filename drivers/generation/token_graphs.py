"""The graphs that make tokens are made and sent once, and each call is one command.

driver.generate(ids, max_new_tokens=20)
    │ first call: the model is traced with a cache, and cut where the Pipe is cut          AddGeneration ──▶ each worker
    ▼ each call: prompts, how long, how tokens are drawn                                   Generate ──▶ each worker
ids with the new tokens behind them      ◀── tokens, from the worker that has the last stage
"""

import torch

from pippy.drivers.generation.prompts import Prompts
from pippy.drivers.lowering.flow import outputs_of
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.generation import AddGeneration, Generated, TokenGraph, TokenStage
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import pickle_by_value
from pippy.ir.base.names import stage_name
from pippy.ir.compile import compile_traced
from pippy.ir.cut.cut_alike import held_tensors, mark_alike
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import flat_inputs
from pippy.ir.request import Request
from pippy.ir.trace.generation_call import trace_generation


class TokenGraphs:
    """The graphs of one driver's model that make tokens, on its workers. They are made at the first call."""

    def __init__(self, model: torch.nn.Module, placed: PlacedPipe, commands: DriverCommands) -> None:
        self.placed, self.commands = placed, commands
        prompt, token = (_Lowered(model, placed, is_prompt) for is_prompt in (True, False))
        self.takes = {
            worker: {name for graph in (prompt, token) for name in graph.inputs_of(worker)} for worker in placed.workers
        }
        self.choosing = token.choosing
        adds = {worker: AddGeneration(prompt.part_of(worker), token.part_of(worker)) for worker in placed.workers}
        commands.call(adds)

    def run(self, prompts: Prompts) -> torch.Tensor:
        """Generate, and return the prompts with the new tokens behind them."""
        generated: Generated = self.commands.call(
            {worker: prompts.message(takes) for worker, takes in self.takes.items()}
        )[self.choosing]
        return prompts.finished(generated)


class _Lowered:
    """One of the graphs, cut as the Pipe is. ``stages`` has the Pipe's stage for each of its own."""

    def __init__(self, model: torch.nn.Module, placed: PlacedPipe, is_prompt: bool) -> None:
        traced = trace_generation(model, is_prompt)
        self.stages = mark_alike(traced, placed.compiled)
        request = Request(multi_use_param_spec=_replicated(placed.compiled), output_loss_value_spec=False)
        self.cut = compile_traced(traced, request)
        self.held = held_tensors(self.cut, self.stages, placed.compiled)
        self.placed = PlacedPipe(self.cut, [placed.ranks[stage] for stage in self.stages])
        names = self.placed.value_names
        self.calls = list(self.placed.nodes.values())
        self.takes = [tuple(names[value] for value in flat_inputs(call)) for call in self.calls]
        self.gives = [tuple(names[value] for value in outputs_of(call) if value in names) for call in self.calls]
        self.logits = names[self.cut.split_gm.graph.output_node().args[0]]  # type: ignore[index]
        self.choosing = self.placed.ranks[next(at for at, gives in enumerate(self.gives) if self.logits in gives)]

    def inputs_of(self, worker: int) -> set[str]:
        """The inputs of the graph that the stages of a worker take."""
        names = {self.placed.value_names[node] for node in self.cut.split_gm.graph.find_nodes(op="placeholder")}
        return {name for at in self._own(worker) for name in self.takes[at] if name in names}

    def _own(self, worker: int) -> list[int]:
        return [at for at, rank in enumerate(self.placed.ranks) if rank == worker]

    def part_of(self, worker: int) -> TokenGraph:
        """The part of the graph that a worker is sent."""
        own = self._own(worker)
        held = {key: TensorLocation(call, name) for key, (call, name) in self.held.items()}
        modules = {at: self.cut.stage(at) for at in own}
        told = [rank for rank in self.placed.workers if self._is_told(rank)]
        return TokenGraph(
            tuple(map(self._stage, own)), pickle_by_value(modules, held), self.logits, self.choosing, tuple(told)
        )

    def _is_told(self, worker: int) -> bool:
        own = self._own(worker)
        return any("input_ids" in self.takes[at] or not self._receives(at) for at in own)

    def _stage(self, at: int) -> TokenStage:
        call = self.placed.call_of(str(self.calls[at].target))
        named = call.__class__(stage_name(self.stages[at]), call.template, call.seen)
        return TokenStage(at, named, self.takes[at], self.gives[at], self._receives(at), self._sends(at))

    def _sent(self, source: int, worker: int) -> tuple[str, ...]:
        """The message from a stage to another worker: all values of the stage that stages there take."""
        if worker == self.placed.ranks[source]:
            return ()
        wanted = {name for at in self._own(worker) if at > source for name in self.takes[at]}
        return tuple(name for name in self.gives[source] if name in wanted)

    def _sends(self, at: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        sent = [(worker, self._sent(at, worker)) for worker in self.placed.workers]
        return tuple((worker, names) for worker, names in sent if names)

    def _receives(self, at: int) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """The messages that a worker waits for before a stage, without those that it has for an earlier stage."""
        worker = self.placed.ranks[at]
        earlier = {name for before in self._own(worker) if before < at for name in self.takes[before]}
        found = []
        for source in range(at):
            names = self._sent(source, worker)
            if set(names) & set(self.takes[at]) and not set(names) & earlier:
                found.append((source, self.placed.ranks[source], names))
        return tuple(found)


def _replicated(compiled: Compiled) -> dict[str, MultiUseParameterConfig]:
    """The parameters of which several stages of a Pipe have copies, so that the graph of a token finds them there."""
    names = (compiled.remap_qualname(".".join(next(iter(group.items())))) for group in compiled.replicated_params)
    return dict.fromkeys(names, MultiUseParameterConfig.REPLICATE)
