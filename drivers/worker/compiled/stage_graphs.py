"""A stage as flat graphs, one set for each form of its inputs: `StageGraphs`; and those of a driver: `GraphsOfStages`.

    forward    F, recorded and cut when inputs of this form come first        ─▶ outputs, a `GraphRun`
    backward   B, or I and later W                                            ─▶ gradients, and parameters' `.grad`

What F, I and W compute is what the module and autograd compute, operation by operation; a stage for which this may not hold is
refused with `NotLowered`, before anything has run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.worker.compiled.pieces import PieceCompiler, compiler_of, first_line
from pippy.drivers.worker.compiled.recorded_form import PieceCodes, RecordableStage, RecordedForm
from pippy.drivers.worker.halves.split_backward import add_to_grads, sum_for
from pippy.ir.base.compiling import DEFAULT, EAGER, FAIL, compile_stance, in_stance
from pippy.ir.base.errors import StageError
from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import children, item_names, tensors
from pippy.ir.halves.joint import NotLowered
from pippy.ir.halves.pieces import Piece, Pieces
from pippy.ir.run.stage_backward import gradient_pairs
from pippy.ir.run.stage_run import CONSTANTS, StageRun, run_backward


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


_NOT_RUN = "eager: nothing was recorded yet"


class StageGraphs:
    """The graphs of one stage, which is called with a ``template`` that its inputs fill.

    A ``compiler`` compiles them. If they are ``required``, inputs that have none are an error. There are graphs for as many
    forms of inputs as the ``limit`` says.

    >>> stage = nn.Linear(2, 1)
    >>> graphs = StageGraphs("stage", stage)
    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> output, run = graphs.forward([x])
    >>> (gradient,) = run.backward_input(torch.ones(3, 1))
    >>> torch.equal(gradient, stage.weight.expand(3, 2)), stage.weight.grad
    (True, None)
    >>> run.backward_weight()
    >>> stage.weight.grad
    tensor([[3., 3.]])
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        template: Any = None,
        compiler: PieceCompiler | None = None,
        required: bool = False,
        limit: int | None = None,
    ) -> None:
        self.stage, self.codes = RecordableStage(name, module, template), PieceCodes(compiler)
        self.required, self.limit = required, limit
        self.forms: dict[Any, RecordedForm | str] = {}
        self._step: int | None = None
        self._flags: Any = None

    @property
    def prepared(self) -> int:
        """How often graphs were recorded or compiled."""
        return self.stage.recorded + self.codes.made

    def said(self) -> str:
        """How it runs."""
        made = sum(isinstance(each, RecordedForm) for each in self.forms.values())
        reasons = list(dict.fromkeys(each for each in self.forms.values() if isinstance(each, str)))
        what = "graphs" if self.codes.compiler is None else "compiled graphs"
        said = [f"{what} for {count_with_noun(made, 'form')} of inputs"] if made else []
        if self.codes.compiler is not None:
            said += [f"as graphs that are not compiled: {each}" for each in dict.fromkeys(self.codes.not_compiled)]
        said += [f"eager: it {each}" for each in reasons]
        return "; ".join(said) or _NOT_RUN

    def forward(
        self, inputs: Sequence[Any], step: int | None = None, backward: bool = True, halves: bool = False
    ) -> tuple[Any, GraphRun] | None:
        """Run F. None if there is no such graph. In calls of one ``step``, the flags of modules and tensors are the same.

        Without a ``backward``, nothing is kept for it. With ``halves``, its halves will run.
        """
        form = self.form(inputs, step, backward)
        if isinstance(form, str):
            return None
        outputs, kept = form.run(inputs, halves)
        return outputs, GraphRun(form, kept)

    def check_eager(self, inputs: Sequence[Any], backward: bool) -> None:
        """Raise if a graph is required for these inputs, which have none."""
        stance = compile_stance()
        if stance != EAGER and (self.required or stance == FAIL):
            asks = "fullgraph=True of compile=" if self.required else f"torch.compiler.set_stance({FAIL!r})"
            raise StageError(
                f"{self.stage.name} cannot run as a graph, which {asks} asks for: it {self.form(inputs, None, backward)}. "
                "What to do: change that, or leave this out, and the stage runs eagerly"
            )

    def form(self, inputs: Sequence[Any], step: int | None = None, backward: bool = True) -> RecordedForm | str:
        """The graphs for inputs of this form, or why there are none. They are recorded if it comes for the first time."""
        stance = compile_stance()
        if stance == EAGER:
            return "has to, by torch.compiler.set_stance('force_eager')"
        key = self._key(inputs, step, backward)
        form = self.forms.get(key)
        if form is None and stance is not None:
            return f"is given inputs of a new form, inside of torch.compiler.set_stance({stance!r})"
        if form is None:
            recorded = sum(isinstance(each, RecordedForm) for each in self.forms.values())
            full = self.limit is not None and recorded >= self.limit
            form = f"is given inputs of more than {self.limit} forms" if full else self._recorded(inputs, backward)
            self.forms[key] = form
        return form

    def give_up(self, inputs: Sequence[Any], backward: bool, error: Exception) -> None:
        """Have inputs of this form run eagerly: that works, and their graph failed."""
        self.forms[self._key(inputs, None, backward)] = f"fails as graphs: {first_line(error)}"

    def _recorded(self, inputs: Sequence[Any], backward: bool) -> RecordedForm | str:
        try:
            self.stage.check()
            with self.stage.recording():
                return RecordedForm(self.stage, self.codes, inputs, backward)
        except NotLowered as error:
            return str(error)
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            return f"asks for the values of tensors ({error})"
        except Exception as error:  # of torch, or of what the stage does
            return f"cannot be recorded: {first_line(error)}"

    def _key(self, inputs: Sequence[Any], step: int | None, backward: bool) -> Any:
        if step is None or step != self._step:
            training = [each.training for each in self.stage.module.modules()]
            trained = [each.requires_grad for each in self.stage.held()]
            noting = [each.note is not None for each in self.stage.norms]
            with in_stance(DEFAULT):
                surroundings = Surroundings.current()
            self._flags = (*training, *trained, *noting, torch.is_grad_enabled(), surroundings)
            self._step = step
        return tuple([_form_of(each) for each in inputs]), self._flags, backward


