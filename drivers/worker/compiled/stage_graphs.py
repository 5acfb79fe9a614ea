"""A stage as flat graphs, one set for each form of its inputs: `StageGraphs`.

    forward    F, recorded and cut when inputs of this form come first        ─▶ outputs, a `GraphRun`
    backward   B, or I and later W                                            ─▶ gradients, and parameters' `.grad`

What F, I and W compute is what the module and autograd compute, operation by operation; a stage for which this may not hold is
refused with `NotLowered`, before anything has run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.worker.compiled.backend import Code, one_at_a_time
from pippy.drivers.worker.compiled.graph_run import GraphRun
from pippy.drivers.worker.compiled.piece_compiler import NotCompiled, PieceCompiler, compiler_of
from pippy.drivers.worker.compiled.recorded_form import CONSTANTS, PLAIN, RecordedForm
from pippy.drivers.worker.state.forward_state import Before, Place, restore
from pippy.ir.base.compile_stance import DEFAULT, EAGER, FAIL, compile_stance, in_stance
from pippy.ir.base.compiled_modules import following_compiled
from pippy.ir.base.errors import StageError
from pippy.ir.base.readable import count_with_noun, shortened
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import children, item_names
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.halves.joint import NotLowered
from pippy.ir.halves.pieces import Piece
from pippy.ir.halves.quick_code import quick_code
from pippy.ir.run.may_draw import Draws, module_draws

_HOOKS = ("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs").split()

_NOT_RUN = "eager: nothing was recorded yet"


class GraphsOfStages:
    """The graphs of the stages of one driver on one worker, by the names of their calls."""

    def __init__(self, options: CompileOptions) -> None:
        self.options, self.compiler = options, compiler_of(options)
        self.stages: dict[str, StageGraphs] = {}

    def of(self, name: str, module: nn.Module, template: Any) -> "StageGraphs":
        """The graphs of a stage, which all programs share."""
        made = self.stages.get(name)
        if made is None or made.template != template:
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

    def said(self, names: Iterable[str]) -> dict[str, str]:
        """How each of these stages runs, and why if it has no graphs."""
        made = self.stages
        return {name: made[name].said() if name in made else _NOT_RUN for name in names}


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
        self.name, self.module, self.template, self.compiler = name, module, template, compiler
        self.required, self.limit = required, limit
        self.forms: dict[Any, RecordedForm | str] = {}
        self.not_compiled: list[str] = []  # why pieces are not
        self.prepared = 0  # how often graphs were recorded or compiled
        self._step: int | None = None
        self._flags: Any = None
        places: dict[int, list[Place]] = {}
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((held, key))
        self._where = list(places.values())
        self.norms = [each for each in module.modules() if isinstance(each, DeferredBatchNorm)]

    def held(self) -> list[torch.Tensor]:
        """The parameters and buffers that the stage holds now."""
        return [places[0][0][places[0][1]] for places in self._where]

    def said(self) -> str:
        """How it runs."""
        made = sum(isinstance(each, RecordedForm) for each in self.forms.values())
        reasons = list(dict.fromkeys(each for each in self.forms.values() if isinstance(each, str)))
        what = "graphs" if self.compiler is None else "compiled graphs"
        said = [f"{what} for {count_with_noun(made, 'form')} of inputs"] if made else []
        if self.compiler is not None:
            said += [f"as graphs that are not compiled: {each}" for each in dict.fromkeys(self.not_compiled)]
        said += [f"eager: it {each}" for each in reasons]
        return "; ".join(said) or _NOT_RUN

    def forward(
        self, inputs: Sequence[Any], step: int | None = None, backward: bool = True, halves: bool = False
    ) -> tuple[Any, GraphRun] | None:
        """Run F. None if there is no such graph. In calls of one ``step``, the flags of modules and tensors are the same.

        Without a ``backward``, nothing is kept for it. With ``halves``, its halves will run.
        """
        form = self.form(inputs, step, backward)
        return None if isinstance(form, str) else form.run(inputs, halves)

    def check_eager(self, inputs: Sequence[Any], backward: bool) -> None:
        """Raise if a graph is required for these inputs, which have none."""
        stance = compile_stance()
        if stance != EAGER and (self.required or stance == FAIL):
            asks = "fullgraph=True of compile=" if self.required else f"torch.compiler.set_stance({FAIL!r})"
            raise StageError(
                f"{self.name} cannot run as a graph, which {asks} asks for: it {self.form(inputs, None, backward)}. What to "
                "do: change that, or leave this out, and the stage runs eagerly"
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

    def codes(self, pieces: Sequence[Piece]) -> list[Code]:
        """What runs pieces."""
        self.prepared += 1
        if self.compiler is None:
            return list(map(quick_code, pieces))
        made = self.compiler.codes(pieces)
        self.not_compiled += [str(each) for each in made if isinstance(each, NotCompiled)]
        return [quick_code(piece) if isinstance(code, NotCompiled) else code for piece, code in zip(pieces, made)]

    def give_up(self, inputs: Sequence[Any], backward: bool, error: Exception) -> None:
        """Have inputs of this form run eagerly: that works, and their graph failed."""
        self.forms[self._key(inputs, None, backward)] = f"fails as graphs: {_reason(error)}"

    def _recorded(self, inputs: Sequence[Any], backward: bool) -> RecordedForm | str:
        try:
            self._check()
            with self.recording():
                return RecordedForm(self, inputs, backward)
        except NotLowered as error:
            return str(error)
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            return f"asks for the values of tensors ({error})"
        except Exception as error:  # of torch, or of what the stage does
            return f"cannot be recorded: {_reason(error)}"

    def _key(self, inputs: Sequence[Any], step: int | None, backward: bool) -> Any:
        if step is None or step != self._step:
            training = [each.training for each in self.module.modules()]
            trained = [each.requires_grad for each in self.held()]
            noting = [each.note is not None for each in self.norms]
            with in_stance(DEFAULT):
                surroundings = Surroundings.current()
            self._flags = (*training, *trained, *noting, torch.is_grad_enabled(), surroundings)
            self._step = step
        return tuple([_form_of(each) for each in inputs]), self._flags, backward

    def _check(self) -> None:
        for path, module in self.module.named_modules():
            if getattr(module.forward, "_torchdynamo_disable", False):
                raise NotLowered(f"has {path or 'itself'} marked by torch.compiler.disable")
            if any(getattr(module, each, None) for each in _HOOKS):
                raise NotLowered(f"has hooks on {path or 'itself'}, which a graph would not run")
        if module_draws(self.module) is Draws.PYTHONS_TOO:
            raise NotLowered("may draw from the generators of Python or numpy")
        if any(type(each) not in PLAIN or each.layout is not torch.strided for each in self.held()):
            raise NotLowered("holds tensors of classes of their own")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, graphs are recorded. Raises if that changes the stage, which is then as before."""
        self.prepared += 1
        before = Before(list(self.module.modules()), set())
        try:
            with one_at_a_time, following_compiled(), _without_what_counts_memory():
                yield
        finally:
            changes, written, _ = before.changes()
            restore(changes)
        if changes or written:
            raise NotLowered(f"changes its attribute {changes[0].name}")

    @contextmanager
    def holding(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the stage holds other tensors."""
        before = self.held()
        try:
            self.hold(others)
            yield
        finally:
            self.hold(before)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put these tensors in the places of those that the stage holds."""
        for tensor, places in zip(tensors, self._where, strict=True):
            for held, key in places:
                held[key] = tensor


@contextmanager
def _without_what_counts_memory() -> Iterator[None]:
    """Inside, torch's modes and the hooks of saved tensors are off."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with _disable_current_modes():
            yield
    finally:
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


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
