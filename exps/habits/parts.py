"""Layers with habits: they mix rows, keep buffers, have hooks, share parameters, or add terms to the loss.

Each part maps values of ``WIDTH`` features to such values. Some also give a term of the loss, made in the stage where they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

WIDTH = 4


def norms(h: Any) -> Any:
    """One for each row."""
    return h.flatten(1).norm(dim=1)


# What is computed of the values, without parameters.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh,
    "viewed": lambda h: (h.unflatten(-1, (2, 2)).transpose(-1, -2) * 2).flatten(-2),
    "in place": lambda h: (h * 1).mul_(0.5).add_(1),
    "centred": lambda h: h - h.mean(0),
    "softmax over rows": lambda h: h * h.softmax(0),
    "by the largest": lambda h: h / h.abs().max().detach(),
    "flipped": lambda h: h + h.flip(0),
    "cumulated": lambda h: h + 0.1 * h.cumsum(0),
    "first row": lambda h: h - h[:1],
    "constant rows": lambda h: h + torch.ones_like(h).mean(0),
    "by deviation": lambda h: h / (h.std(0) + 1),
    "deviation as a value": lambda h: h + h.std(0).mean(),
    "six rows": lambda h: torch.cat([h[:6] * 2, h[6:]]),
    "six rows are enough": lambda h: h * 2 if h.shape[0] > 6 else h,
    "six largest rows": lambda h: (
        h * (norms(h) >= norms(h).topk(min(6, h.shape[0])).values.min()).view(-1, *[1] * (h.dim() - 1))
    ),
}
MIXING = ("centred", "softmax over rows", "by the largest", "flipped", "cumulated", "first row")


def kept(x: Any) -> Any:
    """Which rows, or tokens, are no padding: that of inputs is 0."""
    return x[..., 0] != 0


# Terms of the loss, of a part's values and the model's input.
TERMS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda h, x: 0.1 * h.square().mean(),
    "sum": lambda h, x: 0.1 * h.square().sum(),
    "mean of rows": lambda h, x: 0.1 * h.square().sum(-1).mean(),
    "root of a mean": lambda h, x: 0.1 * (h.square().mean() + 1).sqrt(),
    "masked mean": lambda h, x: 0.1 * (h.square().mean(-1) * kept(x)).sum() / kept(x).sum(),
    "selected mean": lambda h, x: 0.1 * h[kept(x)].square().mean(),
    "confident": lambda h, x: 0.1 * h[(h.detach() > 0.9).any(-1)].square().sum() / h.shape[0],
    "mean of the confident": lambda h, x: 0.1 * h[h.detach().softmax(-1).amax(-1) > 0.3].square().mean(),
    "six rows": lambda h, x: 0.1 * h[:6].square().mean(),
    "deviation": lambda h, x: 0.1 * h.var(0).mean(),
    "largest": lambda h, x: 0.1 * h.abs().max(),
}
ADDING_UP = ("mean", "mean of rows")  # if losses are weighted by rows


class Computes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, h: Any, x: Any) -> Any:
        return FUNCTIONS[self.what](h)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h))


class Shares(nn.Module):
    """Uses the model's shared weight."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.weight = shared

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(h @ self.weight)


class Skip(nn.Module):
    """Adds the model's input, which may come from another stage."""

    def forward(self, h: Any, x: Any) -> Any:
        return h + 0.5 * x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h))


class Dropout(nn.Module):
    """Its probability is set to 0 where numbers are compared with those of a model that draws others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.3)

    def forward(self, h: Any, x: Any) -> Any:
        return self.layer(h)


class Adds(nn.Module):
    """Adds a term to the loss."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        h = torch.tanh(self.layer(h))
        return h, TERMS[self.what](h, x)


class Decays(nn.Module):
    """Adds a penalty on its own weights, whatever the rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h)), 0.1 * self.layer.weight.square().sum()


class Experts(nn.Module):
    """A mixture of two experts, with the usual loss that balances their load."""

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.gate, self.coefficient = nn.Linear(WIDTH, 2), coefficient
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Any, x: Any) -> Any:
        shares = self.gate(h).softmax(-1)
        h = sum(shares[..., index : index + 1] * expert(h) for index, expert in enumerate(self.experts))
        chosen = F.one_hot(shares.argmax(-1), 2).to(shares.dtype)
        of_all = [each.flatten(0, -2).mean(0) for each in (chosen, shares)]
        return torch.tanh(h), self.coefficient * 2 * (of_all[0] * of_all[1]).sum()


class Keeps(nn.Module):
    """Updates a buffer in each forward, and may use it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(WIDTH, WIDTH)
        self.state: Tensor
        self.register_buffer("state", torch.zeros(() if what in ("count", "rows") else WIDTH))

    def forward(self, h: Any, x: Any) -> Any:
        h = torch.tanh(self.layer(h))
        rows = h.detach().flatten(0, -2)
        with torch.no_grad():
            if self.what == "count":
                self.state.add_(1)
            elif self.what == "count, assigned":
                self.state = self.state + 1
            elif self.what == "rows":
                self.state.add_(rows.new_ones(()).expand(rows.size(0)).sum())
            elif self.what == "largest":
                self.state.copy_(torch.maximum(self.state, rows.amax(0)))
            elif self.what == "sum":
                self.state.add_(rows.sum(0))
            else:  # a running mean
                self.state.lerp_(rows.mean(0), 0.1)
        return h - 0.1 * self.state if self.what == "mean, used" else h


