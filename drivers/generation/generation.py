"""Makes tokens: the graphs that do so are made and sent once, and each call is one command.

driver.generate(ids, max_new_tokens=20)
    │ first call: the model is traced with a cache, and cut where the Pipe is cut
    │ first with so many micro-batches: the programs `prompt` and `token`                  AddGeneration ──▶ each worker
    ▼ each call: prompts, how long, how tokens are drawn                                   Generate ──▶ each worker
ids with the new tokens behind them      ◀── tokens, from the worker that has the last stage
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pippy.drivers.generation.prompts import Prompts, prompts_of
from pippy.drivers.lowering.lower import Lowered
from pippy.drivers.lowering.tokens import TokenGraph
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.programs import AddGeneration, AddProgram
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.errors import GenerationError
from pippy.ir.base.interrupts import heard
from pippy.ir.base.names import stage_name
from pippy.ir.compile import compile_traced
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.cut.uses import copied_parameters, held_tensors, mark_alike
from pippy.ir.pipe import Pipe, model_of
from pippy.ir.request import Request
from pippy.ir.trace.language_models import check_can_generate, trace_generation


class TokenGraphs:
    """The graphs of one driver's model that make tokens, and the programs for them. Nothing is sent before the first call."""

    def __init__(
        self, model: torch.nn.Module, placed: PlacedPipe, commands: DriverCommands, ranks: Sequence[int]
    ) -> None:
        self.prompt, self.token = (_Graph(model, placed, ranks, is_prompt) for is_prompt in (True, False))
        self.commands = commands
        if self.prompt.placed.workers != self.token.placed.workers:
            raise GenerationError(
                "the model cannot generate as it is cut: a prompt needs stages on workers "
                f"{', '.join(map(str, self.prompt.placed.workers))}, and a token behind it on "
                f"{', '.join(map(str, self.token.placed.workers))}; cut the Pipe between the layers of the model"
            )
        self.told = sorted(self.prompt.stages.told | self.token.stages.told)
        self.sent: dict[tuple[int, bool], dict[int, set[str]]] = {}  # for each worker, the inputs that it takes

    def lowered(self, chunks: int, one_token: bool = False) -> tuple[Lowered, Lowered]:
        """The programs `prompt` and `token` for so many micro-batches. A prompt of ``one_token`` runs the graph of a token."""
        first = self.token if one_token else self.prompt
        return (
            first.stages.lower("prompt", chunks, self.told, continues=False),
            self.token.stages.lower("token", chunks, self.told, continues=True),
        )

    def run(self, prompts: Prompts) -> torch.Tensor:
        """Generate, and return the prompts with the new tokens behind them."""
        takes = self._send(len(prompts.rows), prompts.one_token)
        made = self.commands.call({worker: prompts.message(names) for worker, names in takes.items()})
        return prompts.finished(next(each for each in made.values() if each is not None))

    def _send(self, chunks: int, one_token: bool) -> dict[int, set[str]]:
        """Send the programs, unless the workers have them. Returns the inputs that each worker takes."""
        if (chunks, one_token) in self.sent:
            return self.sent[chunks, one_token]
        lowered = self.lowered(chunks, one_token)
        graphs = (self.token if one_token else self.prompt, self.token)
        prompt, token = (graph.programs(each) for graph, each in zip(graphs, lowered))
        code = {worker: (self.prompt.code(worker), self.token.code(worker)) for worker in token if not self.sent}
        self.commands.call(
            {worker: AddGeneration(prompt[worker], token[worker], one_token, code.get(worker)) for worker in token}
        )
        ranks = next(iter(token.values())).ranks
        self.sent[chunks, one_token] = {
            rank: {name for each in lowered for name, workers in each.inputs.items() if worker in workers}
            for worker, rank in enumerate(ranks)
        }
        return self.sent[chunks, one_token]


class _Graph:
    """One of the graphs, cut as the Pipe is, and its ``stages`` on workers. ``of_pipe`` has the Pipe's stage for each."""

    def __init__(self, model: torch.nn.Module, placed: PlacedPipe, ranks: Sequence[int], is_prompt: bool) -> None:
        traced = trace_generation(model, is_prompt)
        self.of_pipe = mark_alike(traced, placed.compiled)
        copies = dict.fromkeys(copied_parameters(placed.compiled), MultiUseParameterConfig.REPLICATE)
        request = Request(multi_use_param_spec=copies, output_loss_value_spec=False)
        self.cut = compile_traced(traced, request)
        self.held = held_tensors(self.cut, self.of_pipe, placed.compiled)
        self.placed = PlacedPipe(self.cut, [placed.ranks[stage] for stage in self.of_pipe])
        workers = [rank for rank in ranks if rank in self.placed.workers]
        self.stages = TokenGraph(self.cut, Placement(tuple(map(workers.index, self.placed.ranks))))

    def programs(self, lowered: Lowered) -> dict[int, AddProgram]:
        """Each worker's part of a program. Stages are called as those of the Pipe."""
        names = {f"submod_{at}": stage_name(stage) for at, stage in enumerate(self.of_pipe)}
        return {
            worker: replace(
                each,
                calls={key: replace(call, name=names.get(key, key)) for key, call in each.calls.items()},
                slices=0,  # a call has caches of its own, for all of its tokens
            )
            for worker, each in self.placed.programs(0, lowered, single_loss=False).items()
        }

    def code(self, worker: int) -> Pickled:
        """The code of a worker's stages, with the places of the tensors that the worker has."""
        held = {key: TensorLocation(call, name) for key, (call, name) in self.held.items()}
        return pickle_by_value({call: self.cut.stage(call) for call in self.placed.calls_on(worker)}, held)


class TokenGeneration:
    """Generates with the model of one driver. Nothing is traced or sent before the first call.

    ``ranks`` has the worker of the cluster for each worker of a program.
    """

    def __init__(self, pipe: Pipe, placed: PlacedPipe, commands: DriverCommands, ranks: Sequence[int]) -> None:
        self._pipe, self._placed, self._commands, self._ranks = pipe, placed, commands, ranks
        self._graphs: TokenGraphs | None = None
        self._settings = placed.settings

    def forget(self) -> None:
        """Note that the workers have lost the graphs that make tokens: the next call makes and sends them again."""
        self._graphs = None

    def run(self, ids: Any, others: Mapping[str, Any], **arguments: Any) -> torch.Tensor:
        """Check the arguments of a call, those of `prompts_of`, and return the prompts with the new tokens behind them."""
        model = self._language_model()
        prompts = prompts_of(model, ids, workers=len(self._ranks), others=others, **arguments)
        return self._graphs_of(model).run(prompts)

    def programs(self, chunks: int) -> tuple[Program, Program]:
        """The programs `prompt` and `token` for so many micro-batches."""
        prompt, token = self._graphs_of(self._language_model()).lowered(chunks)
        return prompt.program, token.program

    def _graphs_of(self, model: torch.nn.Module) -> TokenGraphs:
        if self._graphs is None or self._settings is not self._placed.settings:  # or else the model was changed since
            self._settings = self._placed.settings
            with heard():
                self._graphs = TokenGraphs(model, self._placed, self._commands, self._ranks)
        return self._graphs

    def _language_model(self) -> torch.nn.Module:
        model = model_of(self._pipe)
        if model is None:
            raise GenerationError(
                "generate() needs the model that the Pipe was made from, which this Pipe, a copy, does not hold; "
                "make the driver from the Pipe that pipeline() returned"
            )
        check_can_generate(model)
        return model
