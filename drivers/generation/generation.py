"""`driver.generate`: it checks the model, then the prompts, and makes the graphs that make tokens at the first call."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pippy.drivers.generation.prompts import prompts_of
from pippy.drivers.generation.token_graphs import TokenGraphs
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan.language.program import Program
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base.errors import GenerationError
from pippy.ir.base.interrupts import heard
from pippy.ir.pipe import Pipe, model_of
from pippy.ir.trace.language_models import check_can_generate


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
