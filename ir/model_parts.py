"""The modules, parameters and buffers of a Pipe: those of the user's model, with its names and in its order.

So `parameters()`, `state_dict()`, `modules()`, `apply()`, clipping, optimizers, averaging and nesting work as for
the model. The stages hold the same tensors; their copies of replicated parameters are not listed.

A state dict is loaded as a whole or not at all, and into every copy.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from pippy.ir.base.errors import ModeError, StateDictError
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.readable import some
from pippy.ir.base.trees import describe
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.graph_module import install
from pippy.ir.run.in_place import get_tensor

Module = TypeVar("Module", bound=nn.Module)


class _PartFirst:
    """A method of a module. If a part of the module has the method's name, the attribute is that part."""

    def __init__(self, method: Any, name: str) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        self.method, self.name = method, name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        for parts in () if module is None else (module._parameters, module._buffers, module._modules):
            if self.name in parts:
                return parts[self.name]
        return self.method.__get__(module, owner)


def parts_come_first(cls: type[Module]) -> type[Module]:
    """Let a part of a module hide a method of the same name, if `nn.Module` does not have the method too."""
    for name in vars(cls).keys() - dir(nn.Module()):
        if not name.startswith("__"):
            setattr(cls, name, _PartFirst(vars(cls)[name], name))
    return cls


def put_model_parts(pipe: nn.Module, model: nn.Module, called: Collection[int]) -> None:
    """Put the parts of ``model`` into ``pipe``.

    ``called`` has the ids of the modules that stages call: these are put there themselves. Modules that were traced
    through become plain containers.
    """
    _fill(pipe, model, called, {})


def _fill(holder: nn.Module, module: nn.Module, called: Collection[int], containers: dict[int, nn.Module]) -> None:
    # add_module would refuse a name that the Pipe has as an attribute.
    holder._parameters.update(module._parameters)
    holder._buffers.update(module._buffers)
    holder._non_persistent_buffers_set |= module._non_persistent_buffers_set
    for name, child in module._modules.items():
        if child is not None:
            holder._modules[name] = _part(child, called, containers)


def _part(child: nn.Module, called: Collection[int], containers: dict[int, nn.Module]) -> nn.Module:
    if id(child) in called or isinstance(child, torch.jit.ScriptModule):
        return child
    if id(child) not in containers:  # a module with two names is one module here too
        container = containers[id(child)] = nn.Module()
        container.training = child.training
        _fill(container, child, called, containers)
    return containers[id(child)]


def put_loss_parameters(pipe: nn.Module, compiled: Compiled) -> None:
    """Add the parameters that only the loss has. Its buffers are settings (class weights, say), not the model's state."""
    of_model = {place for places in compiled.qualnames.places.values() for place in places}
    parameters = compiled.stage(LOSS).named_parameters()
    of_loss = [(name, parameter) for name, parameter in parameters if f"{LOSS}.{name}" not in of_model]
    if of_loss and LOSS not in pipe._modules:
        pipe._modules[LOSS] = holder = nn.Module()
        for name, parameter in of_loss:
            install(holder, name, parameter, holder)


def check_dtypes(compiled: Compiled) -> None:
    """Raise if a program that torch.export made, into which the dtypes are written, has others now."""
    for name, dtype in compiled.guards.dtypes.items():
        places = compiled.qualnames.places.get(name, ())
        if places and get_tensor(compiled.split_gm, places[0]).dtype is not dtype:
            raise ModeError(
                f"{name!r} is {get_tensor(compiled.split_gm, places[0]).dtype}, but the program was exported with "
                f"{dtype}, which torch.export writes into its operations. Convert the model first, then export it "
                "and make the Pipe"
            )


def all_tensors(pipe: nn.Module, compiled: Compiled) -> Iterator[torch.Tensor]:
    """Every tensor of the Pipe once: the model's, and those of its stages and loss."""
    tensors = {id(tensor): tensor for module in (pipe, compiled.split_gm) for _, tensor in named_state(module)}
    return iter(tensors.values())


def constants_of(pipe: nn.Module, compiled: Compiled) -> set[int]:
    """The ids of the tensors in stages that are no parameter or buffer of the model: `torch.tensor(...)` in a forward."""
    model = {id(tensor) for _, tensor in named_state(pipe)}
    places = {place for places in compiled.qualnames.places.values() for place in places}
    held = (
        (f"{stage}.{name}", tensor) for stage, module in compiled.stages() for name, tensor in module.named_buffers()
    )
    return {id(tensor) for name, tensor in held if name not in places and id(tensor) not in model}


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
