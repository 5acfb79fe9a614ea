"""Opens a cluster on the engine that the call names, or else on that which the script was started for."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.arguments import check_choice
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.lazy_cluster import current_lazy_cluster
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.engines.ray.ray_cluster import ray_cluster
from pippy.drivers.engines.torchrun.torchrun import torchrun_cluster
from pippy.ir.base.brief import brief
from pippy.ir.base.public_calls import placing_words

ENGINES = ("local", "torchrun", "ray")
_OF_RAY = ("address", "strategy", "resources", "num_gpus")
_NOT_OF_RAY = ("pin", "transport", "controller_hosts")


@placing_words("cluster(n)")
def cluster(
    n: int | None = None,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool | None = None,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    transport: Literal["shared_memory", "rpc"] | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    controller_hosts: bool | None = None,
    engine: Literal["local", "torchrun", "ray"] | None = None,
    address: str | None = None,
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None,
    resources: Mapping[str, float] | None = None,
    num_gpus: float | None = None,
) -> Cluster:
    """The workers that torchrun has started, or ``n`` new workers on this host, or on Ray. One script works in all cases.

    Under torchrun all ranks call this. Rank 0 gets the cluster, and also hosts a worker, unless ``controller_hosts`` is
    False. On all other ranks the call runs a worker until rank 0 closes the cluster, and then leaves the script by
    SystemExit. So only rank 0 runs the code after the call. The default device is the GPU of the local rank, if
    there are GPUs.

    Workers of one host pass tensors through memory that both see, others by TCP and RPC (``print(cluster.routes)``). With
    ``transport="rpc"`` all pass them by RPC. With ``"shared_memory"`` the call raises if two workers cannot share memory.

    Without torchrun this is `local_cluster(n)`, and takes its options. If ``n`` is not given, the environment variable
    PIPPY_WORKERS has the number of workers. In a script that `pippy run` has started, it is the cluster of `pippy run`. The
    option ``pin`` is for workers that this call starts, and refused under torchrun.

    With ``engine="ray"`` each worker is an actor of Ray: of the Ray at ``address`` (as "10.0.0.1:6379", or "auto" for the one
    that runs on this machine), or of that which the script or RAY_ADDRESS names, or of one that this call starts on this
    machine, and that ends with the cluster. Ray places the workers by ``strategy``, in a placement group with a bundle for
    each: as many CPUs as it has ``threads``, ``num_gpus`` GPUs, and what ``resources`` names besides. ``"local"`` and
    ``"torchrun"`` name the other two engines.

    >>> with cluster(2, threads=1) as workers:
    ...     workers
    <Cluster of 2 workers, open: worker0, worker1>
    """
    check_choice("engine", engine, (None, *ENGINES))
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    chosen = engine or ("torchrun" if started else "local")
    options: dict[str, Any] = {"threads": threads, "devices": devices, "device": device, "names": names}
    options |= {"pin": pin, "transport": transport, "patience": patience, "controller_hosts": controller_hosts}
    options |= {"address": address, "strategy": strategy, "resources": resources, "num_gpus": num_gpus}
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(given, chosen)
    times: dict[str, Any] = {"timeout": timeout, "start_timeout": start_timeout}
    if chosen == "torchrun":
        if not started:
            raise ClusterError(
                'engine="torchrun", and torchrun has not started this script; start it so (torchrun --nproc-per-node 2 '
                "script.py), or leave out engine"
            )
        return torchrun_cluster(n, **given, **times)
    lazy = current_lazy_cluster()
    if chosen == "ray":
        return ray_cluster(_number(lazy.n if n is None and lazy is not None else n), **given, **times)
    given.pop("controller_hosts", None)  # for torchrun, in a script for both
    if lazy is not None:
        return lazy.requested(n, given, **times)
    return local_cluster(_number(n), **given, **times)


def _check_options(given: Mapping[str, Any], engine: str) -> None:
    """Raise if an option is given that another engine takes."""
    for name in _NOT_OF_RAY if engine == "ray" else _OF_RAY:
        if given.get(name):
            other = "no option" if engine == "ray" else 'an option of engine="ray"'
            raise ClusterError(
                f"{name}={brief(given[name])} is {other}, and this cluster is on engine {engine!r}; leave out {name}"
                + ("" if engine == "ray" else ', or write cluster(n, engine="ray")')
            )


def _number(n: int | None) -> int:
    if n is not None:
        return n
    workers = os.environ.get("PIPPY_WORKERS", "")
    if not workers.isdecimal():
        raise ClusterError(
            f"cluster() does not know how many workers to start{f': PIPPY_WORKERS is {workers!r}' if workers else ''}; start "
            f"the script with pippy run -n 2 or torchrun --nproc-per-node 2, set PIPPY_WORKERS=2 in the environment, or write "
            f"cluster(2)"
        )
    return int(workers)
