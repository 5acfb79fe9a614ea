"""Tensors that are changed in place: how to tell, what they were before, and what a stage must not change.

Torch counts the changes of a tensor in place. It does not count what some kernels do to the statistics of a batch
normalization, nor changes of a tensor that was made in inference mode. Of these a copy can tell: a `Snapshot`.

a layer changes its buffer, which         the next stage gets a copy, as it would on another worker (`apart_from`)
  it has handed out
a layer changes its buffer, which         autograd finds that it has changed since, and the error says which it is
  a backward needs                          (`changed_since`)
a stage changes what it was given         others would see it in the plain model. Between workers each stage has a copy, and in
                                            one process they share memory: both give an error (`check_inputs`)
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn

from pippy.ir.base.errors import SharedParameterError, StageError
from pippy.ir.base.source import excerpt_of
from pippy.ir.base.trees import map_tensors, tensors


def get_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of ``module`` with this qualified name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def memory_of(value: Any) -> int | None:
    """What tensors have in common that share memory; None for what is no tensor with strides."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, ValueError):  # a tensor of torch.func, which wraps another; a lazy parameter
        return None


_Key = TypeVar("_Key", bound=Hashable)


class Snapshot(Generic[_Key]):
    """Tensors by their keys, with copies of those that are ``copied``. With ``compares``, these tell of changes, too.

    The mapping is kept, and must stay as it is: it is not copied, as a snapshot is made for each computation.

    >>> x = torch.zeros(2)
    >>> snapshot = Snapshot({"x": x}, copied=["x"])
    >>> x += 1
    >>> snapshot.changed()
    ['x']
    >>> snapshot.restore()
    >>> x
    tensor([0., 0.])
    """

    __slots__ = ("compares", "copies", "tensors", "versions")

    def __init__(
        self, tensors: Mapping[_Key, torch.Tensor], copied: Collection[_Key] = (), compares: bool = False
    ) -> None:
        self.tensors, self.compares = tensors, compares
        self.versions = versions_of(tensors.values())
        self.copies = dict(zip(copied, copies_of([self.tensors[key] for key in copied]))) if copied else {}

    def changed(self, now: Mapping[_Key, torch.Tensor] | None = None) -> list[_Key]:
        """The keys of the tensors that were changed since. Those that were replaced are others ``now``."""
        if now is None and not self.compares and versions_of(self.tensors.values()) == self.versions:
            return []  # soon, as it is asked after each computation
        before = dict(zip(self.tensors, self.versions))
        tensors = (self.tensors if now is None else now).items()
        return [key for key, tensor in tensors if self._is_changed(key, tensor, before.get(key))]

    def _is_changed(self, key: _Key, tensor: torch.Tensor, version: int | None) -> bool:
        if tensor is not self.tensors.get(key) or versions_of([tensor]) != [version]:
            return True
        is_compared = self.compares and key in self.copies and tensor.layout is torch.strided
        return is_compared and not torch.equal(tensor, self.copies[key])

    def restore(self) -> None:
        """Copy the old numbers into the tensors that were changed, of which there are copies."""
        with torch.no_grad():
            for key in self.changed():
                self.tensors[key].copy_(self.copies[key])


def snapshot_of_buffers(buffers: Mapping[_Key, torch.Tensor]) -> Snapshot[_Key]:
    """Buffers, with copies of those that may be the statistics of a norm."""
    copied = [key for key, each in buffers.items() if each.dim() <= 1 and each.is_floating_point()]
    return Snapshot(buffers, copied, compares=True)


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """How often each tensor has been changed in place. Torch does not count that of those made in inference mode."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # to ask each tensor first takes longer
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors. Those that share memory get copies that share memory.

    >>> x = torch.zeros(3)
    >>> one, other = copies_of([x, x[1:]])
    >>> other[0] = 5
    >>> one
    tensor([0., 5., 0.])
    """
    memories = [memory_of(tensor) for tensor in tensors]
    users = Counter(memories)
    storages: dict[int, torch.UntypedStorage] = {}
    return [
        tensor.detach().clone()
        if memory is None or users[memory] == 1
        else _on(storages.setdefault(memory, _cloned(storages, memory, tensor)), tensor)
        for tensor, memory in zip(tensors, memories)
    ]


def _cloned(storages: dict[int, torch.UntypedStorage], memory: int, tensor: torch.Tensor) -> torch.UntypedStorage:
    return storages[memory] if memory in storages else tensor.untyped_storage().clone()


def _on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


_OTHER_VERSION = re.compile(r"modified by an inplace operation: \[\S+ \[(.*?)\]\].* is at version (\d+)")


def memory_of_layers(module: nn.Module) -> frozenset[int]:
    """The memory of the buffers, and of other tensors, that layers of the user's own hold, which tracing did not look into."""
    return frozenset(
        memory for _, tensor in _tensors_of_layers(module, own_layers=True) if (memory := memory_of(tensor)) is not None
    )


