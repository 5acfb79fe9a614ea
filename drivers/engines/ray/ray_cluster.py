"""Opens a cluster whose workers are actors of Ray."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.arguments import check_choice, checked_names, polling_time
from pippy.drivers.engines.cluster import Cluster, check_none_open, note_local_cluster, opened
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.engines.ray.ray_engine import RayEngine, RayLaunch
from pippy.drivers.engines.ray.ray_instance import imported_ray, leave_ray, starts_own, use_ray
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import brief

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def ray_cluster(
    n: int,
    *,
    address: str | None = None,
    strategy: str = "PACK",
    resources: Mapping[str, float] | None = None,
    num_gpus: float = 0,
    spares: int = 0,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """A cluster of ``n`` actors. `cluster` says what the arguments are."""
    names = checked_names(n, names, threads, devices, device, timeout=timeout, start_timeout=start_timeout)
    check_choice("strategy", strategy, STRATEGIES)
    polling_time(patience, crowded=False)
    _check_address(address)
    check_count("spares", spares, "how many workers wait for the place of a lost one", ClusterError, least=0)
    imported_ray()
    bundle = _bundle(
        resources, num_gpus, threads, max(1, len(os.sched_getaffinity(0)) // n) if starts_own(address) else 1
    )
    default = "cuda" if bundle.get("GPU") else "cpu"
    launch = RayLaunch(
        worker=_worker,
        names=names,
        devices=tuple(map(str, devices if devices is not None else [device or default] * n)),
        threads=threads or max(1, int(bundle.get("CPU", 1))),
        bundle=bundle,
        strategy=strategy,
        timeout=timeout,
        patience=patience,
        spares=spares,
    )
    check_none_open()
    note_local_cluster()
    use_ray(address, launch.actors * bundle.get("CPU", 0))
    return opened(partial(_engine, launch), timeout, start_timeout)


def _engine(launch: RayLaunch) -> RayEngine:
    """The engine, on the Ray that this process uses for it. If there is no engine, this process leaves Ray."""
    try:
        return RayEngine(launch)
    except BaseException:
        leave_ray()
        raise


def _check_address(address: Any) -> None:
    if address is not None and not (isinstance(address, str) and address):
        raise ClusterError(
            f'address is that of a Ray that runs, as "10.0.0.1:6379", or "auto"; this is {brief(address)}'
        )


def _bundle(resources: Mapping[str, float] | None, num_gpus: float, threads: int | None, cpus: int) -> dict[str, float]:
    """What each worker reserves: as many CPUs as it has threads, unless ``resources`` say it."""
    given = {} if resources is None else resources
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and _is_amount(given[name]) for name in given):
        raise ClusterError(
            "resources has, for each worker, how much it reserves of what, as {'CPU': 4, 'memory': 2**30}; this is "
            f"{brief(resources)}"
        )
    if not _is_amount(num_gpus) or ("GPU" in given and num_gpus):
        raise ClusterError(
            f"num_gpus is how many GPUs each worker reserves, in place of 'GPU' in resources; this is {brief(num_gpus)}"
        )
    bundle = {"CPU": threads or cpus, "GPU": num_gpus, **given}
    reserved = {name: float(amount) for name, amount in bundle.items() if amount}
    if not reserved:
        raise ClusterError("resources reserves nothing, and Ray places no such worker; give it a 'CPU', 0.01 or more")
    return reserved


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**62
