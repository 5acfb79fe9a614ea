"""The graphs of the stages of one driver on one worker."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.worker.compiled.piece_compiler import compiler_of
from pippy.drivers.worker.compiled.stage_graphs import NOT_RUN, StageGraphs


class GraphsOfStages:
    """The graphs of the stages of a driver, by the names of their calls."""

    def __init__(self, options: CompileOptions) -> None:
        self.options, self.compiler = options, compiler_of(options)
        self.process = None if self.compiler is None else self.compiler.process
        self._known: tuple[int, int] | None = None  # the progress at the last step
        self.stages: dict[str, StageGraphs] = {}

    def of(self, name: str, module: nn.Module, template: Any) -> StageGraphs:
        """The graphs of a stage, which all programs share."""
        made = self.stages.get(name)
        if made is None or made.stage.template != template:
            options = self.options
            made = StageGraphs(name, module, template, self.compiler, options.fullgraph, options.limit)
            self.stages[name] = made
        return made

    @property
    def prepared(self) -> int:
        """How often graphs were recorded or compiled."""
        return sum(each.prepared for each in self.stages.values())

    @property
    def progress(self) -> tuple[int, int] | None:
        """While pieces are compiled: how many are done, and how many there are."""
        return None if self.compiler is None else self.compiler.progress

    def begin_step(self) -> int:
        """Run what was compiled in the background from now on. Gives what `has_prepared` takes at the end of the step."""
        before = self.prepared
        if self.process is not None:
            progress = self.process.progress
            if progress is None or progress != self._known:
                for stage in self.stages.values():
                    stage.begin_step()
            if progress is None:
                self.process.close()
            self._known = progress
        return before

    def has_prepared(self, before: int) -> bool:
        """Whether graphs were recorded or compiled in a step."""
        return self.prepared != before or (self.process is not None and self.process.progress is not None)

    def close(self) -> None:
        """End what compiles in the background."""
        if self.process is not None:
            self.process.close()

    def said(self, names: Iterable[str]) -> dict[str, str]:
        """How each of these stages runs, and why if it has no graphs. No step runs now."""
        self.begin_step()
        made = self.stages
        return {name: made[name].said() if name in made else NOT_RUN for name in names}
