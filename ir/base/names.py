"""Qualified names: a stage's names for tensors and modules, and the user's names for them.

A name in a Pipe is the name of the stage and the user's name: ``lin.weight`` of the model is ``submod_1.lin.weight`` there. If
a graph module needs the first part of a name for itself (``graph``, ``code``, …), a ``_`` is added to this part. A stage that
calls the model as a whole has it as ``_model``: ``submod_0._model.lin.weight``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from pippy.ir.base.errors import NameLookupError
from pippy.ir.base.readable import brief, did_you_mean

LOSS = "_loss"
_STAGE = re.compile(r"submod_(\d+)")
_MODEL = "_model"
_RESERVED = frozenset([*dir(fx.GraphModule(nn.Module(), fx.Graph())), _MODEL])


def stage_name(index: int) -> str:
    """The name of a stage's module.

    >>> stage_name(3)
    'submod_3'
    """
    return f"submod_{index}"


def stage_index(name: str) -> int | None:
    """The number in a stage's name; None if it is not the name of a stage.

    >>> stage_index("submod_3"), stage_index("_loss")
    (3, None)
    """
    match = _STAGE.fullmatch(name)
    return int(match[1]) if match else None


def local_name(user_name: str) -> str:
    """The name in a stage of the tensor or module that the user calls ``user_name``.

    >>> local_name("encoder.graph"), local_name("graph.weight")
    ('encoder.graph', 'graph_.weight')
    >>> local_name("")
    '_model'
    """
    first, dot, rest = user_name.partition(".")
    if not first:
        return _MODEL
    if first.rstrip("_") in _RESERVED and user_name != "training":
        first += "_"
    return first + dot + rest


def user_name(local: str) -> str:
    """The inverse of `local_name`.

    >>> user_name(local_name("graph_.weight"))
    'graph_.weight'
    >>> user_name("_model.encoder.weight")
    'encoder.weight'
    """
    first, dot, rest = local.partition(".")
    if first == _MODEL:
        return rest
    if first.endswith("_") and first.rstrip("_") in _RESERVED:
        first = first[:-1]
    return first + dot + rest


@dataclass
class Qualnames:
    """The names of every parameter and buffer of the user's model, in the model and in the stages.

    ``canonical`` maps each of the user's names to the first name of the same tensor; ``places`` maps a canonical name
    to the stage-local names of its copies, the owner first; ``unused`` holds the tensors that no stage uses; ``saved``
    lists the names in a state dict, in the model's order; ``read_by_several`` has for each stage its names of the tensors
    that other stages hold too.
    """

    canonical: dict[str, str]
    saved: tuple[str, ...]
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unused: dict[str, torch.Tensor] = field(default_factory=dict)
    read_by_several: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def remap(self, local: str) -> str:
        """The user's name of a tensor or module, from its stage-local name."""
        head, _, rest = (local if isinstance(local, str) else "").removeprefix("split_gm.").partition(".")
        if head == LOSS:
            return next((name for name, places in self.places.items() if local in places), local)
        if stage_index(head) is None or not rest:
            raise NameLookupError(
                f"{brief(local)} is no name inside a stage; such names look like 'submod_0.layer.weight'"
            )
        return user_name(rest)

    def locate(self, name: str) -> tuple[str, ...]:
        """The stage-local names of all copies of the tensor that the user calls ``name``; empty if no stage uses it."""
        if not isinstance(name, str):
            raise NameLookupError(
                f"{brief(name)} is a {type(name).__name__}; give the name of a parameter or buffer, a str"
            )
        if name not in self.canonical and name.startswith(f"{LOSS}."):
            return (name,)
        if name not in self.canonical:
            raise NameLookupError(unknown_name("parameter or buffer", name, self.canonical))
        return self.places.get(self.canonical[name], ())

    def note_readers(self, name: str) -> None:
        """Note in `read_by_several` who holds a tensor, if several do."""
        held = [each.partition(".") for each in self.places[name]]
        for stage, _, local in held if len(held) > 1 else ():
            self.read_by_several[stage] = tuple(dict.fromkeys((*self.read_by_several.get(stage, ()), local)))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of an error about a name that does not exist."""
    known = list(known)
    hint = did_you_mean(name, known) or f"it has {', '.join(map(repr, known[:8])) or 'none'}"
    return f"the model has no {kind} named {brief(name)}; {hint}"


def named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers with their names; a tensor with several names comes once for each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def first_names(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by the tensor's id."""
    names: dict[int, str] = {}
    for name, tensor in named_state(module):
        names.setdefault(id(tensor), name)
    return names


def qualnames_of(model: nn.Module) -> Qualnames:
    """The names of ``model``, without the names in stages, which `place` adds."""
    first = first_names(model)
    canonical = {name: first[id(tensor)] for name, tensor in named_state(model)}
    saved = tuple(name for name in model.state_dict(keep_vars=True) if name in canonical)
    return Qualnames(canonical, saved)


def place(names: Qualnames, model: nn.Module, stages: Mapping[str, nn.Module]) -> None:
    """Fill in which of ``stages`` hold each tensor of ``model``, and by which name."""
    places: dict[str, list[str]] = {}
    for stage, module in stages.items():
        seen: set[str] = set()
        for local, _ in named_state(module):
            name = names.canonical.get(user_name(local))
            if name is not None and name not in seen:
                seen.add(name)
                places.setdefault(name, []).append(f"{stage}.{local}")
    names.places = {name: tuple(qualnames) for name, qualnames in places.items()}
    tensors = {name: tensor for name, tensor in named_state(model) if names.canonical[name] == name}
    names.unused = {name: tensor for name, tensor in tensors.items() if name not in places}
    for name in names.places:
        names.note_readers(name)
