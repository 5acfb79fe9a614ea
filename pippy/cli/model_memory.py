"""What workers hold of a model under a schedule, for `pippy compare --memory`."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import click

from pippy.cli.show import given_pipe, made_inputs, parsed
from pippy.cli.stages_memory import count_for_call
from pippy.ir.base.readable import bytes_text

if TYPE_CHECKING:
    from pippy.drivers.plan import Program
    from pippy.drivers.plan.cost.held_bytes import PipeBytes
    from pippy.ir.pipe import Pipe


class ModelPeaks:
    """The most that a worker holds when a model runs under a schedule. The model is cut into as many stages as that has."""

    def __init__(self, target: str, loss: str | None, inputs: Sequence[str], chunks: int) -> None:
        self.target, self.loss, self.chunks = target, loss, chunks
        self.args, self.kwargs = made_inputs([parsed(each) for each in inputs])
        if not inputs:
            raise click.UsageError(
                "--memory counts for the inputs of a mini-batch; give them, the target included: --example 'float32[32,16]'"
            )

    @cache  # noqa: B019
    def of_stages(self, stages: int) -> "tuple[Pipe, PipeBytes]":
        """The model in so many stages, and their bytes."""
        pipe = given_pipe(self.target, {}, (), stages, False, self.loss, None, self.args, self.kwargs)
        return pipe, count_for_call(pipe, self.chunks, self.args, self.kwargs)

    def text(self, program: "Program") -> str:
        """The bytes of the worker that holds most."""
        from pippy.drivers.lowering.lower import lower
        from pippy.drivers.plan.cost.held_bytes import peak_bytes

        pipe, sizes = self.of_stages(program.stages)
        return bytes_text(max(peak_bytes(lower(pipe, program).program, sizes)))
