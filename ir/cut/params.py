"""How several stages share a parameter or a buffer: it is transmitted or replicated, or all read it, if none changes it.

A parameter that is TRANSMITted belongs to the first stage that uses it and is sent to the others as a value; its gradient
comes back through the graph. A REPLICATEd parameter has a copy in each stage. A leaf module holds its parameters, so
a parameter inside leaf modules of several stages can only be replicated.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import SharedParameterError
from pippy.ir.base.names import first_names, stage_name, unknown_name
from pippy.ir.base.readable import brief


class MultiUseParameterConfig(Enum):
    """What to do with a parameter that several stages use.

    >>> MultiUseParameterConfig("transmit")
    <MultiUseParameterConfig.TRANSMIT: 'transmit'>
    """

    TRANSMIT = "transmit"
    REPLICATE = "replicate"


MultiUseParamSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig] | None


@dataclass
class TensorUses:
    """What uses a tensor, by its name or as a leaf module that holds it: the numbers of operations, or of stages."""

    name: str
    tensor: torch.Tensor
    by_name: list[int] = field(default_factory=list)
    by_leaf: list[int] = field(default_factory=list)

    @property
    def all(self) -> list[int]:
        """The numbers of both kinds, each once, in their order; none for a tensor that the forward does not use."""
        return sorted({*self.by_name, *self.by_leaf})

    @property
    def can_travel(self) -> bool:
        """Whether the first stage that uses it can send it to the others as a value."""
        return set(self.by_leaf) <= set(self.all[:1])


@dataclass
class Sharing:
    """How the tensors that several stages use are shared. Keys are ids of the model's tensors."""

    transmitted: dict[int, TensorUses] = field(default_factory=dict)
    replicated: dict[int, TensorUses] = field(default_factory=dict)


def decide(model: nn.Module, used: Iterable[TensorUses], changed: Collection[int], spec: MultiUseParamSpec) -> Sharing:
    """Decide for each tensor that several stages use how they share it.

    The constraints on the cuts were checked before. ``changed`` has the ids of the tensors that the graph changes in
    place: later stages get them as values from the stage that changes them.
    """
    config = config_by_tensor(model, spec)
    sharing = Sharing()
    for shared in used:
        key = id(shared.tensor)
        if len(shared.all) < 2:
            continue
        if key not in changed and isinstance(shared.tensor, nn.Parameter):
            copied = is_to_replicate(config.get(key), spec) or not shared.can_travel
            (sharing.replicated if copied else sharing.transmitted)[key] = shared
        elif key in changed:
            sharing.transmitted[key] = shared
    return sharing


def config_by_tensor(model: nn.Module, spec: MultiUseParamSpec) -> dict[int, tuple[str, MultiUseParameterConfig]]:
    """The user's choices by the id of the tensor, since a tied parameter has several names."""
    if spec is None or isinstance(spec, MultiUseParameterConfig):
        return {}
    if not isinstance(spec, Mapping):
        raise SharedParameterError(
            f"multi_use_param_spec is {brief(spec)}; give MultiUseParameterConfig.TRANSMIT or .REPLICATE, or a dict from "
            "parameter names to one of them"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    config: dict[int, tuple[str, MultiUseParameterConfig]] = {}
    for name, kind in spec.items():
        if name not in parameters:
            raise SharedParameterError("multi_use_param_spec: " + unknown_name("parameter", str(name), parameters))
        if not isinstance(kind, MultiUseParameterConfig):
            raise SharedParameterError(
                f"multi_use_param_spec[{brief(name)}] is {brief(kind)}; give MultiUseParameterConfig.TRANSMIT or .REPLICATE"
            )
        other, before = config.setdefault(id(parameters[name]), (name, kind))
        if before is not kind:
            raise SharedParameterError(
                f"multi_use_param_spec says {before.name} for {other!r} and {kind.name} for {name!r}, but both are names "
                "of one tied parameter; say the same for both"
            )
    return config


def is_to_replicate(chosen: tuple[str, MultiUseParameterConfig] | None, spec: MultiUseParamSpec) -> bool:
    """Whether the user asked for copies of a parameter. ``chosen`` is what `config_by_tensor` has for it."""
    return MultiUseParameterConfig.REPLICATE in (spec, chosen[1] if chosen else None)


def replicas(sharing: Sharing) -> dict[int, dict[int, torch.Tensor]]:
    """The copies of replicated tensors in each stage. The first stage that uses a tensor has no copy, but the tensor."""
    copies: dict[int, dict[int, torch.Tensor]] = {}
    for key, shared in sharing.replicated.items():
        for stage in shared.all[1:]:
            copies.setdefault(stage, {})[key] = replica_of(shared.tensor)
    return copies


def replica_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, for another stage or the loss."""
    replica = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    replica.__dict__.update(tensor.__dict__)
    return replica


def replicated_names(
    sharing: Sharing, stages: Mapping[int, nn.Module], copies: Mapping[int, Mapping[int, Any]]
) -> list[dict[str, str]]:
    """For each replicated parameter, in the model's order, a dict from the stages to its name in the stage."""
    names = {stage: first_names(module) for stage, module in stages.items()}
    groups = []
    for key, shared in sharing.replicated.items():
        held = {stage: copies.get(stage, {}).get(key, shared.tensor) for stage in shared.all}
        groups.append({stage_name(stage): names[stage][id(tensor)] for stage, tensor in held.items()})
    return groups