BUFFERS = ("count", "count, assigned", "rows", "largest", "sum", "mean", "mean, used")


class Normalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return self.layer(h.flatten(0, -2)).unflatten(0, h.shape[:-1])


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return self.layer(h)


class Shuffles(nn.Module):
    """Mixes rows by a random permutation; where numbers are compared, by one that is the same each time."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = True

    def forward(self, h: Any, x: Any) -> Any:
        return h + 0.1 * (h[torch.randperm(h.shape[0])] if self.draws else h.roll(1, 0))


class Scales(nn.Module):
    """By a number, which the script may change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, h: Any, x: Any) -> Any:
        return h * self.scale


class Drops(nn.Module):
    """Drops all of a copy, until the script lowers the probability to 0, or switches it off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(1.0)

    def forward(self, h: Any, x: Any) -> Any:
        return 0.5 * h + self.layer(h)


class Offsets(nn.Module):
    """By a buffer, which the script may write."""

    def __init__(self) -> None:
        super().__init__()
        self.offset: Tensor
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, h: Any, x: Any) -> Any:
        return h + self.offset


class Spectral(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer = norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h))


def scale_output(module: nn.Module, arguments: Any, output: Any) -> Any:
    return output * 1.5


def scale_input(module: nn.Module, arguments: Any) -> Any:
    return (arguments[0] * 1.5,)


def scale_gradient(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(each * 1.5 for each in gradients)


def first_rows_only(gradient: Tensor) -> Tensor:
    """What trains only some rows of a weight."""
    gradient = gradient.clone()
    gradient[1:] = 0
    return gradient


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


# How a hook of each kind is put on a linear layer.
HOOKS: dict[str, Callable[[nn.Linear], RemovableHandle]] = {
    "forward": lambda layer: layer.register_forward_hook(scale_output),
    "before forward": lambda layer: layer.register_forward_pre_hook(scale_input),
    "backward": lambda layer: layer.register_full_backward_hook(scale_gradient),
    "some rows": lambda layer: layer.weight.register_hook(first_rows_only),
    "clipped": lambda layer: layer.weight.register_hook(clipped),
    "afterwards": lambda layer: layer.weight.register_post_accumulate_grad_hook(halve),
}


class Hooked(Linear):
    """Its hook is put on when the model is made, or after it was cut."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def put_on(self) -> RemovableHandle:
        return HOOKS[self.what](self.layer)


class HookedShares(Shares):
    """The weight that stages share has a hook."""

    def put_on(self) -> RemovableHandle:
        return self.weight.register_hook(clipped)


class HooksValues(nn.Module):
    """A hook on a value."""

    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1
        if h.requires_grad:
            h.register_hook(clipped)
        return h


# Each kind of part, made for a model with this shared weight.
PARTS: dict[str, Callable[[nn.Parameter], nn.Module]] = {
    **{name: lambda _, name=name: Computes(name) for name in FUNCTIONS},  # type: ignore[misc]
    "linear": lambda _: Linear(),
    "shared": Shares,
    "shared, hooked": HookedShares,
    "skip": lambda _: Skip(),
    "frozen": lambda _: Frozen(),
    "dropout": lambda _: Dropout(),
    "layer norm": lambda _: LayerNorm(),
    "scaled": lambda _: Scales(),
    "dropped": lambda _: Drops(),
    "offset": lambda _: Offsets(),
    "shuffled": lambda _: Shuffles(),
    "decay": lambda _: Decays(),
    "batch norm": lambda _: Normalizes(),
    "experts": lambda _: Experts(0.1),
    "experts, hardly balanced": lambda _: Experts(0.001),
    "spectral norm": lambda _: Spectral(nn.utils.parametrizations.spectral_norm),
    "old spectral norm": lambda _: Spectral(nn.utils.spectral_norm),
    "hooked value": lambda _: HooksValues(),
    **{f"term: {name}": lambda _, name=name: Adds(name) for name in TERMS},  # type: ignore[misc]
    **{f"buffer: {name}": lambda _, name=name: Keeps(name) for name in BUFFERS},  # type: ignore[misc]
    **{f"hook: {name}": lambda _, name=name: Hooked(name) for name in HOOKS},  # type: ignore[misc]
}
HARMLESS = (
    "tanh",
    "viewed",
    "in place",
    "constant rows",
    "linear",
    "shared",
    "skip",
    "frozen",
    "dropout",
    "layer norm",
    "decay",
    "scaled",
    "dropped",
    "offset",
)
HABITS = tuple(name for name in PARTS if name not in HARMLESS)
