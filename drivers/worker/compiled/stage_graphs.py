"""A stage as flat graphs, one set for each form of its inputs: `StageGraphs`.

    forward    F, recorded and cut when inputs of this form come first        ─▶ outputs, a `GraphRun`
    backward   B, or I and later W                                            ─▶ gradients, and parameters' `.grad`

What F, I and W compute is what the module and autograd compute, operation by operation; a stage for which this may not hold is
refused with `NotLowered`, before anything has run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.protocol.programs import filled
from pippy.drivers.worker.compiled.backend import Code, NotCompiled, one_at_a_time
from pippy.drivers.worker.compiled.piece_compiler import PieceCompiler, compiler_of
from pippy.drivers.worker.halves.split_backward import add_to_grads, sum_for
from pippy.drivers.worker.state.forward_state import Before, Place, restore
from pippy.ir.base.compile_stance import DEFAULT, EAGER, FAIL, compile_stance, in_stance
from pippy.ir.base.compiled_modules import following_compiled
from pippy.ir.base.errors import StageError
from pippy.ir.base.readable import count_with_noun, shortened
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import children, describe, item_names, leaves, map_tensors, tensors
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.halves.adding_up import adding_up
from pippy.ir.halves.joint import FakeInputs, NotLowered, joint_graph
from pippy.ir.halves.pieces import Piece, Pieces
from pippy.ir.halves.quick_code import quick_code
from pippy.ir.run.may_draw import Draws, module_draws
from pippy.ir.run.stage_backward import gradient_pairs
from pippy.ir.run.stage_run import StageRun, run_backward

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice)
_HOOKS = ("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs").split()

_NOT_RUN = "eager: nothing was recorded yet"


Note = tuple[DeferredBatchNorm, int, torch.Tensor, torch.Tensor]  # a call: the number of values, mean and variance


class GraphsOfStages:
    """The graphs of the stages of one driver on one worker, by the names of their calls."""

    def __init__(self, options: CompileOptions) -> None:
        self.options, self.compiler = options, compiler_of(options)
        self.process = None if self.compiler is None else self.compiler.process
        self._known: tuple[int, int] | None = None  # the progress at the last step
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
        recorded = [each for each in self.forms.values() if isinstance(each, RecordedForm)]
        compiling = sum(bool(each.compiling) for each in recorded)
        made = len(recorded) - compiling
        reasons = list(dict.fromkeys(each for each in self.forms.values() if isinstance(each, str)))
        what = "graphs" if self.compiler is None else "compiled graphs"
        said = [f"{what} for {count_with_noun(made, 'form')} of inputs"] if made else []
        if compiling:
            said.append(f"graphs for {count_with_noun(compiling, 'form')} of inputs, compiling in the background")
        if self.compiler is not None:
            said += [f"as graphs that are not compiled: {each}" for each in dict.fromkeys(self.not_compiled)]
        said += [f"eager: it {each}" for each in reasons]
        return "; ".join(said) or _NOT_RUN

    def forward(
        self, inputs: Sequence[Any], step: int | None = None, backward: bool = True, halves: bool = False
    ) -> "tuple[Any, GraphRun] | None":
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

    def form(self, inputs: Sequence[Any], step: int | None = None, backward: bool = True) -> "RecordedForm | str":
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

    @property
    def in_background(self) -> bool:
        """Whether pieces are compiled while steps run."""
        return self.compiler is not None and self.compiler.process is not None

    def begin_step(self) -> None:
        """Run what was compiled in the background from now on."""
        for form in self.forms.values():
            if isinstance(form, RecordedForm):
                form.begin_step()

    def codes(self, pieces: Sequence[Piece]) -> list[Code] | None:
        """What runs pieces; None while some are compiled in the background."""
        self.prepared += 1
        if self.compiler is None:
            return list(map(quick_code, pieces))
        made = self.compiler.codes(pieces)
        if made is None:
            return None
        self.not_compiled += [str(each) for each in made if isinstance(each, NotCompiled)]
        return [quick_code(piece) if isinstance(code, NotCompiled) else code for piece, code in zip(pieces, made)]

    def give_up(self, inputs: Sequence[Any], backward: bool, error: Exception) -> None:
        """Have inputs of this form run eagerly: that works, and their graph failed."""
        self.forms[self._key(inputs, None, backward)] = f"fails as graphs: {_reason(error)}"

    def _recorded(self, inputs: Sequence[Any], backward: bool) -> "RecordedForm | str":
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
        if any(type(each) not in _PLAIN or each.layout is not torch.strided for each in self.held()):
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


class RecordedForm:
    """The graphs of a stage for inputs of one form."""

    def __init__(self, graphs: StageGraphs, args: Sequence[Any], backward: bool) -> None:
        self.graphs = graphs
        self.noted: list[tuple[DeferredBatchNorm, int]] = []  # the calls of deferred batch norms, with how many values
        self.trains = torch.is_grad_enabled()
        for each in leaves(list(args)):
            if isinstance(each, torch.Tensor):
                if type(each) not in _PLAIN or each.layout is not torch.strided:
                    raise NotLowered(f"is given a tensor that is not a plain one ({describe(each)})")
            elif not isinstance(each, _CONSTANTS):
                raise NotLowered(f"is given a {type(each).__name__}")
        fakes = self.fakes = FakeInputs([*graphs.held(), *tensors(list(args))])
        self.args = map_tensors(fakes.of, list(args))
        self.held = [fakes.of(each) for each in graphs.held()]
        self.outputs = self._outputs()
        self._codes: dict[int, Code] = {}
        self.compiling: list[Piece] = []  # in the background
        self._is_first, self._halves = True, False
        # The gradients of outputs are most often laid out as these.
        usual = [torch.empty_like(each) if backward and each.requires_grad else None for each in tensors(self.outputs)]
        self.cut = self._cut(usual, None)
        self.backwards: dict[Any, Pieces] = {self._tangent_key(usual): self.cut}
        self._adding: dict[int, Piece] = {}

    def _outputs(self) -> Any:
        with self.fakes.mode:
            with self._called() as (call, notes):
                outputs = call(self.held, list(tensors(self.args)))
                self.noted = [(norm, values) for norm, values, *_ in notes]
            # each an object of its own, also where the stage gives one tensor twice
            outputs = map_tensors(lambda each: each.detach().requires_grad_(each.requires_grad), outputs)
        for each in leaves(outputs):
            if isinstance(each, torch.Tensor):
                if type(each) is not FakeTensor or each.layout is not torch.strided:
                    raise NotLowered("gives tensors of classes of their own")
            elif not isinstance(each, _CONSTANTS):
                raise NotLowered(f"gives a {type(each).__name__}")
        return outputs

    @contextmanager
    def _called(self) -> Iterator[tuple[Callable[..., Any], list[Note]]]:
        """Inside, the stage can be called with what it is to hold, and what it is given; the list has what its deferred batch
        norms note. It holds these tensors until the end: its backward may compute a part again."""
        graphs = self.graphs

        def call(held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
            items = iter(given)
            args = filled(graphs.template, map_tensors(lambda _: next(items), self.args))
            graphs.hold(held)
            with torch.set_grad_enabled(self.trains):
                outputs = nn.Module.__call__(graphs.module, *args)
            if any(now is not each for now, each in zip(graphs.held(), held)):
                raise NotLowered("puts another tensor in the place of a buffer")
            return outputs

        with graphs.holding(self.held), _noting(graphs.norms) as notes:
            yield call, notes

    def _cut(self, tangents: Sequence[torch.Tensor | None], kept: Sequence[str] | None) -> Pieces:
        without = [None] * (2 * len(self.noted))
        with self._called() as (call, notes):

            def forward(held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                outputs = call(held, given)
                return [*tensors(outputs), *(each for _, _, *both in notes for each in both)]

            joint = joint_graph(forward, self.held, list(tensors(self.args)), [*tangents, *without])
            if len(notes) > len(self.noted):
                raise NotLowered("computes a DeferredBatchNorm again in its backward, which counts once more")
        if kept is None:
            return Pieces(joint)
        nodes = {node.name: node for node in joint.module.graph.nodes}
        return Pieces(joint, [nodes[name] for name in kept])

    def run(self, args: Sequence[Any], halves: bool) -> "tuple[Any, GraphRun]":
        self._halves = halves
        values = self.call(self.cut.forward, [*self.graphs.held(), *tensors(args)])
        kept = values[len(self.cut.joint.outputs) :]
        items = iter(values)
        outputs = map_tensors(lambda like: _given_out(next(items), like.requires_grad), self.outputs)
        for norm, count in self.noted:
            assert norm.note is not None
            norm.note(norm, count, next(items), next(items))
        return outputs, GraphRun(self, kept)

    def call(self, piece: Piece, values: list[torch.Tensor]) -> Sequence[Any]:
        """Run a piece."""
        code = self._codes.get(id(piece)) or self._code(piece)
        with torch.no_grad():
            return code(values)

    def _code(self, piece: Piece) -> Code:
        """What runs a piece. The first run of F is not compiled, so that stages behind it begin to compile meanwhile. All
        pieces are compiled for the next computation, or in the background for a later step."""
        if piece is self.cut.forward and self._is_first and self.graphs.compiler is not None:
            self._is_first = False
            return quick_code(piece)
        cut = self.cut
        backward = (cut.backward_input, self.weights(cut)) if self._halves else (self.whole(cut),)
        pieces = {id(each): each for each in (piece, cut.forward, *backward)}
        missing = [each for number, each in pieces.items() if number not in self._codes]
        codes = self.graphs.codes(missing)
        if self.graphs.in_background:
            self.compiling += missing
            codes = list(map(quick_code, missing))
        assert codes is not None
        self._codes.update(zip(map(id, missing), codes))
        return self._codes[id(piece)]

    def begin_step(self) -> None:
        """Run what was compiled in the background from now on, if nothing is missing."""
        if self.compiling and (codes := self.graphs.codes(self.compiling)) is not None:
            self._codes.update(zip(map(id, self.compiling), codes))
            self.compiling = []

    def whole(self, cut: Pieces) -> Piece:
        """The piece B of a cut, which adds up gradients."""
        return self._adding_up(cut.backward, cut)

    def weights(self, cut: Pieces) -> Piece:
        """The piece W of a cut, which adds up gradients."""
        return self._adding_up(cut.backward_weight, cut)

    def _adding_up(self, piece: Piece, cut: Pieces) -> Piece:
        if id(piece) not in self._adding:
            self._adding[id(piece)] = adding_up(piece, cut.joint.held)
        return self._adding[id(piece)]

    def backward(self, tangents: Sequence[torch.Tensor | None]) -> Pieces:
        """The cut for gradients of outputs of a form."""
        key = self._tangent_key(tangents)
        if key not in self.backwards:
            with self.graphs.recording():
                fakes = [None if each is None else self.fakes.of(each) for each in tangents]
                self.backwards[key] = self._cut(fakes, [node.name for node in self.cut.kept])
        return self.backwards[key]

    @staticmethod
    def _tangent_key(tangents: Sequence[torch.Tensor | None]) -> Any:
        return tuple([None if each is None else (each.stride(), each.dtype) for each in tangents])


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
        graphs = self.form.graphs
        run = StageRun(self.form.outputs, tuple(self.form.args))
        return run_backward(graphs.name, graphs.module, run, output_grads, lambda *_: backward(output_grads))

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
        held = dict(zip(self.cut.joint.held, self.form.graphs.held()))  # type: ignore[union-attr]
        given = [values[node] if node in values else held[node] for node in piece.inputs]
        values.clear()
        return list(self.form.call(piece, given))

    def _accumulated(self, piece: Piece, values: dict[Any, torch.Tensor]) -> list[Any]:
        """Run a piece, and add the gradients of parameters to their `.grad`, as far as the piece does not. Gives the others."""
        held = self.form.graphs.held()
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


@contextmanager
def _noting(norms: Sequence[DeferredBatchNorm]) -> Iterator[list[Note]]:
    """Inside, what deferred batch norms would note in a step is noted in a list."""
    notes: list[Note] = []
    active = [each for each in norms if each.note is not None]
    before = [each.note for each in active]
    try:
        for each in active:
            each.note = lambda *note: notes.append(note)
        yield notes
    finally:
        for each, note in zip(active, before):
            each.note = note


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
    return type(value), value if isinstance(value, _CONSTANTS) else None


def _given_out(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return value.detach().requires_grad_(requires_grad)


def _gradients(value: Any, items: Iterator[torch.Tensor | None]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(items)
    found = tuple([_gradients(each, items) for each in children(value) or ()])
    return found if any(each is not None for each in found) else None
