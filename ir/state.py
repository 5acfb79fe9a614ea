"""State dicts of a Pipe, in the user's names."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from pippy.ir.errors import StateDictError
from pippy.ir.names import LOSS, named_state
from pippy.ir.trees import describe

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe


def save_state(pipe: "Pipe", destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Write every saved name of the model, once, into ``destination``."""
    for name, copies in _tensors(pipe).items():
        destination[prefix + name] = copies[0] if keep_vars else copies[0].detach()
    return destination


def load_state(pipe: "Pipe", state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Copy ``state`` into every copy of each tensor, after checking that all of it fits."""
    if assign:
        raise StateDictError("assign=True would take the tensors of the stages away from the model; load without it")
    tensors = _tensors(pipe)
    missing = [name for name in tensors if name not in state]
    unexpected = [name for name in state if name not in tensors]
    faults = [f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("unknown", unexpected)) if names]
    faults = faults if strict else []
    for name, value in state.items():
        if name in tensors and not (isinstance(value, torch.Tensor) and value.shape == tensors[name][0].shape):
            faults.append(f"{name} is {describe(value)}; the model has {describe(tensors[name][0])}")
    if faults:
        raise StateDictError("the state dict does not fit the Pipe, and nothing was loaded:\n- " + "\n- ".join(faults))
    with torch.no_grad():
        for name, value in state.items():
            for tensor in tensors.get(name, ()):
                tensor.copy_(value)
    return _IncompatibleKeys(missing, unexpected)


def named_owners(pipe: "Pipe", remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the user's model by its names; then the parameters that only the loss has."""
    names, held = pipe.qualnames, dict(named_state(pipe.split_gm))
    for name, canonical in names.canonical.items():
        if name == canonical or not remove_duplicate:
            places = names.places.get(canonical)
            yield name, held[places[0]] if places else names.unused[canonical]
    yield from _of_loss(pipe)


def _tensors(pipe: "Pipe") -> dict[str, list[torch.Tensor]]:
    """Every copy of what a state dict holds, by the user's names."""
    names, held = pipe.qualnames, dict(named_state(pipe.split_gm))
    found = {}
    for name in names.saved:
        canonical = names.canonical[name]
        found[name] = [held[place] for place in names.places.get(canonical, ())] or [names.unused[canonical]]
    found.update({name: [tensor] for name, tensor in _of_loss(pipe)})
    return found


def _of_loss(pipe: "Pipe") -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that only the loss has. Its buffers are settings (class weights, say), not the model's state."""
    loss = pipe.split_gm._modules.get(LOSS)
    shared = {group.get(LOSS) for group in pipe.replicated_params}
    if loss is not None:
        yield from ((f"{LOSS}.{name}", tensor) for name, tensor in loss.named_parameters() if name not in shared)
