"""Models of tables, graphs and other things, written as their users write them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exps.tried_models.candidate import Candidate, numbers, words


class Recommender(nn.Module):
    """DLRM: a bag of embeddings for each category, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = [bag(index) for bag, index in zip(self.bags, (a, b, c), strict=True)]
        stacked = torch.stack([x, *found], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        count = stacked.shape[1]
        rows, columns = torch.tril_indices(count, count, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(-1)


class Radiance(nn.Module):
    """NeRF: positions as sines of many frequencies, and a skip into the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15 if i == 0 else 31 if i == 2 else 16, 16) for i in range(4))
        self.density, self.color = nn.Linear(16, 1), nn.Linear(16 + 3, 3)

    def forward(self, x: Tensor, direction: Tensor) -> dict[str, Tensor]:
        encoded = torch.cat([x] + [wave(2.0**i * x) for i in range(2) for wave in (torch.sin, torch.cos)], dim=-1)
        hidden = encoded
        for index, layer in enumerate(self.layers):
            if index == 2:
                hidden = torch.cat([encoded, hidden], dim=-1)
            hidden = F.relu(layer(hidden))
        color = torch.sigmoid(self.color(torch.cat([hidden, F.normalize(direction, dim=-1)], dim=-1)))
        return {"density": F.softplus(self.density(hidden)), "color": color}


def seen(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The loss of a NeRF."""
    return F.mse_loss(output["color"], target) + 0.1 * output["density"].mean()


class Flow(nn.Module):
    """RealNVP: half of the features says how the other half is changed; returns minus the log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for index, layer in enumerate(self.layers):
            kept, changed = x.chunk(2, dim=1) if index % 2 == 0 else reversed(x.chunk(2, dim=1))
            scale, shift = layer(kept).chunk(2, dim=1)
            scale = torch.tanh(scale)
            changed = changed * scale.exp() + shift
            x = torch.cat([kept, changed], dim=1)
            total = total + scale.sum(dim=1)
        return (0.5 * x.pow(2).sum(dim=1) - total).mean()


class MessagePassing(nn.Module):
    """A graph network: messages along edges are added up at the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))
        self.update = nn.ModuleList(nn.GRUCell(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, goal = edges
        for message, update in zip(self.message, self.update, strict=True):
            sent = torch.relu(message(torch.cat([x[source], x[goal]], dim=-1)))
            received = torch.zeros_like(x).index_add(0, goal, sent)
            x = update(received, x)
        return self.head(x).pow(2).mean()


@dataclass
class Answers:
    """Of a model with several tasks."""

    loss: Tensor
    regression: Tensor
    classes: Tensor


class SeveralTasks(nn.Module):
    """Two heads, whose losses are weighed by learned numbers; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.heads = nn.ModuleDict({"regression": nn.Linear(8, 1), "classes": nn.Linear(8, 3)})
        self.weights = nn.ParameterDict({"regression": torch.zeros(()), "classes": torch.zeros(())})

    def forward(self, x: Tensor, labels: Tensor, values: Tensor) -> Answers:
        hidden = self.trunk(x)
        found = {name: head(hidden) for name, head in self.heads.items()}
        losses = {
            "regression": F.mse_loss(found["regression"].squeeze(-1), values),
            "classes": F.cross_entropy(found["classes"], labels),
        }
        loss = sum(torch.exp(-self.weights[name]) * each + self.weights[name] for name, each in losses.items())
        assert isinstance(loss, Tensor)
        return Answers(loss, found["regression"], found["classes"])


class Quantize(torch.autograd.Function):
    """The sign, whose gradient is passed straight through."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Binary(nn.Module):
    """Layers whose weights and values are signs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = F.linear(Quantize.apply(x), Quantize.apply(layer.weight), layer.bias) + x
        return self.head(x).pow(2).mean()


class VectorQuantized(nn.Module):
    """Codes from a book, found by distance; the gradient goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.book = nn.Embedding(10, 4)
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encode(x)
        nearest = torch.cdist(code, self.book.weight).argmin(dim=-1)
        quantized = self.book(nearest)
        kept = F.mse_loss(quantized, code.detach()) + 0.25 * F.mse_loss(code, quantized.detach())
        quantized = code + (quantized - code).detach()
        return {"loss": F.mse_loss(self.decode(quantized), x) + kept, "codes": nearest}


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x).pow(2).mean()


class TiedAutoencoder(nn.Module):
    """Decodes with the weights that encoded, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
        self.biases = nn.ParameterList([torch.zeros(6), torch.zeros(8)])

    def forward(self, x: Tensor) -> Tensor:
        code = torch.relu(self.second(torch.relu(self.first(x))))
        back = torch.relu(F.linear(code, self.second.weight.t(), self.biases[0]))
        return F.mse_loss(F.linear(back, self.first.weight.t(), self.biases[1]), x)


class Hypernetwork(nn.Module):
    """A network that makes the weights of another for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6 * 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weight = self.first(context).unflatten(-1, (8, 6))
        hidden = torch.relu(torch.einsum("boi,bi->bo", weight, x) + self.second(context))
        return self.head(hidden).pow(2).mean()


class Repeated(nn.Module):
    """One layer, used again and again."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        self.times, self.inside, self.layer, self.head = times, nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        injected, state = self.inside(x), torch.zeros(x.shape[0], 8, dtype=x.dtype)
        for _ in range(self.times):
            state = torch.tanh(self.layer(state) + injected)
        return self.head(state).pow(2).mean()


class EarlyExits(nn.Module):
    """An answer after each block, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.exits = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        answers = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            answers.append(leave(x))
        return answers


def all_exits(output: list[Tensor], target: Tensor) -> Tensor:
    """The mean of the losses of all answers."""
    return torch.stack([F.cross_entropy(each, target) for each in output]).mean()


class Capsules(nn.Module):
    """Votes that agree count more, by three rounds of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 5 * 4)
        self.votes = nn.Parameter(torch.randn(5, 3, 4, 4) * 0.5)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        length = x.pow(2).sum(-1, keepdim=True)
        return length / (1 + length) * x / (length + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        lower = self.squash(self.inside(x).view(x.size(0), 5, 4))
        votes = torch.einsum("bid,ijde->bije", lower, self.votes)
        agreed = torch.zeros(votes.shape[:3], dtype=x.dtype, device=x.device)
        for _ in range(3):
            upper = self.squash((agreed.softmax(dim=2).unsqueeze(-1) * votes).sum(dim=1))
            agreed = agreed + (votes * upper.unsqueeze(1)).sum(dim=-1)
        return upper.norm(dim=-1)


class Contrast(nn.Module):
    """Two towers, whose rows are compared with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        goal = torch.arange(logits.shape[0], device=logits.device)
        return {"loss": (F.cross_entropy(logits, goal) + F.cross_entropy(logits.t(), goal)) / 2, "logits": logits}


class Factorization(nn.Module):
    """DeepFM: pairwise products without a loop, beside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 4), nn.Embedding(20, 1)
        self.deep = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        pairs = 0.5 * (embedded.sum(1).pow(2) - embedded.pow(2).sum(1)).sum(1, keepdim=True)
        logit = self.linear(x).sum(1) + pairs + self.deep(embedded.flatten(1)) + self.bias
        return F.binary_cross_entropy_with_logits(logit.squeeze(1), (x[:, 0] % 2).to(logit.dtype))


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    classes = torch.tensor([0, 2, 1, 1])
    edges = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])

    def bags() -> dict[str, Tensor]:
        return {"dense": numbers(4, 5), "a": words(4, 3), "b": words(4, 2), "c": words(4, 4)}

    def of_rows(make: type[nn.Module], width: int, **others: Tensor) -> Candidate:
        return Candidate(make, lambda: {"x": numbers(4, width), **others}, returns_only_a_loss=True)

    return {
        "DLRM": Candidate(Recommender, lambda: {**bags(), "target": torch.ones(4, dtype=torch.float64)}, F.mse_loss),
        "DeepFM": Candidate(Factorization, lambda: {"x": words()}, returns_only_a_loss=True),
        "NeRF, a dict": Candidate(
            Radiance, lambda: {"x": numbers(4, 3), "direction": numbers(4, 3), "target": numbers(4, 3)}, seen
        ),
        "normalizing flow": of_rows(Flow, 6),
        "graph network": Candidate(
            MessagePassing, lambda: {"x": numbers(4, 6), "edges": edges}, returns_only_a_loss=True, fixed_batch=True
        ),
        "several tasks, a dataclass": Candidate(
            SeveralTasks, lambda: {"x": numbers(4, 6), "labels": classes, "values": numbers(4)}
        ),
        "straight-through signs": of_rows(Binary, 8),
        "VQ-VAE": Candidate(VectorQuantized, lambda: {"x": numbers(4, 6)}),
        "torch.utils.checkpoint": of_rows(Checkpointed, 8),
        "autoencoder with tied weights": of_rows(TiedAutoencoder, 8),
        "hypernetwork": of_rows(Hypernetwork, 6, context=numbers(4, 4)),
        "one layer many times": of_rows(Repeated, 6),
        "early exits, a list": Candidate(EarlyExits, lambda: {"x": numbers(4, 8), "target": classes}, all_exits),
        "capsules": Candidate(Capsules, lambda: {"x": numbers(4, 6), "target": classes}, F.cross_entropy),
        "contrast of two towers": Candidate(
            Contrast, lambda: {"left": numbers(4, 6), "right": numbers(4, 5)}, fixed_batch=True
        ),
    }
