"""The only file that touches torch.distributed.rpc, by which ranks of torchrun carry all where ``transport="rpc"`` asks for it.

`RpcMessages` are the controller's commands, `RpcValues` values on their way to others; who sends one notices if it is lost.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import constants
from torch.futures import Future

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.wire.messages.controller_messages import ControllerConnections, OwnMessages
from pippy.drivers.wire.messages.sockets import (
    Ends,
    break_silent_connections,
    connections,
    hang_up_on_strangers,
    stop_listening,
)
from pippy.drivers.wire.messages.stderr_filter import StderrFilter
from pippy.drivers.wire.messages.worker_messages import MessageQueue, answer_at_once
from pippy.drivers.wire.pickling import Pickled, pickle_message, unpickle
from pippy.drivers.wire.received_values import Unreadable, ValueKey
from pippy.drivers.wire.worker_transport import WorkerTransport


@dataclass(frozen=True)
class Served:
    """What the calls that arrive in this process are handed to.

    >>> Served(MessageQueue(), urgent=str, deliver=print).urgent(1)
    '1'
    """

    messages: MessageQueue
    urgent: Callable[[Any], Any]
    deliver: Callable[[Any, Any], None]


_served: Served | None = None
_reports: Callable[[int, int, str], None] | None = None

# RPC warns of each pipe that closes, also of those that it closes itself when this process leaves.
_stderr_filter = StderrFilter(b"tensorpipe_agent.cpp")


def serve(served: Served) -> None:
    """Hand the calls that arrive to these messages, this worker and this transport. Before joining: calls arrive at once."""
    global _served
    _served = served


def name_of_rank(rank: int) -> str:
    """The name for RPC of a rank's process.

    >>> name_of_rank(3)
    'rank3'
    """
    return f"rank{rank}"


def join_ranks(
    rank: int, ranks: int, store: dist.Store, interface: str | None, within: float, quiet: float, group: int
) -> None:
    """Join the RPC group of all ranks, and connect with each. In the end no rank listens any more."""
    names = [name_of_rank(each) for each in range(ranks)]
    try:
        join(names[rank], rank, ranks, "env://", interface, within, group)
        if rank == 0:
            close_ports(names[0], names[1:], store, within, quiet, group)
    except (RuntimeError, OSError) as error:
        raise ClusterError(
            f"rank {rank} has met the others at torchrun's store, and not all ranks got a connection with each other,"
            f" though they tried for start_timeout ({within:g} s), up to five times. Until it has these, every rank listens on"
            f" ports that its system chooses, here of the interface {interface}: a firewall must let the others through to"
            f" these; TP_SOCKET_IFNAME names another interface. If a stranger, as a port scan, connects there meanwhile, RPC"
            f" lets in nobody else: start the job again, which torchrun --max-restarts 3 does by itself, or leave out"
            f' transport="rpc". The first line of RPC\'s error: {str(error).strip().splitlines()[0]}'
        ) from error


def join(
    name: str, rank: int, processes: int, init_method: str, interface: str | None, timeout: float = 0, group: int = 0
) -> None:
    """Join the RPC group, at this ``interface``; waits for all others.

    ``timeout`` bounds the waits of joining, after which this raises a RuntimeError; a store in a file takes 0 for no bound, one
    of TCP does not. Calls have none.

    RPC counts its groups, and the exchanges among their members, in this process alone: one that was in a group before
    would wait for the others under numbers that they, being new, do not have. So both counts start again, that of groups with
    ``group``, which is how many have met at the store before.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, num_worker_threads=4, rpc_timeout=timeout, _transports=["uv"], _channels=["basic"]
    )
    rpc._init_counter = group
    rpc.api._all_gather_sequence_id.clear()
    rpc.api._all_gather_sequence_id_to_states.clear()
    with warnings.catch_warnings(), _joining(interface, timeout):
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of its own group
        rpc.init_rpc(name, rank=rank, world_size=processes, rpc_backend_options=options)


@contextmanager
def _joining(interface: str | None, seconds: float) -> Iterator[None]:
    """While it lasts, what torch opens listens on this interface, and waits only so long for others; torch waits 24 days."""
    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")}
    limit = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
    os.environ.update({} if interface is None else dict.fromkeys(before, interface))
    constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=seconds) if seconds else limit
    try:
        yield
    finally:
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = limit
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def leave() -> None:
    """Leave the group at once. A graceful shutdown would wait for ever for a peer that has died."""
    _stderr_filter.start()
    try:
        rpc.shutdown(graceful=False)
    finally:
        _stderr_filter.stop()


