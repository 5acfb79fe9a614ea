"""One run of a stage as graphs, between its F and the end of its backward."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pippy.drivers.worker.compiled.recorded_form import RecordedForm
from pippy.drivers.worker.halves.split_backward import add_to_grads, sum_for
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import children, tensors
from pippy.ir.halves.pieces import Piece, Pieces
from pippy.ir.run.stage_backward import gradient_pairs
from pippy.ir.run.stage_run import StageRun, run_backward


class GraphRun:
    """One run of a stage: what its backward needs. Unlike autograd's, it does not hold the outputs."""

    def __init__(self, form: RecordedForm, kept: Sequence[torch.Tensor]) -> None:
        self.form = form
        self.kept = list(kept)
        self.versions = [each._version for each in kept]
        self.handed: list[torch.Tensor] = []
        self.cut: Pieces | None = None

    @property
    def held(self) -> Any:
        """What is kept of the inputs, and all that is kept."""
        given = set(self.form.cut.joint.given)
        return [each for node, each in zip(self.form.cut.kept, self.kept) if node in given], self.kept

    def backward(self, output_grads: Any) -> Sequence[Any]:
        """Run B: give the gradients of the inputs, and add those of parameters to their `.grad`."""
        return self._said(self._backward, output_grads)

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        """Run I: give the gradients of the inputs."""
        return self._said(self._backward_input, output_grads)

    def backward_weight(self) -> None:
        """Run W: add the gradients of parameters to their `.grad`."""
        self._said(self._backward_weight, None)

    def _said(self, backward: Callable[[Any], tuple[Any, ...]], output_grads: Any) -> tuple[Any, ...]:
        """Errors name the stage and its lines, as those of autograd do."""
        stage = self.form.stage
        run = StageRun(self.form.outputs, tuple(self.form.args))
        return run_backward(stage.name, stage.module, run, output_grads, lambda *_: backward(output_grads))

    def _backward(self, output_grads: Any) -> tuple[Any, ...]:
        values = self._begin(output_grads)
        if self.cut is None:
            return self._none()
        return self._of_inputs(self._accumulated(self.form.whole(self.cut), values))

    def _backward_input(self, output_grads: Any) -> tuple[Any, ...]:
        values = self._begin(output_grads)
        if self.cut is None:
            return self._none()
        cut = self.cut
        given = len(cut.joint.given)
        handed: dict[Any, torch.Tensor] = {node: values[node] for node in cut.handed if node in values}
        results = self._run(cut.backward_input, values)
        handed.update(zip(cut.backward_input.outputs[given:], results[given:]))
        self.handed = [handed[node] for node in cut.handed]
        self.versions = [each._version for each in self.handed]
        return self._of_inputs(results)

    def _backward_weight(self, _: Any) -> tuple[Any, ...]:
        if self.cut is not None:
            handed, self.handed = self.handed, []
            self._check(handed)
            self._accumulated(self.form.weights(self.cut), dict(zip(self.cut.handed, handed)))
        return ()

    def _begin(self, output_grads: Any) -> dict[Any, torch.Tensor]:
        outputs = self.form.outputs
        found = {id(output): gradient for output, gradient in gradient_pairs(outputs, output_grads)}
        tangents = [found.get(id(each)) if each.requires_grad else None for each in tensors(outputs)]
        kept, self.kept = self.kept, []
        self._check(kept)
        if not found:
            return {}
        self.cut = self.form.backward(tangents)
        given = [each for each in tangents if each is not None]
        return dict(zip(self.cut.kept, kept)) | dict(zip(self.cut.joint.tangents, given))

    def _check(self, kept: Sequence[torch.Tensor]) -> None:
        if any(each._version != version for each, version in zip(kept, self.versions)):
            raise StageError(
                "a value that the backward needs was changed in place since the forward; use the operation that makes a "
                "new tensor there"
            )

    def _run(self, piece: Piece, values: dict[Any, torch.Tensor]) -> list[Any]:
        held = dict(zip(self.cut.joint.held, self.form.stage.held()))  # type: ignore[union-attr]
        given = [values[node] if node in values else held[node] for node in piece.inputs]
        values.clear()
        return list(self.form.call(piece, given))

    def _accumulated(self, piece: Piece, values: dict[Any, torch.Tensor]) -> list[Any]:
        """Run a piece, and add the gradients of parameters to their `.grad`, as far as the piece does not. Gives the others."""
        held = self.form.stage.held()
        sums = {node: sum_for(held[at]) for node, at in piece.sums.items()}
        apart = [(held[at], sums[node]) for node, at in piece.sums.items() if sums[node] is not held[at].grad]
        values.update(sums)
        results = self._run(piece, values)
        begin = len(results) - len(held)
        rest = [(parameter, each) for parameter, each in zip(held, results[begin:]) if each is not None]
        add_to_grads([*rest, *apart])  # type: ignore[list-item]
        return results[:begin]

    def _of_inputs(self, results: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        items = iter(results)
        return tuple([_gradients(each, items) for each in self.form.args])

    def _none(self) -> tuple[None, ...]:
        return (None,) * len(self.form.args)


def _gradients(value: Any, items: Iterator[torch.Tensor | None]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(items)
    found = tuple([_gradients(each, items) for each in children(value) or ()])
    return found if any(each is not None for each in found) else None
