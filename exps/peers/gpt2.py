"""A GPT-2 in three forms whose parameters have the same names: Hugging Face's, one with marks, and parts of Hugging Face's.

pippy traces the first from an example and the second as it is; torch.distributed.pipelining gets the third. The output layer
has weights of its own: torch's stages cannot share any.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from exps.peers import gpt
from exps.peers.contestant import Rank
from pippy import Pipe, SplitPoint, annotate_split_points, pipe_split, pipeline

if TYPE_CHECKING:  # where it is needed it is imported by functions, as that takes seconds
    from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {"full": gpt.Size(12, 512, 8, 64, 2048), "tiny": gpt.Size(4, 16, 2, 8, 32)}


def config(size: gpt.Size) -> "GPT2Config":
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def hugging_face(size: gpt.Size) -> "GPT2LMHeadModel":
    """The whole model, with the same parameters in every process."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(config(size))


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens, of the logits or of what a model of Hugging Face returns."""
    return gpt.loss_fn(output if isinstance(output, torch.Tensor) else output.logits, target)


def linear(outputs: int, inputs: int) -> nn.Module:
    """A linear layer as Hugging Face's GPT-2 has it."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


class Attention(nn.Module):
    def __init__(self, size: gpt.Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn, self.c_proj = linear(3 * size.width, size.width), linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = linear(4 * width, width), linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, size: gpt.Size) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(size.width), Attention(size)
        self.ln_2, self.mlp = nn.LayerNorm(size.width), Mlp(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(self.ln_1(x)) + x
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, size: gpt.Size, cuts: set[int]) -> None:
        super().__init__()
        self.cuts = cuts
        self.wte, self.wpe = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for number, block in enumerate(self.h):
            if number in self.cuts:
                pipe_split()
            x = block(x)
        return self.ln_f(x)


class Written(nn.Module):
    """GPT-2 as somebody writes it for a pipeline, with `pipe_split()` before the blocks ``cuts``."""

    def __init__(self, size: gpt.Size, cuts: set[int]) -> None:
        super().__init__()
        self.transformer = Transformer(size, cuts)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(tokens))


class Part(nn.Module):
    """What a stage of torch's holds of Hugging Face's model; its parameters have the names that they have there."""

    def __init__(self, model: "GPT2LMHeadModel", stage: int, stages: int) -> None:
        super().__init__()
        whole, layers = model.transformer, len(model.transformer.h)
        places = range(*(part * layers // stages for part in (stage, stage + 1)))
        self.first, self.last = stage == 0, stage == stages - 1
        self.transformer = nn.ModuleDict({"h": nn.ModuleDict({str(place): whole.h[place] for place in places})})
        if self.first:
            self.transformer.update({"wte": whole.wte, "wpe": whole.wpe})
        if self.last:
            self.transformer["ln_f"], self.lm_head = whole.ln_f, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self.transformer
        if self.first:
            x = held["wte"](x) + held["wpe"](torch.arange(x.size(1)))
        for block in held["h"].values():
            x = block(x)
        return self.lm_head(held["ln_f"](x)) if self.last else x


class Parts(NamedTuple):
    """Makes the stages of a model of this size for torch."""

    size: gpt.Size

    def __call__(self, stage: int, stages: int) -> nn.Module:
        return Part(hugging_face(self.size), stage, stages)


class SingleRank(Rank):
    """Hugging Face's whole model, micro-batch after micro-batch."""

    def __init__(self, rank: int, size: gpt.Size) -> None:
        self.model, (x, target) = hugging_face(size), gpt.batch(size)
        self.chunks = list(zip(x.chunk(gpt.CHUNKS), target.chunk(gpt.CHUNKS)))
        super().__init__([self.model])

    def run(self) -> list[torch.Tensor]:
        losses = []
        for x, target in self.chunks:
            loss = loss_fn(self.model(x), target)
            (loss / gpt.CHUNKS).backward()
            losses.append(loss.detach())
        return losses


class FromExample(NamedTuple):
    """Makes the Pipe of Hugging Face's model, from an example of one micro-batch."""

    size: gpt.Size
    chunks: int = gpt.CHUNKS

    def __call__(self, stages: int) -> Pipe:
        model = hugging_face(self.size)
        places = [stage * self.size.layers // stages for stage in range(1, stages)]
        annotate_split_points(model, {f"transformer.h.{place}": SplitPoint.BEGINNING for place in places})
        example = tuple(each.chunk(self.chunks)[0] for each in gpt.batch(self.size))
        return pipeline(model, loss_fn, example_args=example)


class FromMarks(NamedTuple):
    """Makes the Pipe of the model that was written with marks; no example is needed."""

    size: gpt.Size

    def __call__(self, stages: int) -> Pipe:
        model = Written(self.size, {stage * self.size.layers // stages for stage in range(1, stages)})
        model.load_state_dict(hugging_face(self.size).state_dict())
        return pipeline(model, loss_fn)
