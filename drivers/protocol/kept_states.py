"""Copies of what workers hold, in the memory of their neighbours."""

from dataclasses import dataclass

from pippy.drivers.protocol.peers import NeedsPeers


@dataclass(frozen=True)
class KeepState(NeedsPeers):
    """Copy what the worker holds, send the copy to worker ``to``, and keep that of worker ``of`` beside it.

    Copies of other points than ``before`` are dropped.
    """

    point: int
    before: int | None
    to: int
    of: int

    def peers(self, worker: int) -> set[int]:
        """The neighbours."""
        return {self.to, self.of} - {worker}


@dataclass(frozen=True)
class TakeKept(NeedsPeers):
    """Go back to a point: send copies that others lack, and take those that this worker lacks.

    ``sends`` and ``receives`` have whose copy it is, and where it goes, or comes from.
    """

    point: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    def peers(self, worker: int) -> set[int]:
        """Those that copies go to, and come from."""
        return {other for _, other in (*self.sends, *self.receives)} - {worker}
