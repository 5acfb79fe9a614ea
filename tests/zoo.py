"""Small models, each with one thing that a pipeline could get wrong. All run in float64.

An entry is a class with `inputs()` and, where the loss is not `mean_square`, `loss_fn`; one whose loss is its own output
has `output_loss_value_spec`. `exhibits` holds them by name,
and `WAYS` the names with each way to share parameters that makes a difference.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pippy import MultiUseParameterConfig, TrivialLossWrapper, pipe_split
from pippy.ir.base.trees import tensors

exhibits: dict[str, type["Exhibit"]] = {}


def mean_square(output: Any, target: Any) -> torch.Tensor:
    """The mean of squares of everything floating in the output."""
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    return sum(((tensor - target) ** 2).mean() for tensor in found)


def first_only(output: Any, target: Any) -> torch.Tensor:
    return F.mse_loss(output[0], target.expand_as(output[0]))


class Exhibit(nn.Module):
    """A model of the zoo."""

    loss_fn: Any = staticmethod(mean_square)
    output_loss_value_spec: Any = None
    linears = ""  # names of linear layers that the model begins with
    draws = False  # whether a step draws random numbers: workers that are threads share one generator, which suits a single one

    def __init__(self) -> None:
        super().__init__()
        for name in self.linears:
            setattr(self, name, nn.Linear(8, 8))

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:  # other tests derive models of their own
            exhibits[cls.__name__] = cls

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(6, 8),)

    def target(self) -> Any:
        return torch.tensor(0.5)


class Mlp(Exhibit):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index < 3:
                pipe_split()
        return x


class ExampleCode(Exhibit):
    """The example of PiPPy's design document."""

    def __init__(self, width=8):
        super().__init__()
        self.mm_param = nn.Parameter(torch.randn(width, width))
        self.mm_param2 = nn.Parameter(torch.randn(width, width))
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        x = torch.mm(x, self.mm_param)
        skip_connection = x
        x = torch.relu(x)
        pipe_split()
        x = torch.mm(x, self.mm_param)
        x = self.lin(x)
        pipe_split()
        x = torch.relu(x)
        x = x + skip_connection
        x = torch.mm(x, self.mm_param2)
        return self.lin(x)


class UsedTwice(Exhibit):
    linears = "abc"

    def forward(self, x):
        shared = torch.tanh(self.a(x))
        pipe_split()
        y = self.b(shared)
        pipe_split()
        return self.c(y) * shared


class UsedThrice(Exhibit):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        shared = torch.tanh(self.a(x))
        pipe_split()
        y = self.b(shared) + shared
        pipe_split()
        y = self.c(y) * shared
        pipe_split()
        return self.d(y) - shared


class NoGradientValues(Exhibit):
    """Integers, masks, None, constants and sizes are values between stages."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 8), nn.Linear(8, 8)

    def inputs(self):
        return (torch.randn(6, 8), torch.randint(0, 5, (6,)), None)

    def forward(self, x, index, nothing):
        mask = x > 0
        shifted = (index + 1) % 5
        shape = x.shape
        count = x.size(0)
        pipe_split()
        y = torch.where(mask, x, self.table(shifted).view(shape))
        pipe_split()
        y = self.out(y.view(count, -1)) * mask
        return y, shifted, nothing, 3


class UnusedOutputs(Exhibit):
    """The loss depends on one of three outputs; one stage computes only the other two."""

    loss_fn = staticmethod(first_only)

    linears = "abc"

    def forward(self, x):
        y = torch.relu(self.a(x))
        extra = y * 2
        pipe_split()
        z = self.b(y)
        pipe_split()
        auxiliary = self.c(z)
        return z, auxiliary, extra


class NoParameters(Exhibit):
    linears = "ab"

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        x = torch.sin(x) * 2
        pipe_split()
        return self.b(x)


class FrozenPrefix(Exhibit):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.a.requires_grad_(False)
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.a(x))
        pipe_split()
        x = torch.relu(self.b(x))
        pipe_split()
        return self.c(x)


class FrozenMiddle(Exhibit):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.a(x))
        pipe_split()
        x = torch.relu(self.b(x))
        pipe_split()
        return self.c(x)


class TupleEdge(Exhibit):
    """A recurrent layer's nested tuple is one value between two stages."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def inputs(self):
        return (torch.randn(3, 5, 8),)

    def forward(self, x):
        result = self.lstm(x)
        pipe_split()
        y = self.out(result[0])
        pipe_split()
        return y + result[1][0].transpose(0, 1)


