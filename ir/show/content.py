"""What a drawing shows of a Pipe: its structure, its shapes for example arguments, and the figures of each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pippy.ir.base.readable import bytes_text, count_text, shortened
from pippy.ir.base.trees import nbytes
from pippy.ir.record.compiled import Compiled
from pippy.ir.show.figures import StageFigures, stage_figures
from pippy.ir.show.shapes import Shape, Shapes, propagate
from pippy.ir.show.structure import Box, DrawnValue, Structure, structure_of


@dataclass(frozen=True)
class Content:
    """What a drawing shows. ``stages`` has the figures of the stages and of the loss, by their names, in order.

    ``repeated`` are the parameters, and their bytes, that copies of replicated parameters add to the model's own.
    """

    structure: Structure
    shapes: Shapes | None
    stages: dict[str, StageFigures]
    repeated: tuple[int, int] = (0, 0)

    def shape(self, value: DrawnValue) -> Shape | None:
        """The shape of a value; None without example arguments."""
        return self.shapes.values[value.node] if self.shapes else None

    def size_text(self, value: DrawnValue, longest: int = 1000) -> str:
        """The shape and the bytes of a value in a line; empty without example arguments. A long shape is shortened."""
        shape = self.shape(value)
        if shape is None:
            return ""
        size = f" {bytes_text(shape.nbytes)}" if shape.nbytes else ""
        return shortened(shape.text, longest - len(size)) + size

    def stage_texts(self, box: Box) -> list[str]:
        """A few words about a stage or the loss; empty for another box."""
        if not box.computes:
            return []
        stage = self.stages[box.name]
        noun = "parameter" if stage.parameters == 1 else "parameters"
        words = [f"{count_text(stage.parameters)} {noun}"] if stage.parameters or box.kind == "stage" else []
        return words + ([f"{stage.forward.flops.text(count_text)} FLOPs"] if stage.forward else [])


def content_of(compiled: Compiled, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Content:
    """What a drawing of a Pipe shows; with the arguments of a call, also shapes, bytes and FLOPs."""
    structure = structure_of(compiled)
    shapes = propagate(compiled, args, kwargs or {}) if args or kwargs else None
    stages = {
        box.name: stage_figures(compiled.stage(box.name), index, structure, shapes)
        for index, box in enumerate(structure.boxes)
        if box.computes
    }
    again = [copy for _, *copies in compiled.copies() for copy in copies]
    return Content(structure, shapes, stages, (sum(copy.numel() for copy in again), nbytes(again)))
