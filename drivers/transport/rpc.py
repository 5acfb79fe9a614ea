"""The only file that touches torch.distributed.rpc: joining, leaving, and the calls that pippy's processes make."""

import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import rpc

from pippy.drivers.transport import wire
from pippy.drivers.transport.hush import Hush
from pippy.drivers.transport.inbox import Inbox
from pippy.drivers.transport.wire import Packed, Undone, pack, unpack


@dataclass(frozen=True)
class Served:
    """What the calls that arrive in this process are handed to.

    >>> Served(Inbox(), urgent=str, deliver=print).urgent(1)
    '1'
    """

    inbox: Inbox
    urgent: Callable[[Any], Any]
    deliver: Callable[[Any, Any], None]


_served: Served | None = None
_held: list["torch.futures.Future[None]"] = []

# RPC warns of each pipe that closes, also of those that it closes itself when it is told to leave.
hush = Hush(b"tensorpipe_agent.cpp")


def serve(served: Served) -> None:
    """Hand the calls that arrive to this inbox, this worker and this transport. Before joining: calls arrive at once."""
    global _served
    _served = served


def serve_answers(deliver: Callable[[Any, Any], None] = lambda key, value: None) -> None:
    """No worker is here; but workers may have answers to deliver."""
    serve(Served(Inbox(), urgent=lambda message: None, deliver=deliver))


def join(
    name: str, rank: int, processes: int, init_method: str, transport: str, interface: str | None, timeout: float = 0
) -> None:
    """Join the RPC group; waits for all others. ``transport`` is "shm" or "uv", which is TCP.

    What torch opens listens on the named interface; with None, on the one that torch chooses: that of this host's name.

    ``timeout`` bounds the waits of joining; a store in a file takes 0 for no bound, one of TCP does not. Calls have none.

    RPC counts its groups, and the exchanges among their members, in this process alone: one that was in a group before
    would wait for the others under numbers that they, being new, do not have. So both counts start again.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method,
        num_worker_threads=4,
        rpc_timeout=timeout,
        _transports=[transport],
        _channels=["basic"],
    )
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    rpc.api._all_gather_sequence_id_to_states.clear()
    with warnings.catch_warnings(), _listening_on(interface):
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


def leave() -> None:
    """Leave the group at once. A graceful shutdown would wait for ever for a peer that has died."""
    hush.start()
    try:
        rpc.shutdown(graceful=False)
    finally:
        hush.stop()
        _held.clear()


def post(to: str, sequence: int, packed: Packed) -> "torch.futures.Future[Packed]":
    """Put a message into the inbox of another process; the future has what its main thread answers."""
    return _call(to, _arrive, sequence, packed)


def urgent(to: str, message: Any) -> "torch.futures.Future[Packed]":
    """Ask another process something that it answers even while it computes."""
    return _call(to, _answer, pack(message))


def ping(to: str) -> "torch.futures.Future[Packed]":
    """Ask whether another process lives."""
    return _call(to, _pong)


def deliver(to: str, key: Any, value: Any) -> None:
    """Hand a value to the transport of another worker. That a worker is gone is the controller's to notice."""
    packed = pack((key, value))
    with suppress(ConnectionError):
        _call(to, _take, packed)


def hold(to: str, broken: Callable[[], None]) -> None:
    """Make a call that is never answered, so that ``broken`` is called, on any thread, when the other process is gone."""
    _call(to, _hold).add_done_callback(lambda _: broken())


def wait_all(futures: Iterable["torch.futures.Future[Any]"], timeout: float) -> None:
    """Wait until all of these are over, well or ill, or the time is."""
    waiting = list(futures)
    over = threading.Semaphore(0)
    for future in waiting:
        future.add_done_callback(lambda _: over.release())
    end = time.monotonic() + timeout
    for _ in waiting:
        if not over.acquire(timeout=max(0.0, end - time.monotonic())):
            return


def _call(to: str, function: Callable[..., Any], *arguments: Any) -> "torch.futures.Future[Packed]":
    try:
        return rpc.rpc_async(to, function, args=arguments, timeout=0)
    except RuntimeError as error:  # of a peer that is known to be gone
        raise ConnectionError(str(error)) from error


def _serving() -> Served:
    assert _served is not None, "a call arrived before this process was ready to serve it"
    return _served


@rpc.functions.async_execution
def _arrive(sequence: int, packed: Packed) -> "torch.futures.Future[Packed]":
    answer: torch.futures.Future[Packed] = torch.futures.Future()
    wire.put(_serving().inbox, sequence, packed, answer.set_result)
    return answer


def _answer(packed: Packed) -> Packed:
    try:
        return pack(_serving().urgent(unpack(packed)))
    except Exception:
        return pack(Undone(traceback.format_exc()))


@rpc.functions.async_execution
def _hold() -> "torch.futures.Future[None]":
    answer: torch.futures.Future[None] = torch.futures.Future()
    _held.append(answer)
    return answer


def _pong() -> Packed:
    return pack(os.getpid())


def _take(packed: Packed) -> None:
    _serving().deliver(*unpack(packed))
