"""Loading a state dict into a Pipe: all of it or nothing, and into every copy."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from pippy.ir.base.brief import some
from pippy.ir.base.errors import StateDictError
from pippy.ir.base.trees import describe
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.shared_tensors import get_tensor


def load_state(pipe: nn.Module, compiled: Compiled, state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Check that all of ``state`` fits, then copy it into every copy of each tensor."""
    if assign:
        raise StateDictError(
            "assign=True cannot be used, because the model and the stages would no longer share their tensors; "
            "load without it"
        )
    if not isinstance(state, Mapping):
        raise StateDictError(f"the state dict is a {type(state).__name__}; give a dict from names to tensors")
    tensors = _tensors(pipe, compiled)
    missing = [name for name in tensors if name not in state]
    extra = {name for name in pipe.state_dict() if name.endswith("_extra_state")}
    unexpected = [name for name in state if name not in tensors and name not in extra]
    faults = [
        f"{kind}: {', '.join(some(names))}" for kind, names in (("missing", missing), ("unknown", unexpected)) if names
    ]
    faults = faults if strict else []
    for name, value in state.items():
        if name in tensors and not (isinstance(value, torch.Tensor) and value.shape == tensors[name][0].shape):
            faults.append(f"{name} is {describe(value)}; the model has {describe(tensors[name][0])}")
    if faults:
        raise StateDictError(
            "the state dict does not fit the Pipe, and nothing was loaded:\n- " + "\n- ".join(some(faults))
        )
    with torch.no_grad():
        for name, value in state.items():
            for tensor in tensors.get(name, ()):
                tensor.copy_(value)
    for name in extra & state.keys():
        pipe.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
    return _IncompatibleKeys(missing, unexpected)


def _tensors(pipe: nn.Module, compiled: Compiled) -> dict[str, list[torch.Tensor]]:
    """The tensors of a state dict, by the user's names: for each, the model's own tensor and its copies."""
    names, copies = compiled.qualnames, {}
    for name, tensor in pipe.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            places = names.places.get(names.canonical.get(name, ""), ())
            copies[name] = [tensor, *(get_tensor(compiled.split_gm, place) for place in places[1:])]
    return copies
