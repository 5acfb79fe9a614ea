"""What `torch.compile` makes of the contestants of torch. In a file of its own: a child must find these classes by name."""

from typing import NamedTuple

from torch import nn

from exps.peers import gpt, gpt2, single
from exps.peers.torch_peer import Parts


class CompiledParts(NamedTuple):
    """Makes stages as ``parts`` does, and has torch compile each when it is first called."""

    parts: Parts

    def __call__(self, stage: int, stages: int) -> nn.Module:
        from torch._functorch import config  # slow to import

        config.donated_buffer = False  # else its backward fails if it comes in halves
        made = self.parts(stage, stages)
        made.compile()
        return made


class CompiledSingle(single.SingleRank):
    """The whole model, compiled."""

    def __init__(self, rank: int, size: gpt.Size) -> None:
        super().__init__(rank, size)
        self.model.compile()


class CompiledSingleGpt2(gpt2.SingleRank):
    """Hugging Face's whole model, compiled."""

    def __init__(self, rank: int, size: gpt.Size) -> None:
        super().__init__(rank, size)
        self.model.compile()
