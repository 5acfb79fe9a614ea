"""What a script does between two steps: it changes an option, writes a buffer, replaces a layer, clips gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exps.habits.more_losses import SETTINGS


@dataclass(frozen=True)
class Change:
    """``act`` takes the script: its ``model``, ``loss``, ``optimizer``, and ``gradients()``."""

    act: Callable[[Any], Any]
    part: str | None = None  # which the model must have
    loss: str | None = None
    optimizer: str | None = None
    after_backward: bool = False  # between the backward and the optimizer's step, else before a step


def part_of(script: Any, kind: str) -> Any:
    return next(part for part in script.model.parts if type(part).__name__ == kind)


@torch.no_grad()
def write_buffer(script: Any) -> None:
    part_of(script, "Offsets").offset.fill_(0.5)


@torch.no_grad()
def write_parameter(script: Any) -> None:
    script.model.first.weight.mul_(0.5)


def write_data(script: Any) -> None:
    script.model.first.weight.data = torch.eye(4, dtype=torch.float64)


def load_weights(script: Any) -> None:
    script.model.first.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})


def new_parameter() -> nn.Parameter:
    return nn.Parameter(torch.eye(4, dtype=torch.float64) / 2)


def new_layer() -> nn.Module:
    layer = nn.Linear(4, 4).double()
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def edit_gradients(script: Any) -> None:
    for gradient in script.gradients().values():
        if gradient is not None:
            gradient.mul_(0.5)


def edit_model_gradients(script: Any) -> None:
    for parameter in script.model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def write_state(script: Any) -> None:
    for state in script.optimizer.state.values():
        state["momentum_buffer"].zero_()


def change_scales(script: Any) -> None:
    for parameter in script.model.first.parameters():
        parameter.lr_scale = 0.1


def set_rate(script: Any) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] = 0.1


CHANGES: dict[str, Change] = {
    "label smoothing": Change(lambda s: setattr(s.loss, "label_smoothing", 0.2), loss="options"),
    "class weights": Change(
        lambda s: setattr(s.loss, "weight", torch.tensor([2.0, 1.0, 0.5, 1.0]).double()), loss="options"
    ),
    "class weights, written": Change(
        lambda s: s.loss.weight.mul_(torch.tensor([2.0, 1, 3, 1])), loss="weighted options"
    ),
    "reduction": Change(lambda s: setattr(s.loss, "reduction", "sum"), loss="options"),
    "a global": Change(lambda s: SETTINGS.update(smoothing=0.2), loss="settings"),
    "a global factor": Change(lambda s: SETTINGS.update(factor=2.0), loss="settings"),
    "scale": Change(lambda s: setattr(part_of(s, "Scales"), "scale", 2.0), part="scaled"),
    "dropout": Change(lambda s: setattr(part_of(s, "Drops").layer, "p", 0.0), part="dropped"),
    "dropout, part in eval": Change(lambda s: part_of(s, "Drops").eval(), part="dropped"),
    "buffer written": Change(write_buffer, part="offset"),
    "buffer assigned": Change(
        lambda s: setattr(part_of(s, "Offsets"), "offset", torch.full((4,), 0.5).double()), part="offset"
    ),
    "parameter written": Change(write_parameter),
    "parameter's data": Change(write_data),
    "weights loaded": Change(load_weights),
    "parameter assigned": Change(lambda s: setattr(s.model.first, "weight", new_parameter())),
    "layer replaced": Change(lambda s: setattr(s.model, "last", new_layer())),
    "layer frozen": Change(lambda s: s.model.first.requires_grad_(False)),
    "forward replaced": Change(lambda s: setattr(s.model.last, "forward", torch.tanh)),
    "hook put on": Change(lambda s: s.model.last.register_forward_hook(lambda module, given, output: output * 2)),
    "gradient hook put on": Change(lambda s: s.model.last.weight.register_hook(lambda gradient: gradient * 2)),
    "weight norm put on": Change(lambda s: nn.utils.parametrizations.weight_norm(s.model.last)),
    "clipped": Change(lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 0.01), after_backward=True),
    "clipped by value": Change(lambda s: nn.utils.clip_grad_value_(s.model.parameters(), 0.001), after_backward=True),
    "gradients edited": Change(edit_gradients, after_backward=True),
    "gradients of the model edited": Change(edit_model_gradients, after_backward=True),
    "gradients zeroed by the model": Change(lambda s: s.model.zero_grad(), after_backward=True),
    "state cleared": Change(lambda s: s.optimizer.state.clear(), optimizer="momentum"),
    "state written": Change(write_state, optimizer="momentum"),
    "rate": Change(set_rate),
    "scaled rates": Change(change_scales, optimizer="scaled"),
    "weights of a part": Change(lambda s: nn.init.eye_(s.model.last.weight)),
}


class Scaled(torch.optim.SGD):
    """Reads an attribute of parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * getattr(parameter, "lr_scale", 1.0) * parameter.grad)


class ByPlace(torch.optim.SGD):
    """Goes by a parameter's place in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / (1 + place) * parameter.grad)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "scaled": (Scaled, {}),
    "by place": (ByPlace, {}),
}
