"""The only file that touches torch.distributed.rpc: joining, leaving, and the calls that pippy's processes make.

`RpcValues` are values on their way to other workers. The sender notices a value that does not arrive.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import constants
from torch.futures import Future

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
_never_answered: list["torch.futures.Future[None]"] = []

# RPC warns of each pipe that closes, also of those that it closes itself when this process leaves.
stderr_filter = StderrFilter(b"tensorpipe_agent.cpp")


def serve(served: Served) -> None:
    """Hand the calls that arrive to this messages, this worker and this transport. Before joining: calls arrive at once."""
    global _served
    _served = served


def serve_nothing() -> None:
    """No worker is here; but workers may ask whether this process lives."""
    serve(Served(MessageQueue(), urgent=lambda message: None, deliver=lambda key, value: None))


def join(
    name: str,
    rank: int,
    processes: int,
    init_method: str,
    transport: str,
    interface: str | None,
    timeout: float = 0,
    group: int = 0,
) -> None:
    """Join the RPC group; waits for all others. ``transport`` is "shm" or "uv", which is TCP.

    What torch opens listens on the named interface; with None, on the one that torch chooses: that of this host's name.

    ``timeout`` bounds the waits of joining, after which this raises a RuntimeError; a store in a file takes 0 for no bound, one
    of TCP does not. Calls have none.

    RPC counts its groups, and the exchanges among their members, in this process alone: one that was in a group before
    would wait for the others under numbers that they, being new, do not have. So both counts start again, that of groups with
    ``group``, which is how many have met at the store before.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, num_worker_threads=4, rpc_timeout=timeout, _transports=[transport], _channels=["basic"]
    )
    rpc._init_counter = group
    rpc.api._all_gather_sequence_id.clear()
    rpc.api._all_gather_sequence_id_to_states.clear()
    with warnings.catch_warnings(), _listening_on(interface), _waiting_for_peers(timeout):
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of its own group
        rpc.init_rpc(name, rank=rank, world_size=processes, rpc_backend_options=options)


@contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    """While it lasts, what torch opens listens on this interface, whatever this host's name resolves to."""
    if interface is None:
        yield
        return
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _waiting_for_peers(seconds: float) -> Iterator[None]:
    """While it lasts, a process waits only so long for the others to connect, if there is a limit; torch waits for 24 days."""
    before = constants.DEFAULT_PROCESS_GROUP_TIMEOUT
    constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=seconds) if seconds else before
    try:
        yield
    finally:
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = before


def leave() -> None:
    """Leave the group at once. A graceful shutdown would wait for ever for a peer that has died."""
    stderr_filter.start()
    try:
        rpc.shutdown(graceful=False)
    finally:
        stderr_filter.stop()
        _never_answered.clear()


