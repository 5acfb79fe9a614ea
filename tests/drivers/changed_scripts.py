"""What a script changes between two steps: a model, a loss and an optimizer with what may be changed, and the plain loop."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split

FACTOR, SETTINGS, POWER = 1.0, {"smoothing": 0.1}, 2.0


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 1, 2, 3, 0, 1, 2])


class Whole(nn.Module):
    """Kept whole, by the tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.kind, self.calls = 0.5, "tanh", 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return torch.tanh(x) if self.kind == "tanh" else F.leaky_relu(x, self.slope)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.unread = nn.Linear(4, 4), 1.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mul(self.scale).abs().add(0.1).pow(POWER) + getattr(self, "shift", 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.inner = nn.Linear(4, 4), nn.Dropout(0.0), Inner()
        self.norm, self.act = nn.BatchNorm1d(4, affine=False).eval(), nn.LeakyReLU(0.2)
        self.last = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.whole = Whole()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.whole(self.act(self.drop(self.first(x)))) + self.offset
        pipe_split()
        return self.last(self.norm(self.inner(x)))


def tuned(output: torch.Tensor, target: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    return F.cross_entropy(output, target, label_smoothing=SETTINGS["smoothing"]) * FACTOR * power


class Tuned(nn.Module):
    """A loss of the script's own, with an option and a class inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.CrossEntropyLoss(), 1.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(output, target) * self.factor


def closed() -> Any:
    factor = 1.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    loss.change = change  # type: ignore[attr-defined]
    return loss


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor
        self.register_buffer("value", torch.ones(()).double())


def holding() -> Any:
    module, factor = Factor(), torch.ones(()).double()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * module.value * factor

    loss.module, loss.factor = module, factor  # type: ignore[attr-defined]
    return loss


LOSSES: dict[str, Callable[[], Any]] = {
    "plain": nn.CrossEntropyLoss,
    "weighted": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2, 1, 1]).double()),
    "own": Tuned,
    "function": lambda: tuned,
    "partial": lambda: functools.partial(tuned, power=1.0),
    "closure": closed,
    "holding": holding,
}


class Scaled(torch.optim.SGD):
    """Reads an attribute of parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * getattr(parameter, "lr_scale", 1.0) * parameter.grad)


@dataclass
class Script:
    """What a script holds: the model, the loss, an optimizer; ``gradients()`` of it."""

    model: Net
    loss: Any
    optimizer: Any
    gradients: Callable[[], dict[str, Any]]
    zero_grad: Callable[[], None]
    step: Callable[[], Any]


@dataclass(frozen=True)
class Change:
    """``act`` takes the script, before the second step, or between a backward and an update with ``updating``."""

    act: Callable[[Script], Any]
    loss: str = "plain"
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    updating: bool = False


def plain_script(change: Change, model: Net) -> Script:
    model, loss, (x, target) = copy.deepcopy(model), LOSSES[change.loss](), batch()
    optimizer = change.optimizer(model.parameters(), **change.options)

    def step() -> torch.Tensor:
        value: torch.Tensor = loss(model(x), target)
        value.backward()
        return value.detach()

    def gradients() -> dict[str, Any]:
        return {name: each.grad for name, each in model.named_parameters()}

    return Script(model, loss, optimizer, gradients, optimizer.zero_grad, step)


def trained(script: Script, change: Change, losses: list[torch.Tensor], state: Callable[[], dict[str, Any]]) -> Any:
    """Two updates, with the change between them; then a last loss. Gives losses and parameters."""
    for step in range(2):
        if step == 1 and not change.updating:
            change.act(script)
        losses.append(script.step())
        if step == 1 and change.updating:
            change.act(script)
        script.optimizer.step()
        script.zero_grad()
    losses.append(script.step())
    return torch.stack(losses), state()


def set_here(**values: Any) -> Callable[[Script], None]:
    """Sets globals of this module."""
    return lambda script: globals().update(values)


@torch.no_grad()
def fill(tensor: Any, number: float) -> None:
    tensor.copy_(torch.full_like(tensor, number))


def assign_parameter(script: Script) -> None:
    script.model.first.weight = nn.Parameter(torch.eye(4).double())
    if type(script.optimizer) is torch.optim.SGD:  # of the plain loop, which would go on with the old one
        script.optimizer.param_groups[0]["params"][0] = script.model.first.weight


def reset() -> None:
    set_here(FACTOR=1.0, POWER=2.0)(None)  # type: ignore[arg-type]
    SETTINGS.clear()
    SETTINGS.update(smoothing=0.1)


WEIGHTS = [1.0, 2, 3, 4]

FOLLOWED: dict[str, Change] = {
    "an option of the loss": Change(lambda s: setattr(s.loss, "label_smoothing", 0.2)),
    "class weights for none": Change(lambda s: setattr(s.loss, "weight", torch.tensor(WEIGHTS).double())),
    "other class weights": Change(lambda s: setattr(s.loss, "weight", torch.tensor(WEIGHTS).double()), "weighted"),
    "class weights in place": Change(lambda s: s.loss.weight.mul_(torch.tensor(WEIGHTS)), "weighted"),
    "a buffer in a closure": Change(lambda s: s.loss.module.value.mul_(3.0), "holding"),
    "a tensor in a closure": Change(lambda s: s.loss.factor.mul_(3.0), "holding"),
    "targets that the loss ignores": Change(lambda s: setattr(s.loss, "ignore_index", 2)),
    "the reduction of the loss": Change(lambda s: setattr(s.loss, "reduction", "sum")),
    "a part of the loss": Change(lambda s: setattr(s.loss.inner, "label_smoothing", 0.2), "own"),
    "an attribute of the loss": Change(lambda s: setattr(s.loss, "factor", 0.2), "own"),
    "a keyword of a partial": Change(lambda s: s.loss.keywords.update(power=3.0), "partial"),
    "a closure": Change(lambda s: s.loss.change(3.0), "closure"),
    "an option of a layer": Change(lambda s: setattr(s.model.act, "negative_slope", 0.7)),
    "eps of a norm": Change(lambda s: setattr(s.model.norm, "eps", 0.5)),
    "a string of a part kept whole": Change(lambda s: setattr(s.model.whole, "kind", "relu")),
    "two attributes": Change(lambda s: vars(s.model.whole).update(kind="relu", slope=-2.0)),
    "frozen parameters": Change(lambda s: s.model.inner.requires_grad_(False)),
    "an attribute that nothing reads": Change(lambda s: setattr(s.model.inner, "unread", 3.0)),
    "a new attribute": Change(lambda s: setattr(s.model.inner, "new", object())),
    "a new part that is not called": Change(lambda s: setattr(s.model, "average", nn.Linear(4, 4))),
    "what forward assigns": Change(lambda s: setattr(s.model.whole, "calls", 100)),
    "the state of the optimizer cleared": Change(lambda s: s.optimizer.state.clear(), updating=True),
    "a state for the old one": Change(lambda s: setattr(s.optimizer, "state", defaultdict(dict)), updating=True),
    "attributes of parameters": Change(
        lambda s: [vars(each).update(lr_scale=0.1) for each in s.model.first.parameters()],
        optimizer=Scaled,
        options={"lr": 0.1},
        updating=True,
    ),
}


@dataclass(frozen=True)
class Refused:
    """A change that is refused, the text, and what the text advises: "load" that name, "driver" or "pipeline" again."""

    change: Change
    match: str
    advice: str
    undo: Callable[[Script], Any] | None = None


REFUSED: dict[str, Refused] = {
    "a buffer written": Refused(
        Change(lambda s: fill(s.model.offset, 0.5)), "'offset' of the model .* written", "load"
    ),
    "statistics written": Refused(Change(lambda s: fill(s.model.norm.running_var, 2.5)), "'norm.running_var'", "load"),
    "a parameter written": Refused(Change(lambda s: fill(s.model.first.weight, 0.5)), "'first.weight'", "load"),
    "its data": Refused(
        Change(lambda s: setattr(s.model.first.weight, "data", torch.eye(4).double())), "'first.weight'", "load"
    ),
    "a buffer assigned": Refused(
        Change(lambda s: setattr(s.model, "offset", torch.full((4,), 0.5).double())),
        "'offset' of the model is another tensor now",
        "pipeline",
        lambda s: setattr(s.model, "offset", torch.zeros(4).double()),
    ),
    "a parameter assigned": Refused(
        Change(assign_parameter),
        "'first.weight' of the model is another tensor now",
        "pipeline",
        lambda s: setattr(s.model.first, "weight", nn.Parameter(torch.zeros(4, 4).double())),
    ),
    "a layer replaced": Refused(
        Change(lambda s: setattr(s.model, "act", nn.Tanh())),
        r"'act' is another module now \(Tanh\(\) in place of LeakyReLU",
        "pipeline",
    ),
    "a layer of a part replaced": Refused(
        Change(lambda s: setattr(s.model.inner, "layer", nn.Identity())),
        "'inner.layer' is another module now",
        "pipeline",
        lambda s: setattr(s.model.inner, "layer", nn.Linear(4, 4).double()),
    ),
    "a number that became a constant": Refused(
        Change(lambda s: setattr(s.model.inner, "scale", 3.0)), r"'inner.scale' is 3.0 now in place of 1.5", "pipeline"
    ),
    "an attribute that tracing asked for": Refused(
        Change(lambda s: setattr(s.model.inner, "shift", 0.5)),
        "'inner.shift' is 0.5 now in place of nothing",
        "pipeline",
    ),
    "a global that forward reads": Refused(
        Change(set_here(POWER=3.0)), "the global 'POWER' of tests.* is 3.0 now in place of 2.0", "pipeline"
    ),
    "a forward replaced": Refused(
        Change(lambda s: setattr(s.model.act, "forward", torch.tanh)), "'act.forward' is .*tanh", "driver"
    ),
    "a forward of a traced part replaced": Refused(
        Change(lambda s: setattr(s.model.inner, "forward", torch.tanh)), "'inner.forward' is .*tanh", "pipeline"
    ),
}
