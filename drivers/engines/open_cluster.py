"""Opens a cluster on the engine that the call names, or else on that which the script was started for."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.arguments import check_choice
from pippy.drivers.engines.cluster import Cluster, current_lazy_cluster
from pippy.drivers.engines.joined.joined_engine import joined_cluster
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.engines.ray.ray_cluster import ray_cluster
from pippy.drivers.engines.torchrun.torchrun import torchrun_cluster
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import brief

ENGINES = ("local", "torchrun", "ray")
# Which engines take an option, where not all do.
_TAKEN_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("threads", "device", "devices"), ("local", "torchrun", "ray")),
    **dict.fromkeys(("address", "strategy", "resources", "num_gpus", "spares"), ("ray",)),
    **dict.fromkeys(("join", "secret_file"), ("joined",)),
    "pin": ("local",),
    "transport": ("local", "torchrun"),
    "controller_hosts": ("torchrun", "local"),  # where it means nothing: for torchrun, in a script for both
}
_ASKED_BY = {"local": "cluster(n)", "torchrun": "torchrun", "ray": 'engine="ray"', "joined": "join=True"}
# What an engine has instead of an option of another one.
_HAS_INSTEAD = {
    (
        "spares",
        "local",
    ): "its processes are forks of one that has imported everything, and a lost one is replaced in less than a second",
    ("spares", "joined"): "each worker that joins beyond n is a spare, so start one more with the line that is printed",
    ("threads", "joined"): "each worker says it for itself, by an option of pippy worker: --threads",
    ("device", "joined"): "each worker says it for itself, by an option of pippy worker: --device",
}


@placing_words("cluster(n)")
def cluster(
    n: int | None = None,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool | None = None,
    names: Sequence[str] | None = None,
    timeout: float | None = None,
    transport: Literal["shared_memory", "rpc"] | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    controller_hosts: bool | None = None,
    engine: Literal["local", "torchrun", "ray"] | None = None,
    address: str | None = None,
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None,
    resources: Mapping[str, float] | None = None,
    num_gpus: float | None = None,
    spares: int | None = None,
    join: bool | int | str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
) -> Cluster:
    """The workers that torchrun has started, or ``n`` new workers on this host or on Ray, or ``n`` that join from any host.

    One script works in all cases.

    Under torchrun all ranks call this. Rank 0 gets the cluster, and also hosts a worker, unless ``controller_hosts`` is
    False. On all other ranks the call runs a worker until rank 0 closes the cluster, and then leaves the script by
    SystemExit. So only rank 0 runs the code after the call. The default device is the GPU of the local rank, if
    there are GPUs.

    Workers of one host pass tensors through memory that both see, others by TCP (``print(cluster.routes)``). Under torchrun,
    ``transport="rpc"`` has all pass them by RPC. With ``"shared_memory"`` the call raises if two workers cannot share memory.

    A worker that does not answer for ``timeout`` seconds is lost. The default is 5, and 65 where torchrun has started workers
    on several hosts: a network that is cut for 30 s ends nothing then.

    Without torchrun this is `local_cluster(n)`, and takes its options. If ``n`` is not given, the environment variable
    PIPPY_WORKERS has the number of workers. In a script that `pippy run` has started, it is the cluster of `pippy run`. The
    option ``pin`` is for workers that this call starts, and refused under torchrun.

    With ``engine="ray"`` each worker is an actor of Ray: of the Ray at ``address`` (as "10.0.0.1:6379", or "auto" for the one
    that runs on this machine), or of that which the script or RAY_ADDRESS names, or of one that this call starts on this
    machine, and that ends with the cluster. Ray places the workers by ``strategy``, in a placement group with a bundle for
    each: as many CPUs as it has ``threads``, ``num_gpus`` GPUs, and what ``resources`` names besides. So many ``spares`` wait
    with everything imported, and take the places of workers that are lost. ``"local"`` and ``"torchrun"`` name the other two
    engines.

    With ``join=True``, a port, or "HOST:PORT" of this host, the call prints a line (``pippy worker --join ...``) and waits
    until ``n`` workers have been started with it, in any shell of any host. Only who has the ``secret_file`` can join; it is
    made if it is not there. Workers that join beyond ``n`` wait, and take the places of those that are lost. A worker's device
    and its threads are options of that line.

    >>> with cluster(2, threads=1) as workers:
    ...     workers
    <Cluster of 2 workers, open: worker0, worker1>
    """
    check_choice("engine", engine, (None, *ENGINES))
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if engine is not None and join:
        raise ClusterError(f"join={brief(join)} is another way than engine={engine!r}; leave out one of the two")
    if join and started and os.environ["WORLD_SIZE"] != "1":
        raise ClusterError(
            f"join={brief(join)}, and this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} processes that torchrun "
            "or something like it has started (RANK and WORLD_SIZE are set): each would wait for workers of its own; start the "
            "script with python, or leave out join"
        )
    chosen = engine or ("joined" if join else "torchrun" if started else "local")
    options: dict[str, Any] = {"threads": threads, "devices": devices, "device": device, "names": names}
    options |= {"pin": pin, "transport": transport, "patience": patience, "controller_hosts": controller_hosts}
    options |= {"address": address, "strategy": strategy, "resources": resources, "num_gpus": num_gpus}
    options |= {"spares": spares}
    options |= {"join": join or None, "secret_file": secret_file}
    given = {name: value for name, value in options.items() if value is not None}
    given = _own_options(given, chosen)
    times: dict[str, Any] = {"start_timeout": start_timeout} | ({} if timeout is None else {"timeout": timeout})
    if chosen == "torchrun":
        if not started:
            raise ClusterError(
                'engine="torchrun", and torchrun has not started this script; start it so (torchrun --nproc-per-node 2 '
                "script.py), or leave out engine"
            )
        return torchrun_cluster(n, **given, **times)
    lazy = current_lazy_cluster()
    if chosen in ("ray", "joined"):
        opened = ray_cluster if chosen == "ray" else joined_cluster
        return opened(_number(lazy.n if n is None and lazy is not None else n), **given, **times)
    given.pop("controller_hosts", None)  # for torchrun, in a script for both
    if lazy is not None:
        return lazy.requested(n, given, **times)
    return local_cluster(_number(n), **given, **times)


def _own_options(given: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The options without those of other engines. Raises if one of these says anything."""
    for name, value in given.items():
        taken_by = _TAKEN_BY.get(name, (engine,))
        if value and engine not in taken_by:
            asked = " or ".join(_ASKED_BY[each] for each in taken_by)
            instead = f", where {each}" if (each := _HAS_INSTEAD.get((name, engine))) else ""
            raise ClusterError(
                f"{name}={brief(value)} is an option of {asked}, and this cluster is on engine {engine!r}{instead}; leave out "
                f"{name}"
            )
    return {name: value for name, value in given.items() if engine in _TAKEN_BY.get(name, (engine,))}


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