def post(to: str, sequence: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
    """Put a message into the queue of another process; the future has what its main thread answers."""
    return _call(to, _arrive, sequence, pickled)


def urgent(to: str, pickled: Pickled) -> "torch.futures.Future[Pickled]":
    """Send another process a message that it answers even while it computes."""
    return _call(to, _answer, pickled)


def deliver(to: str, key: Any, pickled: Pickled) -> "torch.futures.Future[Pickled]":
    """Hand a value to the transport of another worker; the future is done when it is there."""
    return _call(to, _take, key, pickled)


def report_lost(to: str, by: int, peer: int, how: str) -> None:
    """Tell the controller that worker ``by`` has lost the connection to another."""
    with suppress(ConnectionError):
        _call(to, _take_report, by, peer, how)


def take_reports(take: Callable[[int, int, str], None]) -> None:
    """Hand what workers report to this function, on any thread."""
    global _reports
    _reports = take


def watch(to: str, seconds: float, broken: Callable[[], None]) -> "torch.futures.Future[Pickled]":
    """Have ``broken`` called, on any thread, when another process is gone: by a call that is never answered.

    That its host is gone, or cut off, is noticed after four times so many ``seconds``. Returns the call, which is done then,
    also where there was no memory to call ``broken``.
    """
    watching = _call(to, _wait_for_ever)
    watching.add_done_callback(lambda _: broken())
    break_silent_connections(seconds)  # joining has connected this process with the first of the group
    return watching


def wait_all(futures: Iterable["torch.futures.Future[Any]"], timeout: float) -> None:
    """Wait until all of these are done or have failed, or the time is up."""
    waiting = list(futures)
    over = threading.Semaphore(0)
    for future in waiting:
        future.add_done_callback(lambda _: over.release())
    end = time.monotonic() + timeout
    for _ in waiting:
        if not over.acquire(timeout=max(0.0, end - time.monotonic())):
            return


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


def _call(to: str, function: Callable[..., Any], *arguments: Any) -> "torch.futures.Future[Pickled]":
    try:
        return rpc.rpc_async(to, function, args=arguments, timeout=0)
    except RuntimeError as error:  # of a peer that is known to be gone
        raise ConnectionError(str(error)) from error


def _serving() -> Served:
    assert _served is not None, "a call arrived before this process was ready to serve it"
    return _served


@rpc.functions.async_execution
def _arrive(sequence: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
    answer: torch.futures.Future[Pickled] = torch.futures.Future()
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


def _answers(calls: Iterable["torch.futures.Future[Any]"], within: float) -> list[Any]:
    """What these calls give. Raises if one fails, or takes longer."""
    calls = list(calls)
    wait_all(calls, within)
    if late := sum(not each.done() for each in calls):
        raise TimeoutError(f"{late} of {len(calls)} processes did not answer within {within:g} s")
    return [each.value() for each in calls]


def _take_report(by: int, peer: int, how: str) -> None:
    if _reports is not None:
        _reports(by, peer, how)


@rpc.functions.async_execution
def _wait_for_ever() -> "torch.futures.Future[None]":
    answer: torch.futures.Future[None] = torch.futures.Future()
    _never_answered.append(answer)
    return answer


def _take(key: Any, pickled: Pickled) -> None:
    try:
        value = unpickle(pickled)
    except Exception as error:  # the call's answer is looked at by nobody: who waits for the value is told
        value = Unreadable(error)
    _serving().deliver(key, value)


BEYOND = (
    2.0  # seconds beyond a cluster's timeout: the controller's pings have found a lost process by then, and say more
)
RATE = 1 << 20  # bytes that a connection must carry in a second, or it is taken for cut
_OVERSLEPT = 1.0  # so late, this process was stopped, and the others may have been, too


@dataclass(slots=True)
class _UnderWay:
    """The sizes of the values that a peer has not taken up, by number. ``since`` is when that began, or one was taken up."""

    since: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)

    def oldest(self) -> int:
        """The size of the value that was posted first."""
        return next(iter(self.sizes.values()))


class RpcValues:
    """Posts values to the peers, whose names for RPC ``name`` gives, and calls ``lost``, once, for a peer that takes none up.

    RPC raises nothing where the value is waited for: a connection that breaks fails the sender's call, and one that is cut
    without a word fails nothing. So the sender watches its calls: a peer must take up a value within ``seconds``, and a second
    more for each MiB of it, or of those that are under way before it.

    >>> from torch.futures import Future
    >>> RpcValues(str, lambda peer, how: print(peer, how), 0.01).watch(2, 8, Future()).join(1)
    2 it has not taken up a value of 8 bytes within 0.01 s
    """

    def __init__(self, name: Callable[[int], str], lost: Callable[[int, str], None], seconds: float) -> None:
        self.name, self.lost, self.seconds = name, lost, seconds
        self._changed = threading.Condition()
        self._under_way: dict[int, _UnderWay] = {}
        self.lost_peers: set[int] = set()
        self._number = 0
        self._idle = self._ended = False
        self._watcher: threading.Thread | None = None

    def post(self, to: int, key: ValueKey, value: Any) -> None:
        """Send a value; never waits."""
        pickled = pickle_message(value)
        try:
            future = deliver(self.name(to), key, pickled)
        except ConnectionError as error:
            self.note_lost(to, f"the connection broke: {_first_line(error)}")
        else:
            self.watch(to, len(pickled.data) + sum(tensor.nbytes for tensor in pickled.tensors), future)

    def watch(self, to: int, size: int, future: "Future[Any]") -> threading.Thread:
        """Watch a call that carries a value of so many bytes. Returns the thread that does."""
        with self._changed:
            under_way = self._under_way.setdefault(to, _UnderWay())
            if not under_way.sizes:
                under_way.since = time.monotonic()
            self._number += 1
            number = self._number
            under_way.sizes[number] = size
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="pippy values", daemon=True)
                self._watcher.start()
            elif self._idle:
                self._changed.notify()
        future.add_done_callback(partial(self._taken_up, to, number))
        return self._watcher

    def end(self) -> None:
        """From now on connections may break."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _taken_up(self, to: int, number: int, future: "Future[Any]") -> None:
        with self._changed:
            self._under_way[to].sizes.pop(number, None)
            self._under_way[to].since = time.monotonic()
        try:
            future.value()
        except Exception as error:  # RPC raises errors of all kinds
            self.note_lost(to, f"the connection broke: {_first_line(error)}")

    def note_lost(self, to: int, how: str) -> None:
        """Note that a peer is lost, and how that was found."""
        with self._changed:
            known = to in self.lost_peers or self._ended
            self.lost_peers.add(to)
        if not known:
            self.lost(to, how)

    def _watch(self) -> None:
        while (late := self._next_late()) is None:
            pass
        if late:
            self.note_lost(*late)

    def _next_late(self) -> tuple[int, str] | tuple[()] | None:
        """Wait for a time to look, and look: a peer that has taken nothing up in time, and how. () at the end."""
        with self._changed:
            due = {to: self._due(each) for to, each in self._under_way.items() if each.sizes}
            first = min(due, key=due.__getitem__) if due else None
            now = time.monotonic()
            if self._ended:
                return ()
            if first is None or due[first] > now:
                self._idle = first is None
                self._changed.wait(None if first is None else due[first] - now)
            elif now - due[first] > _OVERSLEPT:
                for each in self._under_way.values():
                    each.since = now
            else:
                size = self._under_way[first].oldest()
                seconds = self.seconds + size / RATE
                return first, f"it has not taken up a value of {size:,} bytes within {seconds:.3g} s"
        return None

    def _due(self, under_way: _UnderWay) -> float:
        return under_way.since + self.seconds + under_way.oldest() / RATE


def transport_by_rpc(
    index: int, name: Callable[[int], str], reports_to: str, timeout: float, **options: Any
) -> tuple[WorkerTransport, RpcValues]:
    """A worker's transport, with these options, that posts values by RPC, and what it is to call with a peer that it loses.

    The worker reports to this process, the controller, that it has lost another, and notes it itself.
    """

    def lost(peer: int, how: str) -> None:
        report_lost(reports_to, index, peer, how)  # first: it says more than that the worker cannot go on
        transport.mark_lost(peer)

    values = RpcValues(name, lost, timeout + BEYOND)
    transport = WorkerTransport(index, post=values.post, lost=values.note_lost, **options)
    return transport, values


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
