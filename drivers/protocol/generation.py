"""Making tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pippy.drivers.protocol.peers import NeedsPeers
from pippy.drivers.protocol.programs import AddProgram
from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class AddGeneration(NeedsPeers):
    """A worker's part of the programs that make tokens, in so many micro-batches: for a prompt, and for each token behind it.

    ``modules`` has the code of its stages for a prompt, and for a token, with a `TensorLocation` for each tensor that the
    worker has already. It is sent once. With ``one_token``, a prompt is one token, and runs the code for that.
    """

    prompt: AddProgram
    token: AddProgram
    one_token: bool
    modules: tuple[Pickled, Pickled] | None

    def peers(self, worker: int) -> set[int]:
        """Those of both programs."""
        return self.prompt.peers(worker) | self.token.peers(worker)


@dataclass(frozen=True)
class AllEnded:
    """Goes in place of the values of a micro-batch whose rows have all ended."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and the random state to draw them with."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    state: torch.Tensor


@dataclass(frozen=True)
class Generate:
    """Make up to ``length`` tokens behind each prompt, in chunks of so many ``rows``.

    ``inputs`` are those of the prompts, by name. With ``one_token``, each prompt is one token. A row ends with one of the
    tokens ``ends``, and has ``padding`` behind it.
    """

    inputs: Mapping[str, torch.Tensor]
    one_token: bool
    rows: tuple[int, ...]
    length: int
    ends: tuple[int, ...]
    padding: int
    sampling: Sampling | None


@dataclass(frozen=True)
class Generated:
    """The tokens of each chunk, and the random state after they were drawn."""

    tokens: tuple[torch.Tensor, ...]
    state: torch.Tensor | None
