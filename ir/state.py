"""Loading a state dict into a Pipe: all of it or nothing, and into every copy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from pippy.ir.errors import StateDictError
from pippy.ir.names import LOSS, named_state
from pippy.ir.trees import describe

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe


def load_state(pipe: "Pipe", state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Copy ``state`` into every copy of each tensor, after checking that all of it fits."""
    if assign:
        raise StateDictError("assign=True would take the tensors of the stages away from the model; load without it")
    tensors = _tensors(pipe)
    missing = [name for name in tensors if name not in state]
    extra = {name for name in pipe.state_dict() if name.endswith("_extra_state")}
    unexpected = [name for name in state if name not in tensors and name not in extra]
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
    for name in extra & state.keys():
        pipe.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
    return _IncompatibleKeys(missing, unexpected)


def _tensors(pipe: "Pipe") -> dict[str, list[torch.Tensor]]:
    """Every copy of what a state dict holds, by the user's names."""
    names, held = pipe.qualnames, dict(named_state(pipe.split_gm))
    found = {}
    for name in names.saved:
        canonical = names.canonical[name]
        found[name] = [held[place] for place in names.places.get(canonical, ())] or [names.unused[canonical]]
    if LOSS in pipe._modules and LOSS in pipe.split_gm._modules:
        own = dict(pipe.split_gm.named_parameters())
        found.update({name: [own[name]] for name, _ in pipe.named_parameters() if name in own})
    return found
