"""What `torch.compile` makes of the contestants of torch. In a file of its own: a child must find these classes by name."""

from exps.peers import gpt, gpt2, single


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