def apart_from(memory: frozenset[int], value: Any) -> Any:
    """``value`` with copies of the tensors inside it that are of this memory.

    >>> held = torch.zeros(2)
    >>> out = apart_from(frozenset([memory_of(held)]), (held[:1], 7))
    >>> held += 1
    >>> out
    (tensor([0.]), 7)
    """
    return map_tensors(lambda tensor: tensor.clone() if memory_of(tensor) in memory else tensor, value)


def changed_since(module: nn.Module, error: Exception) -> str | None:
    """What to do if a backward failed because a tensor that it needs has changed; None if it failed otherwise."""
    match = _OTHER_VERSION.search(str(error))
    if match is None:
        return None
    shape, version = match.groups()
    names = [
        f"{name!r}{owner}"
        for name, owner, tensor in _named(module)
        if tensor._version == int(version) and ", ".join(map(str, tensor.shape)) == shape
    ]
    which = " or ".join(dict.fromkeys(names)) or "a tensor that the stage holds"
    return (
        f"What to do: {which} was changed in place by the forward of a later micro-batch, and this backward needs it as it was "
        "before; compute with a copy, self.name.clone(), or take a schedule with one micro-batch (chunks=1)"
    )


def _named(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, tensor in _tensors_of_layers(module, own_layers=False):
        holder = module.get_submodule(name.rpartition(".")[0])
        yield name, "" if is_of_torch(holder) else f" (of {type(holder).__name__})", tensor


def _tensors_of_layers(module: nn.Module, own_layers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        if own_layers and is_of_torch(part):
            continue
        for name, value in {**part._buffers, **part.__dict__}.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module is torch's own, or a graph."""
    return isinstance(module, fx.GraphModule) or type(module).__module__.startswith("torch.")


NamedInputs = Sequence[tuple[int, str]]  # inputs of a stage, by number and name
_IN_TORCH = ("torch", "_operator", "operator", "builtins", "math")


def input_versions(inputs: Sequence[Any], seen: NamedInputs) -> list[Any]:
    """How often the tensors in these inputs of a stage were changed in place, before it runs or after it.

    >>> x = torch.zeros(2)
    >>> before = input_versions([x], [(0, "x")])
    >>> x += 1
    >>> input_versions([x], [(0, "x")]) == before
    False
    """
    try:  # a snapshot would take longer, and this is done for each computation
        return [
            value._version if type(value := inputs[index]) is torch.Tensor else versions_of(list(tensors(value)))
            for index, _ in seen
        ]
    except RuntimeError:  # a tensor of inference mode
        return [versions_of(list(tensors(inputs[index]))) for index, _ in seen]


def check_inputs(before: list[Any], inputs: Sequence[Any], seen: NamedInputs, stage: str, module: nn.Module) -> None:
    """Raise if an input was changed in place since."""
    now = input_versions(inputs, seen)
    if now != before:
        name = next(name for (_, name), one, other in zip(seen, before, now) if one != other)
        raise StageError(
            f"{stage} changed its input {name!r} in place, in code that tracing does not see. In the plain model, "
            "the change is seen by all code that has this tensor: another stage, the caller, the model itself. A "
            "stage has a copy, so here the change would be lost.\n"
            + "".join(f"{line}\n" for line in _places(module, name))
            + "What to do: use the operation that makes a new tensor there. If no other code needs the change, "
            "pass a copy, value.clone()"
        )


@contextmanager
def check_unchanged(stage: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """A context that raises at its end if ``module`` has changed one of these tensors, which other stages hold, in place."""
    before = Snapshot({name: get_tensor(module, name) for name in names})
    yield
    changed = before.changed()
    if changed:
        raise SharedParameterError(
            f"{stage} changed {', '.join(map(repr, changed))} in place, which other stages hold too; their copies would "
            "drift apart. Move the split so that one stage makes every use, or give each use a buffer of its own"
        )


def _places(module: nn.Module, name: str) -> Iterator[str]:
    """The lines that hand an input, or a view of it, to code that tracing did not look into."""
    if not isinstance(module, fx.GraphModule):
        yield f"  {module!r}"
        return
    reached = {node for node in module.graph.nodes if node.op == "placeholder" and node.name == name}
    lines = []
    for node in module.graph.nodes:
        if reached.intersection(node.all_input_nodes) and node.op != "output":
            reached.add(node)
            lines += [node] if _is_opaque(node, module) else []
    if lines:
        yield "it is handed to code that was not traced here:"
        yield from dict.fromkeys(map(excerpt_of, lines))


def _is_opaque(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return not type(module.get_submodule(str(node.target))).__module__.startswith(
            "torch.nn.modules."
        ) or isinstance(module.get_submodule(str(node.target)), nn.Sequential)
    owner = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and owner.partition(".")[0] not in (*_IN_TORCH, "pippy")