class GruStack(Exhibit):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 4, batch_first=True)

    def inputs(self):
        return (torch.randn(3, 5, 8),)

    def forward(self, x):
        x, hidden = self.one(x)
        pipe_split()
        y, _ = self.two(x)
        return y.sum(2) + hidden.sum()


class ListOutput(Exhibit):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            outputs.append(x)
            pipe_split()
        outputs.append(x * 1)
        return outputs


class DictOutput(Exhibit):
    loss_fn = staticmethod(lambda output, target: F.mse_loss(output["y"], target) + output["more"]["z"].sum())

    linears = "ab"

    def target(self):
        return torch.randn(6, 8)

    def forward(self, x):
        z = torch.tanh(self.a(x))
        pipe_split()
        return {"y": self.b(z), "more": {"z": z}, "x": x}


@dataclasses.dataclass
class Result:
    logits: Any
    hidden: Any
    note: str = "none"


class DataclassOutput(Exhibit):
    loss_fn = staticmethod(lambda output, target: F.mse_loss(output.logits, target) + output.hidden.abs().mean())

    linears = "ab"

    def target(self):
        return torch.randn(6, 8)

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        pipe_split()
        return Result(self.b(hidden), hidden)


class Pair(NamedTuple):
    left: Any
    right: Any


class NamedTupleOutput(Exhibit):
    loss_fn = staticmethod(lambda output, target: F.mse_loss(output.left, output.right * target))

    linears = "ab"

    def forward(self, x):
        left = self.a(x)
        pipe_split()
        return Pair(left, self.b(left))


class SameOutputTwice(Exhibit):
    linears = "ab"

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        z = self.b(y)
        return z, z, y


class NonTensorInputs(Exhibit):
    linears = "ab"

    def inputs(self):
        return (torch.randn(6, 8), 3, 0.25)

    def forward(self, x, power, scale):
        y = self.a(x) ** power
        pipe_split()
        return self.b(y) * scale


class InputsWithGradients(Exhibit):
    linears = "ab"

    def inputs(self):
        return (torch.randn(6, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True))

    def forward(self, x, y):
        z = self.a(x) * y
        pipe_split()
        return self.b(z) + x


class ReturnsItsInput(Exhibit):
    """A child of the model returns its input unchanged; the model returns an input too."""

    def __init__(self):
        super().__init__()
        self.a, self.same, self.b = nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        y = self.same(y)
        pipe_split()
        return self.b(y), x


class ViewsAcross(Exhibit):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        halves = y.view(6, 2, 4)
        row = y[0]
        pipe_split()
        z = self.b(halves.transpose(0, 1))
        pipe_split()
        return z.reshape(6, 8) + row.unsqueeze(0)


class InPlaceInside(Exhibit):
    linears = "ab"

    def forward(self, x):
        y = self.a(x)
        y += 1
        y.mul_(2)
        pipe_split()
        z = self.b(y)
        w = torch.zeros_like(z)
        w[:, ::2] = z[:, 1::2]
        w[0] += 1
        return F.relu(w, inplace=True)


class InPlaceOnArrival(Exhibit):
    """The first operation of a stage changes its input in place."""

    def __init__(self):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        y = self.relu(y)
        y = self.b(y)
        pipe_split()
        y += 3
        return y.clamp_(min=0)


class AugmentedResidual(Exhibit):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers):
            y = norm(layer(x))
            y += x
            x = self.relu(y)
            pipe_split()
        return x + 1


class UNet(Exhibit):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(2, 2, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv1d(4, 2, 3, padding=1) for _ in range(3))

    def inputs(self):
        return (torch.randn(2, 2, 16),)

    def forward(self, x):
        skips = []
        for conv in self.down:
            x = torch.relu(conv(x))
            skips.append(x)
            x = F.avg_pool1d(x, 2)
            pipe_split()
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = torch.relu(conv(torch.cat([x, skips.pop()], 1)))
            pipe_split()
        return x * 2


