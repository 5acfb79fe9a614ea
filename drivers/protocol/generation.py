"""Making tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pippy.drivers.protocol.peers import NeedsPeers
from pippy.drivers.protocol.programs import CallForm
from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class TokenStage:
    """The messages of a stage when a token is made.

    ``receives`` has the stages on other workers that send values to it: their workers, and the names of the values. ``sends``
    has the workers that it sends values to.
    """

    stage: int
    call: CallForm
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    receives: tuple[tuple[int, int, tuple[str, ...]], ...]
    sends: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class TokenGraph:
    """A worker's part of the graph that makes a token.

    ``modules`` has the code of the stages, with a `TensorLocation` for each tensor that the worker has already. The worker
    ``choosing`` chooses the token from the value ``logits``, and sends it to the workers ``told``.
    """

    stages: tuple[TokenStage, ...]
    modules: Pickled
    logits: str
    choosing: int
    told: tuple[int, ...]

    def peers(self, worker: int) -> set[int]:
        """The workers with which a worker passes values and tokens."""
        found = {source for stage in self.stages for _, source, _ in stage.receives}
        found |= {to for stage in self.stages for to, _ in stage.sends}
        found |= set(self.told) if worker == self.choosing else {self.choosing} if worker in self.told else set()
        return found - {worker}


@dataclass(frozen=True)
class AddGeneration(NeedsPeers):
    """What a worker does to generate: for a prompt, and for each token behind it. Sent once."""

    prompt: TokenGraph
    token: TokenGraph

    def peers(self, worker: int) -> set[int]:
        """Those of both graphs."""
        return self.prompt.peers(worker) | self.token.peers(worker)


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