class RpcMessages(ControllerConnections):
    """Messages to workers by RPC, to processes with these ``names``; and to those of this process, which are its ``own``.

    >>> RpcMessages(["rank0", "rank1"], {}).connect(0, 1)
    """

    def __init__(self, names: Sequence[str], own: Mapping[int, OwnMessages]) -> None:
        super().__init__(own=own)
        self.names = names

    def post(self, worker: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into a worker's queue; the future has what its main thread answers."""
        if worker in self.own:
            return super().post(worker, number, pickled)
        return _call(self.names[worker], _arrive, number, pickled)

    def urgent(self, worker: int, pickled: Pickled) -> "Future[Pickled]":
        """Send a message that is answered even while the worker computes."""
        return super().urgent(worker, pickled) if worker in self.own else urgent(self.names[worker], pickled)

    def close(self) -> None:
        """Close what is open, and leave the group, if this process has joined it."""
        super().close()
        if rpc.api._is_current_rpc_agent_set():
            leave()


def urgent(to: str, pickled: Pickled) -> "Future[Pickled]":
    """Send another process a message that it answers even while it computes."""
    return _call(to, _answer, pickled)


def take_reports(take: Callable[[int, int, str], None]) -> None:
    """Hand what workers report of connections that they have lost to this function, on any thread."""
    global _reports
    _reports = take


def close_ports(
    name: str, others: Sequence[str], store: dist.Store, within: float, quiet: float, group: int = 0
) -> None:
    """Connect each process of a group with each; then let none listen any more. One calls this, when all have joined.

    RPC connects when a process first calls another, so all call all. Then each closes the port that RPC has noted in the
    ``store`` for this ``group``, and hangs up on strangers that came there before: they could speak later. The connections
    are probed when they are ``quiet`` for so many seconds, or a firewall might forget them.

    Raises a RuntimeError, or a TimeoutError after ``within`` seconds, if two do not get a connection.
    """
    noted = dist.PrefixStore(f"rpc_prefix_{group}", store)
    ports = {each: int(noted.get(f"addrs/{each}").rpartition(b":")[2]) for each in (name, *others)}
    asked = {each: _call(each, _connect, [to for to in ports if to != each], within) for each in others}
    found = {name: _connect(others, within), **dict(zip(asked, _answers(asked.values(), within)))}
    if without := [f"{each}: {why}" for each, why in found.items() if isinstance(why, str)]:
        raise ConnectionError("; ".join(without))
    peers = {each: [ends for other, ends in found.items() if other != each] for each in ports}
    _answers([_call(each, _close_port, ports[each], peers[each], quiet) for each in others], within)
    _close_port(ports[name], peers[name], quiet)


def _call(to: str, function: Callable[..., Any], *arguments: Any, timeout: float = 0) -> "Future[Any]":
    try:
        return rpc.rpc_async(to, function, args=arguments, timeout=timeout)
    except RuntimeError as error:  # of a peer that is known to be gone
        raise ConnectionError(str(error)) from error


def _serving() -> Served:
    assert _served is not None, "a call arrived before this process was ready to serve it"
    return _served


@rpc.functions.async_execution
def _arrive(sequence: int, pickled: Pickled) -> "Future[Pickled]":
    answer: Future[Pickled] = Future()
    _serving().messages.put_pickled(sequence, pickled, answer.set_result)
    return answer


def _answer(pickled: Pickled) -> Pickled:
    return answer_at_once(_serving().urgent, pickled)


def _connect(to: Sequence[str], within: float) -> set[Ends] | str:
    """The connections of this process, once it has one to each of these; or why it has not. RPC prints what a call raises."""
    try:
        _answers([_call(other, os.getpid) for other in to], within)
    except (RuntimeError, OSError) as error:
        return str(error)
    return connections()


def _close_port(port: int, peers: Sequence[set[Ends]], quiet: float) -> None:
    stop_listening(port)
    hang_up_on_strangers(port, peers)
    break_silent_connections(quiet)


def _answers(calls: Iterable["Future[Any]"], within: float) -> list[Any]:
    """What these calls give. Raises if one fails, or takes longer."""
    calls = list(calls)
    _wait_all(calls, within)
    if late := sum(not each.done() for each in calls):
        raise TimeoutError(f"{late} of {len(calls)} processes did not answer within {within:g} s")
    return [each.value() for each in calls]


def _wait_all(futures: Iterable["Future[Any]"], timeout: float) -> None:
    """Wait until all of these are done or have failed, or the time is up."""
    waiting = list(futures)
    over = threading.Semaphore(0)
    for future in waiting:
        future.add_done_callback(lambda _: over.release())
    end = time.monotonic() + timeout
    for _ in waiting:
        if not over.acquire(timeout=max(0.0, end - time.monotonic())):
            return


def _take_report(by: int, peer: int, how: str) -> None:
    if _reports is not None:
        _reports(by, peer, how)


def _take(key: Any, pickled: Pickled) -> None:
    try:
        value = unpickle(pickled)
    except Exception as error:  # the call's answer is looked at by nobody: who waits for the value is told
        value = Unreadable(error)
    _serving().deliver(key, value)


BEYOND = (
    2.0  # seconds beyond a cluster's timeout: by then the controller's pings have found a lost process, and say more
)
RATE = 1 << 20  # bytes that a connection must carry in a second, or it is taken for cut
_ROUNDED = 0.01  # seconds by which RPC's clock may be ahead
_OVERSLEPT = 1.0  # so late, this process was stopped, and the others may have been, too


class RpcValues:
    """Posts values to the peers, whose names for RPC ``name`` gives, and calls ``lost``, once, for a peer that takes none up.

    RPC raises nothing where the value is waited for: a connection that breaks fails the sender's call, and one that is cut
    without a word fails nothing. So the sender limits its calls: a peer must take up a value within ``seconds``, and a second
    more for each MiB of it, and of those that are under way before it.
    """

    def __init__(self, name: Callable[[int], str], lost: Callable[[int, str], None], seconds: float) -> None:
        self.name, self.lost, self.seconds = name, lost, seconds
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}  # bytes, by peer
        self._lost_peers: set[int] = set()

    def post(self, to: int, key: ValueKey, value: Any) -> None:
        """Send a value; never waits."""
        pickled = pickle_message(value)
        size = len(pickled.data) + sum(tensor.nbytes for tensor in pickled.tensors)
        with self._lock:
            self._under_way[to] = under_way = self._under_way.get(to, 0) + size
        seconds = self.seconds + under_way / RATE
        until = time.monotonic() + seconds
        try:
            future = _call(self.name(to), _take, key, pickled, timeout=seconds)
        except ConnectionError as error:
            self.note_lost(to, f"the connection broke: {_first_line(error)}")
        else:
            late = f"it has not taken up a value of {size:,} bytes within {seconds:.3g} s"
            future.add_done_callback(partial(self._taken_up, to, size, until, late))

    def _taken_up(self, to: int, size: int, until: float, late: str, future: "Future[Any]") -> None:
        with self._lock:
            self._under_way[to] -= size
        try:
            future.value()
        except Exception as error:  # RPC raises errors of all kinds
            beyond = time.monotonic() - until
            if beyond < _OVERSLEPT:
                broke = f"the connection broke: {_first_line(error)}"
                self.note_lost(to, broke if beyond < -_ROUNDED else late)

    def note_lost(self, to: int, how: str) -> None:
        """Note that a peer is lost, and how that was found."""
        with self._lock:
            known = to in self._lost_peers
            self._lost_peers.add(to)
        if not known:
            self.lost(to, how)


def transport_by_rpc(
    index: int, name: Callable[[int], str], reports_to: str, timeout: float, **options: Any
) -> WorkerTransport:
    """A worker's transport, with these options, that posts values by RPC.

    The worker reports to this process, the controller, that it has lost another, and notes it itself.
    """

    def lost(peer: int, how: str) -> None:
        with suppress(ConnectionError):  # first: it says more than that the worker cannot go on
            _call(reports_to, _take_report, index, peer, how)
        transport.mark_lost(peer)

    values = RpcValues(name, lost, timeout + BEYOND)
    transport = WorkerTransport(index, post=values.post, lost=values.note_lost, **options)
    return transport


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