class AllEarlierLayers(Exhibit):
    """Attention Residuals: what a layer reads is a weighted average of what all earlier ones gave."""

    linears = "abcd"

    def __init__(self):
        super().__init__()
        self.queries = nn.ParameterList(torch.randn(8) for _ in self.linears)

    def forward(self, x):
        given = [x]
        for name, query in zip(self.linears, self.queries):
            stacked = torch.stack(given)
            weights = (stacked * query).sum(-1, keepdim=True).softmax(0)
            given.append(torch.tanh(getattr(self, name)((weights * stacked).sum(0))))
            pipe_split()
        return given[-1] * 2


class ResidualStreams(Exhibit):
    """Hyper-connections: every layer reads and changes all streams. One cut is inside of a layer."""

    linears = "abc"

    def __init__(self):
        super().__init__()
        self.reads = nn.ParameterList(torch.rand(2) for _ in self.linears)
        self.mixes = nn.ParameterList(torch.rand(4) for _ in self.linears)

    def forward(self, x):
        left, right = x, x * 2
        for name, weight, mix in zip(self.linears, self.reads, self.mixes):
            read = weight[0] * left + weight[1] * right
            if name == "b":
                pipe_split()
            given = torch.tanh(getattr(self, name)(read))
            left, right = left * mix[0] + given * mix[1], right * mix[2] + left * mix[3] + given
            if name != "c":
                pipe_split()
        return left + right


class TiedLanguageModel(Exhibit):
    """An embedding in the first stage and, tied to it, the head in the last; positions made in forward."""

    loss_fn = staticmethod(lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def inputs(self):
        return (torch.randint(0, 11, (3, 5)),)

    def target(self):
        return torch.randint(0, 11, (3, 5))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        pipe_split()
        x = self.body(x)
        pipe_split()
        return self.head(x)


class TiedByFunction(Exhibit):
    """The head uses the embedding's weight by name, so the weight can be transmitted."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 8), nn.Linear(8, 8)

    def inputs(self):
        return (torch.randint(0, 11, (4,)),)

    def forward(self, tokens):
        x = self.embed(tokens)
        pipe_split()
        x = torch.relu(self.body(x))
        pipe_split()
        return F.linear(x, self.embed.weight)


class EncoderDecoder(Exhibit):
    """Every decoder stage reads the encoder's output."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(3)
        )

    def inputs(self):
        return (torch.randn(2, 4, 8), torch.randn(2, 3, 8))

    def forward(self, source, x):
        memory = torch.tanh(self.encoder(source))
        for layer in self.decoder:
            pipe_split()
            x = layer(x, memory)
        return x


class MixtureWithDropout(Exhibit):
    draws = True

    def __init__(self):
        super().__init__()
        self.gate, self.drop = nn.Linear(8, 3), nn.Dropout(0.3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights = torch.softmax(self.gate(x), -1)
        pipe_split()
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mixed = mixed + weights[:, index : index + 1] * self.drop(expert(x))
        pipe_split()
        return F.dropout(mixed, 0.2, self.training) + torch.rand(6, 8)


class ConvBatchNorm(Exhibit):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, momentum=None)

    def inputs(self):
        return (torch.randn(4, 1, 8, 8),)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        pipe_split()
        return self.bn2(self.conv2(x)).flatten(1)


class CountingBuffer(Exhibit):
    """A buffer that one stage changes and a later one reads."""

    linears = "ab"

    def __init__(self):
        super().__init__()
        self.count: torch.Tensor
        self.average: torch.Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.count.add_(1)
        x = self.a(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0) * 0.1)
        pipe_split()
        return self.b(x) / self.count + self.average


class ReadBuffers(Exhibit):
    """Buffers, persistent and not, that several stages read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)

    def forward(self, x):
        x = self.a(x) * self.scale
        pipe_split()
        x = self.b(x) @ self.mask
        pipe_split()
        return self.c(x) * self.scale @ self.mask


class SharedByNested(Exhibit):
    """Two modules that are traced through hold one parameter."""

    class Scale(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.one, self.two, self.three = (self.Scale(weight) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.one(x))
        pipe_split()
        x = torch.tanh(self.two(x))
        pipe_split()
        return self.three(x)


class LeafInThreeStages(Exhibit):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.lin(x))
        pipe_split()
        x = torch.relu(self.lin(x))
        pipe_split()
        return self.lin(x)


class TiedInsideAndElsewhere(Exhibit):
    """Two modules of the last stage are tied to each other, and to one of the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x):
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.c(torch.tanh(self.b(x)))