class GraphsOfStages:
    """The graphs of the stages of a driver on one worker, by the names of their calls."""

    def __init__(self, options: CompileOptions) -> None:
        self.options, self.compiler = options, compiler_of(options)
        self.stages: dict[tuple[str, int], StageGraphs] = {}  # by the graph of the model, too

    def of(self, name: str, module: nn.Module, template: Any, graph: int = 0) -> StageGraphs:
        """The graphs of a stage, which all programs of a graph of the model share."""
        made = self.stages.get((name, graph))
        if made is None or made.stage.template != template or made.stage.module is not module:
            options = self.options
            made = StageGraphs(name, module, template, self.compiler, options.fullgraph, options.limit)
            self.stages[name, graph] = made
        return made

    def forget(self, name: str) -> None:
        """Have the graphs of a stage recorded again: its modules were changed."""
        for (stage, _), made in self.stages.items():
            if stage == name:
                made.forms.clear()

    @property
    def prepared(self) -> int:
        """How often graphs were recorded or compiled."""
        return sum(each.prepared for each in self.stages.values())

    @property
    def progress(self) -> tuple[int, int] | None:
        """While pieces are compiled: how many are done, and how many there are."""
        return None if self.compiler is None else self.compiler.progress

    def said(self, names: Iterable[str]) -> dict[str, str]:
        """How each of these stages runs, and why if it has no graphs."""
        made = self.stages
        return {name: made[name, 0].said() if (name, 0) in made else _NOT_RUN for name in names}


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, strides, value.dtype, value.device, value.requires_grad, type(value)
    items = children(value)
    if items is not None:
        return type(value), tuple(item_names(value) or ()), tuple(map(_form_of, items))
    return type(value), value if isinstance(value, CONSTANTS) else None
