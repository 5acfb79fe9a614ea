"""Parameters and buffers that several stages use: transmitted, replicated, or, where nobody changes them, just read.

A parameter that is TRANSMITted lives in the first stage that uses it and travels to the others as a value; its gradient
comes back through the graph. A REPLICATEd one has a copy in each stage. A leaf module brings its parameters with it, so
what several stages need from leaf modules can only be replicated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.cut.effects import Mutation
from pippy.ir.errors import SharedParameterError
from pippy.ir.names import first_names, stage_name, unknown_name
from pippy.ir.run.shared_tensors import has_gradient_hooks
from pippy.ir.source import excerpt_of


class MultiUseParameterConfig(Enum):
    """What to do with a parameter that several stages use.

    >>> MultiUseParameterConfig("transmit")
    <MultiUseParameterConfig.TRANSMIT: 'transmit'>
    """

    TRANSMIT = "transmit"
    REPLICATE = "replicate"


MultiUseParamSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig] | None


@dataclass
class SharedTensor:
    """One tensor of the model and the stages that use it: by name in the code, or inside a leaf module."""

    name: str
    tensor: torch.Tensor
    by_name: set[int] = field(default_factory=set)
    by_leaf: set[int] = field(default_factory=set)

    @property
    def stages(self) -> list[int]:
        return sorted(self.by_name | self.by_leaf)

    @property
    def can_travel(self) -> bool:
        """Whether the first user can own it and every other user take it as a value."""
        return self.by_leaf <= set(self.stages[:1])


@dataclass
class Sharing:
    """The decision for every tensor that several stages use. Keys are ids of the model's tensors."""

    transmitted: dict[int, SharedTensor] = field(default_factory=dict)
    replicated: dict[int, SharedTensor] = field(default_factory=dict)


def decide(
    model: nn.Module, used: Iterable[SharedTensor], mutations: Iterable[Mutation], spec: MultiUseParamSpec
) -> Sharing:
    """Say for each tensor that several stages use how they share it."""
    config = config_by_tensor(model, spec)
    changed = {str(mutation.root.target): mutation.node for mutation in mutations if mutation.root.op == "get_attr"}
    sharing = Sharing()
    for shared in used:
        if len(shared.stages) < 2:
            continue
        if shared.name in changed:
            _check_single_writer(shared, changed[shared.name])
            sharing.transmitted[id(shared.tensor)] = shared
        elif isinstance(shared.tensor, nn.Parameter):
            kind = _kind(shared, config.get(id(shared.tensor)), spec)
            table = sharing.transmitted if kind is MultiUseParameterConfig.TRANSMIT else sharing.replicated
            table[id(shared.tensor)] = shared
        elif shared.tensor.requires_grad:
            if not shared.can_travel:
                raise SharedParameterError(
                    f"{shared.name!r} requires a gradient but is no nn.Parameter, and {_users(shared)} use it; make it one"
                )
            sharing.transmitted[id(shared.tensor)] = shared
    return sharing


def config_by_tensor(model: nn.Module, spec: MultiUseParamSpec) -> dict[int, tuple[str, MultiUseParameterConfig]]:
    """The user's choices by the identity of the tensor, since a tied parameter has several names."""
    if spec is None or isinstance(spec, MultiUseParameterConfig):
        return {}
    if not isinstance(spec, Mapping):
        raise SharedParameterError(
            f"multi_use_param_spec is {spec!r}; give MultiUseParameterConfig.TRANSMIT or .REPLICATE, or a dict from "
            "parameter names to one of them"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    config: dict[int, tuple[str, MultiUseParameterConfig]] = {}
    for name, kind in spec.items():
        if name not in parameters:
            raise SharedParameterError("multi_use_param_spec: " + unknown_name("parameter", str(name), parameters))
        if not isinstance(kind, MultiUseParameterConfig):
            raise SharedParameterError(
                f"multi_use_param_spec[{name!r}] is {kind!r}; give MultiUseParameterConfig.TRANSMIT or .REPLICATE"
            )
        other, before = config.setdefault(id(parameters[name]), (name, kind))
        if before is not kind:
            raise SharedParameterError(
                f"multi_use_param_spec says {before.name} for {other!r} and {kind.name} for {name!r}, but both are names "
                "of one tied parameter; say the same for both"
            )
    return config


def _kind(
    shared: SharedTensor, chosen: tuple[str, MultiUseParameterConfig] | None, spec: MultiUseParamSpec
) -> MultiUseParameterConfig:
    transmit, replicate = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE
    if chosen is not None:
        name, kind = chosen
        if kind is transmit and not shared.can_travel:
            raise SharedParameterError(
                f"multi_use_param_spec asks to TRANSMIT {name!r}, but {_users(shared)} use it inside a leaf module, which "
                "cannot take a parameter as a value; say REPLICATE, or trace through that module with a tracer of your own"
            )
        return kind
    if spec is replicate or not shared.can_travel:
        return replicate
    return transmit


def _users(shared: SharedTensor) -> str:
    return ", ".join(map(stage_name, shared.stages))


def _check_single_writer(shared: SharedTensor, writer: fx.Node) -> None:
    """A tensor that changes in place can be followed only from the first stage that uses it to later ones."""
    stage = writer.meta["stage"]
    if stage != shared.stages[0] or not shared.can_travel:
        raise SharedParameterError(
            f"{shared.name!r} is changed in place in {stage_name(stage)} and used in {_users(shared)}: each stage works on "
            f"another micro-batch, so they cannot see each other's change.\n{excerpt_of(writer)}\n"
            "What to do: move the split so that one stage holds every use, or use it only at and after the stage that "
            "changes it, outside of leaf modules"
        )


def check_leaf(path: str, module: nn.Module, stages: list[int]) -> None:
    """Refuse a module that several stages call and that is known to change its buffers at each call."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    if norms and any(norm.training for norm in norms):
        users = ", ".join(map(stage_name, stages))
        raise SharedParameterError(
            f"{path!r} ({type(module).__name__}) updates its running statistics at each call, and {users} all call it: their "
            "copies would drift apart. Move the split so that one stage makes every call, or give each call a module of "
            "its own"
        )


def replicas(sharing: Sharing) -> dict[int, dict[int, torch.Tensor]]:
    """For each stage, what stands in for the model's replicated tensors: the first user keeps the tensor itself."""
    copies: dict[int, dict[int, torch.Tensor]] = {}
    for key, shared in sharing.replicated.items():
        for stage in shared.stages[1:]:
            copies.setdefault(stage, {})[key] = _copy(shared)
    return copies


def _copy(shared: SharedTensor) -> torch.Tensor:
    tensor = shared.tensor
    if has_gradient_hooks(tensor):
        raise SharedParameterError(
            f"{shared.name!r} has gradient hooks, and {_users(shared)} would each have a copy of it, with a part of the "
            "gradient: say TRANSMIT for it, or take the hooks off"
        )
    replica = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    replica.__dict__.update(tensor.__dict__)
    return replica


def replicated_names(
    sharing: Sharing, stages: Mapping[int, nn.Module], copies: Mapping[int, Mapping[int, Any]]
) -> list[dict[str, str]]:
    """Each replicated parameter as a dict from stage to its name there, in the model's order."""
    names = {stage: first_names(module) for stage, module in stages.items()}
    groups = []
    for key, shared in sharing.replicated.items():
        held = {stage: copies.get(stage, {}).get(key, shared.tensor) for stage in shared.stages}
        groups.append({stage_name(stage): names[stage][id(tensor)] for stage, tensor in held.items()})
    return groups