class Teacher(Exhibit):
    """A region without gradients, across a boundary."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.student(x)
        with torch.no_grad():
            t = self.teacher(y)
            pipe_split()
            t = torch.tanh(t) * self.out.bias
        return self.out(y) - t


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class CustomFunction(Exhibit):
    linears = "ab"

    def forward(self, x):
        x = StraightThrough.apply(self.a(x) * 4)
        pipe_split()
        return StraightThrough.apply(self.b(x))


class Detached(Exhibit):
    """A later stage uses a value without its gradient; another does not."""

    linears = "abc"

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        z = self.b(y.detach())
        pipe_split()
        return self.c(z) + y.detach()


class FreshTensors(Exhibit):
    """Tensors made in forward, changed in place: they must be new in every run."""

    linears = "ab"
    draws = True

    def forward(self, x):
        total = torch.zeros(6, 8)
        total += self.a(x)
        noise = torch.randn(8)
        pipe_split()
        steps = torch.arange(8.0, dtype=torch.float64)
        steps.add_(1)
        return self.b(total + noise) * steps


class Attention(Exhibit):
    draws = True

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def inputs(self):
        return (torch.randn(2, 5, 8),)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in (q, k, v))
        pipe_split()
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = self.out(x.transpose(1, 2).reshape(batch, length, width))
        pipe_split()
        x, weights = self.attend(x, x, x)
        return x, weights


class KeywordInputs(Exhibit):
    linears = "ab"

    def inputs(self):
        return (torch.randn(6, 8), torch.randn(6, 8))

    def forward(self, x, y, *, scale=2.0):
        z = self.a(x) * scale
        pipe_split()
        return self.b(z) + y / scale


class ManyInputs(Exhibit):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def inputs(self):
        return (torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8))

    def forward(self, first, *others):
        y = self.a(first) + others[0]
        pipe_split()
        return y * others[1]


class ReturnsParameter(Exhibit):
    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = self.a(x) * self.scale
        pipe_split()
        return torch.relu(y), self.scale


class AsksForTypes(Exhibit):
    """A forward with `isinstance` and `assert` on its input."""

    linears = "ab"

    def forward(self, x):
        if not isinstance(x, torch.Tensor) or isinstance(x, (list, tuple)) or not torch.is_tensor(x):
            x = x[0] * 100
        assert x.size(1) == 8, "width"
        x = self.a(x)
        pipe_split()
        return self.b(x)


class TupleLoss(Exhibit):
    """A model that returns its loss and its logits."""

    loss_fn = None
    output_loss_value_spec = (True, False)

    linears = "ab"

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        logits = self.b(y)
        return (logits**2).mean(), logits


class DictLoss(Exhibit):
    loss_fn = None

    linears = "ab"

    def forward(self, x):
        y = torch.tanh(self.a(x))
        pipe_split()
        return {"logits": self.b(y), "loss": (self.b(y) ** 2).mean() + y.sum(), "hidden": y}


@dataclasses.dataclass
class LossAndLogits:
    logits: Any
    loss: Any


class DataclassLoss(Exhibit):
    loss_fn = None
    output_loss_value_spec = "loss"

    linears = "ab"

    def forward(self, x):
        y = torch.tanh(self.a(x))
        pipe_split()
        logits = self.b(y)
        return LossAndLogits(logits, (logits**2).mean())


class EarlyLoss(Exhibit):
    """The loss is ready before the last stage, which it does not depend on."""

    loss_fn = None
    output_loss_value_spec = 1

    linears = "abc"

    def forward(self, x):
        y = self.a(x)
        pipe_split()
        loss = (self.b(y) ** 2).mean()
        pipe_split()
        return self.c(y), loss


class Wrapped(Exhibit):
    loss_fn = None

    def __init__(self):
        super().__init__()
        self.wrapped = TrivialLossWrapper(Mlp(), nn.MSELoss())

    def inputs(self):
        return (torch.randn(6, 8), torch.randn(6, 8))

    def forward(self, x, targets):
        return {"loss": self.wrapped(x, targets)}


# The Pipe of any other is the same whether shared parameters travel or are copied; tests/test_transparency.py holds that.
SHARING = ("ExampleCode", "TiedByFunction", "SharedByNested")
WAYS = [
    (name, config)
    for name in exhibits
    for config in MultiUseParameterConfig
    if name in SHARING or config is MultiUseParameterConfig.TRANSMIT
]
