"""Two halves of the model on made-up values: what a step costs before any value travels, one cost after the other."""

import socket
import tempfile
from pathlib import Path
from typing import Literal

import torch

from exps.peers import gpt
from exps.peers.contestant import Team
from exps.peers.single import BoundRank

Waiting = Literal["never", "asleep", "awake"]


def order(rank: int) -> list[tuple[str, int]]:
    """Forwards and backwards of a rank under 1F1B on two workers.

    >>> order(0)[:5], order(1)[:4]
    ([('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1)], [('F', 0), ('B', 0), ('F', 1), ('B', 1)])
    """
    ahead = 1 - rank  # rank 0 has one forward more in flight
    found = [("F", chunk) for chunk in range(ahead)]
    for chunk in range(gpt.CHUNKS):
        found += [("F", chunk + ahead)] if chunk + ahead < gpt.CHUNKS else []
        found.append(("B", chunk))
    return found


class HalfRank(BoundRank):
    """A half in the order of 1F1B. It waits for a byte where a value would come, asleep or awake, or never waits.

    Where a value would be sent it sends a byte. The two meet in a socket in the file system.
    """

    def __init__(self, rank: int, size: gpt.Size, waiting: Waiting, folder: str) -> None:
        super().__init__(rank, size)
        self.waiting, self.order = waiting, order(rank)
        self.path = str(Path(folder) / "meet")
        self.line: socket.socket | None = None
        if waiting != "never" and rank == 0:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.path)
            self.listener.listen(1)

    def prepare(self) -> None:
        super().prepare()
        if self.waiting == "never" or self.line:
            return
        if self.first:
            self.line, _ = self.listener.accept()
        else:
            self.line = socket.socket(socket.AF_UNIX)
            self.line.connect(self.path)
        self.line.setblocking(self.waiting == "asleep")

    def run(self) -> list[torch.Tensor]:
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind, chunk in self.order:
            if (kind == "B") == self.first:
                self._wait()
            if kind == "F":
                kept[chunk] = self._forward(chunk)
            else:
                root, gradient = kept.pop(chunk)
                root.backward(gradient)
            if (kind == "F") == self.first:
                self._signal()
        return []

    def _forward(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, other = self.inputs[chunk], self.others[chunk]
        if self.first:
            return self.model(x), other
        loss = gpt.loss_fn(self.model(x.detach().requires_grad_()), other) / gpt.CHUNKS
        return loss, torch.ones_like(loss)

    def _wait(self) -> None:
        while self.line:
            try:
                self.line.recv(1)
                return
            except BlockingIOError:
                pass

    def _signal(self) -> None:
        if self.line:
            self.line.send(b".")


class HalvesTeam(Team):
    """Both halves at once, each on its own core."""

    def __init__(self, size: gpt.Size, waiting: Waiting) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(2, HalfRank, size, waiting, self._folder.name)

    def start(self) -> None:
        super().start()
        self._all("pids")  # the first listens before the second prepares

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class ByTurns(Team):
    """Both halves, one after the other: neither has a neighbour. A step is as long as the longer half."""

    def step(self) -> float:
        self._all("prepare")
        took = []
        for child in self._children:
            child.ask("step")
            begin, end = child.answer()
            took.append(end - begin)
        return max(took)


def by_turns(size: gpt.Size) -> Team:
    """The longer half with the machine to itself."""
    return ByTurns(2, BoundRank, size)
