"""A small language model: marked, split, printed, drawn, and trained beside the same model in plain PyTorch.

Question: does a Pipe compute what the plain model computes?
Command:  make demo
Finding:  the losses are equal to the last digit printed; the drawing is in out/demo.svg.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pippy import pipe_split, pipeline

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 32, 32, 16, 16, 60


class Block(nn.Module):
    """A transformer block: causal attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding and head are tied, and the embedding skips to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        x = self.blocks[0](embedded)
        pipe_split()
        x = self.blocks[1](x)
        pipe_split()
        return self.head(self.blocks[2](x) + embedded)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of_counting() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count upwards by a step of their own; the target is the next token."""
    start, step = torch.randint(0, VOCABULARY, (BATCH, 1)), torch.randint(1, 4, (BATCH, 1))
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Show everything, and train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, loss_fn)
    tokens, targets = batch_of_counting()
    print(f"The Pipe:\n\n{pipe}")
    print(f"Who sends what to whom:\n\n{pipe.graph_text(tokens, targets)}\n")
    print(f"Its stages:\n\n{pipe.stages_table(tokens, targets)}\n")
    path = Path("out") / "demo.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(pipe.to_svg(tokens, targets))
    print(f"Drawn in {path}\n\nTraining it beside the same model in plain PyTorch:\n")
    train(pipe, plain)


def train(pipe: nn.Module, plain: nn.Module) -> None:
    """Both take the same steps; the table shows both losses."""
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (pipe, plain))
    print("step   pipe      plain")
    for step in range(STEPS + 1):
        tokens, targets = batch_of_counting()
        ours.zero_grad()
        theirs.zero_grad()
        loss = pipe(tokens, targets)
        expected = loss_fn(plain(tokens), targets)
        expected.backward()
        ours.step()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        if step % 10 == 0:
            print(f"{step:4}   {loss:.5f}   {expected:.5f}   {'█' * round(loss.item() * 12)}")


if __name__ == "__main__":
    main()
