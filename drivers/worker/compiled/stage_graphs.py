"""A stage as flat graphs, one set for each form of its inputs: `StageGraphs`; and those of a driver: `GraphsOfStages`.

    forward    F, recorded and cut when inputs of this form come first        ─▶ outputs, a `GraphRun`
    backward   B, or I and later W                                            ─▶ gradients, and parameters' `.grad`

What F, I and W compute is what the module and autograd compute, operation by operation; a stage for which this may not hold is
refused with `NotLowered`, before anything has run.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.worker.compiled.graph_run import GraphRun
from pippy.drivers.worker.compiled.piece_compiler import PieceCompiler, compiler_of
from pippy.drivers.worker.compiled.recordable_stage import RecordableStage
from pippy.drivers.worker.compiled.recorded_form import PieceCodes, RecordedForm
from pippy.ir.base.compiling import DEFAULT, EAGER, FAIL, compile_stance, in_stance
from pippy.ir.base.errors import StageError
from pippy.ir.base.readable import count_with_noun, shortened
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import children, item_names
from pippy.ir.halves.joint import NotLowered
from pippy.ir.run.stage_run import CONSTANTS

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
        self.forms[self._key(inputs, None, backward)] = f"fails as graphs: {_reason(error)}"

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
            return f"cannot be recorded: {_reason(error)}"

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


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {shortened(str(error).strip().partition(chr(10))[0], 200)}"


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, strides, value.dtype, value.device, value.requires_grad, type(value)
    items = children(value)
    if items is not None:
        return type(value), tuple(item_names(value) or ()), tuple(map(_form_of, items))
    return type(value), value if isinstance(value, CONSTANTS) else None
