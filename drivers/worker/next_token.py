"""Chooses the next token of each row from the logits, as `generate` of transformers does."""

import torch

from pippy.drivers.protocol.programs import Sampling


class Noise:
    """The random numbers of a call, for all its rows. Each token takes them in the order in which the plain model does.

    `torch.multinomial` takes one sample so: it divides the probabilities by exponential noise, and gives the largest.
    """

    def __init__(self, state: torch.Tensor, rows: int) -> None:
        self.generator, self.rows = torch.Generator(), rows
        self.generator.set_state(state)
        self.latest, self.drawn = torch.empty(0), 0

    def of(self, token: int, words: int) -> torch.Tensor:
        """The noise for a token, counted from 0: a row for each sequence. It is that of the token before, or the next one."""
        if self.drawn <= token:
            self.latest = torch.empty(self.rows, words).exponential_(1, generator=self.generator)
            self.drawn += 1
        return self.latest


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities of the next tokens.

    >>> probabilities(torch.tensor([[1.0, 3.0, 2.0]]), Sampling(1.0, 1, None, torch.get_rng_state()))
    tensor([[0., 1., 0.]])
    """
    scores = logits
    if sampling.temperature is not None and sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k:
        least = torch.topk(scores, min(sampling.top_k, scores.shape[-1]))[0][..., -1, None]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        scores = scores.masked_fill(_unlikely(scores, sampling.top_p), -torch.inf)
    found = scores.softmax(dim=-1)
    if not found.isfinite().all():
        raise ValueError(
            "the next token cannot be drawn, because a logit is nan or infinite; check whether the parameters are "
            "finite"
        )
    return found


def _unlikely(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens do not belong to the most likely ones, whose probabilities add up to ``top_p``."""
    ascending, order = torch.sort(scores, descending=False)
    unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    unlikely[..., -1:] = False
    return unlikely.scatter(1, order, unlikely)


def next_token(logits: torch.Tensor, sampling: Sampling | None, noise: torch.Tensor | None) -> torch.Tensor:
    """The next token of each row: the most likely one, or one drawn with the ``noise`` of these rows."""
    logits = logits.float()
    if sampling is None or noise is None:
        return logits.argmax(dim=-1)
    return (probabilities(logits, sampling) / noise.to(logits.device)).argmax(dim=-1)
