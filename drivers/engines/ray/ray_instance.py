"""The Ray that this process uses: one that it has joined, or one that was started for it, which ends with its last cluster."""

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.ir.base.readable import brief

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # to which gRPC, and so Ray, answers with settings
_SETTINGS = 4
_ANSWERS = 5.0  # seconds that Ray's head has to answer
_OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # of a Ray that is started here
_MEMORY = 128 << 20  # bytes for objects of Ray; no value of pippy's is one

_ended = threading.Event()  # set when Ray ends that was started on a thread beside the main one
_users = 0  # clusters of this process
_is_own = False
_using = threading.RLock()


def imported_ray() -> Any:
    """The module of Ray. It takes long to import, and is not always installed."""
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            'engine="ray" needs Ray, and it cannot be imported here '
            f'({error}): pip install "pippy-compiler[ray]"; or leave out engine, and the workers are processes of this host'
        ) from error
    return ray


def starts_own(address: str | None) -> bool:
    """Whether `use_ray` with this address starts a Ray on this machine."""
    return address is None and not os.environ.get("RAY_ADDRESS") and not imported_ray().is_initialized()


def use_ray(address: str | None, cpus: float) -> None:
    """Join the Ray at an address, "auto" for one that runs on this machine; with None that of the script, or a new one.

    A new one counts at least so many ``cpus``. To each call belongs one of `leave_ray`.
    """
    global _users, _is_own
    ray = imported_ray()
    with _using:
        if ray.is_initialized():
            _check_same(ray, address)
        elif starts_own(address):
            _on_lasting_thread(partial(_start, ray, cpus))
            _is_own = True
        else:
            _join(ray, address or os.environ["RAY_ADDRESS"])
            _is_own = True
        _users += 1


def leave_ray() -> None:
    """A cluster is closed. With the last one this process leaves Ray, or ends it, unless the script itself has joined it."""
    global _users, _is_own
    with _using:
        _users -= 1
        if _users == 0 and _is_own:
            _is_own = False
            imported_ray().shutdown()
            _ended.set()


def _check_same(ray: Any, address: str | None) -> None:
    joined = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", joined):
        raise ClusterError(
            f"address={brief(address)}, and this process uses the Ray at {joined} already; leave out address, or call "
            "ray.shutdown() first"
        )


def _on_lasting_thread(start: Callable[[], None]) -> None:
    """Call a function on a thread that lasts until `leave_ray`: with it the system ends the processes that it has started."""
    if threading.current_thread() is threading.main_thread():
        start()
        return
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    _ended.clear()

    def run() -> None:
        try:
            start()
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)
            _ended.wait()

    threading.Thread(target=run, name="pippy ray", daemon=True).start()
    if (error := outcome.get()) is not None:
        raise error


def _start(ray: Any, cpus: float) -> None:
    added = {name: value for name, value in _OWN.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        ray.init(
            address="local",
            num_cpus=max(len(os.sched_getaffinity(0)), int(-(-cpus // 1))),
            include_dashboard=False,
            object_store_memory=_MEMORY,
            logging_level="ERROR",
        )
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, Exception):
            raise ClusterError(
                f"Ray could not be started on this machine: {error}; its logs are in /tmp/ray/session_latest/logs"
            ) from error
        raise
    finally:
        for name in added:
            del os.environ[name]


def _join(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ClusterError(
            f"address={address!r} is that of a Ray client, whose host is no node of the cluster: workers could not reach "
            'it. Start the script on a node, with address="auto"'
        )
    try:
        where = _resolved(address)
        _check_answers(where)
    except (OSError, ValueError) as error:  # Ray itself would try for minutes
        raise ClusterError(
            f"no Ray answers at address={address!r}: {error}; start one (ray start --head), or leave out address, and "
            "cluster() starts one on this machine"
        ) from error
    try:
        ray.init(address=address, logging_level="ERROR")  # "auto" also has it read the token of this account
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, Exception):
            said = str(error.__cause__ or error).strip()
            why = said.splitlines()[-1] if error.__cause__ else " ".join(said.split())
            raise ClusterError(
                f"this process cannot join the Ray at {where}: {why}\nEach node, and this process, needs the same versions of "
                "Ray and Python, and the cluster's token if it has one (RAY_AUTH_MODE=token with an address of host and port)"
            ) from error
        raise


def _resolved(address: str) -> str:
    """The host and port of an address, which may be "auto"."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def _check_answers(address: str) -> None:
    """Raise OSError unless something speaks gRPC at a host and port."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS) as end:
        end.settimeout(_ANSWERS)
        end.sendall(_PREFACE)
        answer = b""
        with suppress(TimeoutError):
            while len(answer) < 4 and (more := end.recv(4 - len(answer))):
                answer += more
    if answer[3:4] != bytes([_SETTINGS]):
        raise ConnectionError("another program listens there")
