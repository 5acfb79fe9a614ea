"""The graphs of a stage for inputs of one form: recorded, cut into pieces, and what runs these."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pippy.drivers.protocol.programs import filled
from pippy.drivers.worker.compiled.pieces import Code, NotCompiled, PieceCompiler, one_at_a_time
from pippy.ir.base.compiling import following_compiled
from pippy.ir.base.trees import describe, leaves, map_tensors, tensors
from pippy.ir.halves.adding_up import adding_up
from pippy.ir.halves.joint import FakeInputs, NotLowered, joint_graph
from pippy.ir.halves.pieces import Piece, Pieces, quick_code
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.forward_state import Before, Place, restore
from pippy.ir.run.may_draw import Draws, module_draws
from pippy.ir.run.stage_run import CONSTANTS

_HOOKS = ("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs").split()


class RecordableStage:
    """A stage that is called with a ``template``, which its inputs fill."""

    def __init__(self, name: str, module: nn.Module, template: Any = None) -> None:
        self.name, self.module, self.template = name, module, template
        self.recorded = 0  # how often
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
    def recording(self) -> Iterator[None]:
        """Inside, graphs are recorded. Raises if that changes the stage, which is then as before."""
        self.recorded += 1
        before = Before(list(self.module.modules()), set())
        try:
            with one_at_a_time, following_compiled(), _without_what_counts_memory():
                yield
        finally:
            changes, written, _ = before.changes()
            restore(changes)
        if changes or written:
            raise NotLowered(f"changes its attribute {changes[0].name}")

    def check(self) -> None:
        """Raise if graphs could differ from it."""
        for path, module in self.module.named_modules():
            if getattr(module.forward, "_torchdynamo_disable", False):
                raise NotLowered(f"has {path or 'itself'} marked by torch.compiler.disable")
            if any(getattr(module, each, None) for each in _HOOKS):
                raise NotLowered(f"has hooks on {path or 'itself'}, which a graph would not run")
        if module_draws(self.module) is Draws.PYTHONS_TOO:
            raise NotLowered("may draw from the generators of Python or numpy")
        if any(not is_plain(each) for each in self.held()):
            raise NotLowered("holds tensors of classes of their own")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a graph can have a tensor: it is of no class of its own, and dense.

    >>> is_plain(nn.Parameter(torch.ones(2))), is_plain(torch.ones(2).to_sparse())
    (True, False)
    """
    return type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided


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


Note = tuple[DeferredBatchNorm, int, torch.Tensor, torch.Tensor]  # a call: the number of values, mean and variance


class PieceCodes:
    """What runs the pieces of a stage: they are compiled if there is a ``compiler``."""

    def __init__(self, compiler: PieceCompiler | None) -> None:
        self.compiler = compiler
        self.made = 0  # how often
        self.not_compiled: list[str] = []  # why pieces are not

    def of(self, pieces: Sequence[Piece]) -> list[Code]:
        """What runs pieces."""
        self.made += 1
        if self.compiler is None:
            return list(map(quick_code, pieces))
        made = self.compiler.codes(pieces)
        self.not_compiled += [str(each) for each in made if isinstance(each, NotCompiled)]
        return [quick_code(piece) if isinstance(code, NotCompiled) else code for piece, code in zip(pieces, made)]


class RecordedForm:
    """The graphs of a stage for inputs of one form."""

    def __init__(self, stage: RecordableStage, codes: PieceCodes, args: Sequence[Any], backward: bool) -> None:
        self.stage, self.codes = stage, codes
        self.noted: list[tuple[DeferredBatchNorm, int]] = []  # the calls of deferred batch norms, with how many values
        self.trains = torch.is_grad_enabled()
        for each in leaves(list(args)):
            if isinstance(each, torch.Tensor):
                if not is_plain(each):
                    raise NotLowered(f"is given a tensor that is not a plain one ({describe(each)})")
            elif not isinstance(each, CONSTANTS):
                raise NotLowered(f"is given a {type(each).__name__}")
        fakes = self.fakes = FakeInputs([*stage.held(), *tensors(list(args))])
        self.args = map_tensors(fakes.of, list(args))
        self.held = [fakes.of(each) for each in stage.held()]
        self.outputs = self._outputs()
        self._made: dict[int, Code] = {}
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
            elif not isinstance(each, CONSTANTS):
                raise NotLowered(f"gives a {type(each).__name__}")
        return outputs

    @contextmanager
    def _called(self) -> Iterator[tuple[Callable[..., Any], list[Note]]]:
        """Inside, the stage can be called with what it is to hold, and what it is given; the list has what its deferred batch
        norms note. It holds these tensors until the end: its backward may compute a part again."""
        stage = self.stage

        def call(held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
            items = iter(given)
            args = filled(stage.template, map_tensors(lambda _: next(items), self.args))
            stage.hold(held)
            with torch.set_grad_enabled(self.trains):
                outputs = nn.Module.__call__(stage.module, *args)
            if any(now is not each for now, each in zip(stage.held(), held)):
                raise NotLowered("puts another tensor in the place of a buffer")
            return outputs

        with stage.holding(self.held), _noting(stage.norms) as notes:
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

    def run(self, args: Sequence[Any], halves: bool) -> tuple[Any, Sequence[torch.Tensor]]:
        """Run F: give its outputs, and what is kept. With ``halves``, the halves of the backward will run."""
        self._halves = halves
        values = self.call(self.cut.forward, [*self.stage.held(), *tensors(args)])
        kept = values[len(self.cut.joint.outputs) :]
        items = iter(values)
        outputs = map_tensors(lambda like: next(items).detach().requires_grad_(like.requires_grad), self.outputs)
        for norm, count in self.noted:
            assert norm.note is not None
            norm.note(norm, count, next(items), next(items))
        return outputs, kept

    def call(self, piece: Piece, values: list[torch.Tensor]) -> Sequence[Any]:
        """Run a piece."""
        code = self._made.get(id(piece)) or self._code(piece)
        with torch.no_grad():
            return code(values)

    def _code(self, piece: Piece) -> Code:
        """What runs a piece. The first run of F is not compiled, so that stages behind it begin to compile meanwhile. All
        pieces are compiled for the next computation."""
        if piece is self.cut.forward and self._is_first and self.codes.compiler is not None:
            self._is_first = False
            return quick_code(piece)
        cut = self.cut
        backward = (cut.backward_input, self.weights(cut)) if self._halves else (self.whole(cut),)
        pieces = {id(each): each for each in (piece, cut.forward, *backward)}
        missing = [each for number, each in pieces.items() if number not in self._made]
        self._made.update(zip(map(id, missing), self.codes.of(missing)))
        return self._made[id(piece)]

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
            with self.stage.recording():
                fakes = [None if each is None else self.fakes.of(each) for each in tangents]
                self.backwards[key] = self._cut(fakes, [node.name for node in self.cut.kept])
        return self.backwards[key]

    @staticmethod
    def _tangent_key(tangents: Sequence[torch.Tensor | None]) -> Any:
        return tuple([None if each is None else (each.stride(), each.dtype) for each in tangents])


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
