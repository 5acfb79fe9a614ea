"""The worker of a rank beside rank 0: how it comes in, runs, and leaves the script when its cluster is closed."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import exit_at_once
from pippy.drivers.engines.connected_worker import ConnectedWorker, RunSettings
from pippy.drivers.engines.hub.hub_worker import MemberWorker
from pippy.drivers.engines.hub.interfaces import interface_from_environment, link_at
from pippy.drivers.engines.hub.members import say
from pippy.drivers.engines.torchrun.ranks import RankBoard, RankInfo, link_of_rank
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.doors import Invitation, come_in
from pippy.drivers.wire.worker_transport import WorkerTransport

_COMES_WITHIN = 10.0  # seconds: TCP asks again after 1, 3 and 7
LEAVES_WITHIN = 5.0  # seconds that a worker has to end what it does when its cluster is closed


def work(rank_info: RankInfo, board: RankBoard, by_rpc: bool) -> NoReturn:
    """Come in at the door of rank 0, and run a worker until the controller closes the cluster; then leave the script."""
    board.read("terms", [0])
    line, refused = board.read("door", [0])[0]
    if refused:
        raise ClusterError(refused)
    worker = RankWorker(rank_info, board, by_rpc, Invitation.of_line(line))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on Ctrl-C is the controller's
    worker.run()
    worker.leave()
    raise SystemExit(0)


class RankWorker(MemberWorker):
    """A rank that comes in by an invitation. With ``by_rpc`` its commands and values go by RPC."""

    def __init__(self, rank_info: RankInfo, board: RankBoard, by_rpc: bool, invitation: Invitation) -> None:
        self.rank_info, self.board, self.by_rpc = rank_info, board, by_rpc
        self.runs, self.left = threading.Event(), False
        why = ""
        try:
            end = come_in(invitation, rank_info.rank, min(board.timeout / 2, _COMES_WITHIN))
        except OSError as error:
            why = str(error.strerror or error)
            raise ClusterError(f"rank {rank_info.rank} gets no connection with rank 0: {why}") from error
        finally:
            board.write("came", why)
        is_chosen = rank_info.one_host or interface_from_environment() is not None
        chosen = link_of_rank(rank_info)[0].address if is_chosen else None
        super().__init__(end, invitation, chosen or end.getsockname()[0], lambda text: None)

    def made_worker(self, index: int, settings: RunSettings) -> ConnectedWorker:
        """The worker of this process."""
        carry = carry_by_rpc(self.rank_info, settings) if self.by_rpc else WorkerTransport
        return ConnectedWorker(index, self.address, settings, self._broke, carry)

    def start_worker(self, worker: ConnectedWorker, run: dict[str, Any]) -> None:
        """Start it, with its connections for messages, or with RPC."""
        if self.by_rpc:
            worker.start()
            join_by_rpc(self.rank_info, self.board, self.address, worker.settings.timeout, worker)
        else:
            super().start_worker(worker, run)
        self.runs.set()

    def tell_failure(self, text: str) -> None:
        """Print why this rank fails: torchrun may end rank 0 before that can say it."""
        say(text)

    def leave(self) -> None:
        """The worker has ended: from now on the process belongs to the script alone."""
        self.left = True
        if self.by_rpc:
            rpc.leave()
        self.lines.close()

    def _end(self, said: dict[str, Any]) -> None:  # type: ignore[override]
        """Have the worker leave, if it was told to; end the process if it stays, or the controller is gone."""
        who = "a rank" if self.worker is None else f"worker {self.worker.settings.names[self.worker.index]!r}"
        who = f"{who} (pid {os.getpid()})"
        why = said.get("gone") or said.get("end")
        try:
            if "gone" not in said and self.worker is not None and self.runs.wait(LEAVES_WITHIN):
                if why is not None:
                    say(f"{who} leaves: {why}")
                self.worker.end()
                time.sleep(LEAVES_WITHIN)
                if self.left:
                    return
                doing = self.worker.worker.doing()
                why = f"{LEAVES_WITHIN:g} s after its cluster was closed it was still at {doing}"
            say(f"{who} ends itself: {why or 'its cluster was closed before it ran'}")
        finally:  # also where there is no memory to say it
            if not self.left:
                exit_at_once(1)


def carry_by_rpc(rank_info: RankInfo, settings: RunSettings) -> Callable[..., WorkerTransport]:
    """What makes the transport of a worker whose values go by RPC."""
    first = rank_info.world_size - rank_info.workers

    def name(worker: int) -> str:
        return rpc.name_of_rank(worker + first)

    far = [worker for worker in range(rank_info.workers) if worker != rank_info.index]
    reports_to, timeout = rpc.name_of_rank(0), settings.timeout
    return partial(rpc.transport_by_rpc, name=name, reports_to=reports_to, timeout=timeout, far=far)


def join_by_rpc(
    rank_info: RankInfo, board: RankBoard, address: str, quiet: float, worker: ConnectedWorker | None
) -> None:
    """Join the others by RPC, which listens at an address of this host until all have joined; a worker is here, or none."""
    if worker is not None:
        rpc.serve(rpc.Served(worker.queue, worker.urgent, worker.transport.deliver))
    place = rank_info.rank, rank_info.world_size, board.root, link_at(address).interface
    rpc.join_ranks(*place, board.timeout, quiet, board.number)
