"""`pippy doctor`: what works on this host, what does not, and what to do.

Each check returns an `Outcome`. A check that raises has failed, and its error is the outcome.
"""

import importlib
import json
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

import click

from pippy.ir.base.readable import count_with_noun

DISTRIBUTION = "pippy-compiler"
GIB = 1 << 30
_FEW_FILES, _FEW_PROCESSES, _SMALL_LOCK = 1024, 512, 64 << 10


@dataclass(frozen=True)
class CheckResult:
    """The result of a check, as it is printed: its name, its state, what it found, and what to do about it.

    >>> CheckResult("torch", "ok", "2.13.0").remedy
    ''
    """

    name: str
    state: Literal["ok", "warning", "fails"]
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a check found. With a remedy it is a warning, or a failure if it is fatal."""

    text: str
    remedy: str = ""
    fatal: bool = False


Check = Callable[[], Outcome]


def run_check(name: str, check: Check, before: Iterable[CheckResult] = ()) -> CheckResult:
    """Run a check.

    >>> run_check("host", lambda: Outcome("strange", "change it"))
    CheckResult(name='host', state='warning', said='strange', remedy='change it')
    >>> run_check("host", lambda: 1 / 0).state
    'fails'
    """
    if name in NEEDS_TORCH and any(each.name == "torch" and each.state == "fails" for each in before):
        return CheckResult(name, "warning", "not checked, as torch does not work")
    try:
        said = check()
    except Exception as error:
        words = str(error).strip() or type(error).__name__
        return CheckResult(name, "fails", f"{type(error).__name__}: {words}", REMEDIES.get(name, ""))
    return CheckResult(name, "fails" if said.fatal else "warning" if said.remedy else "ok", said.text, said.remedy)


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version.

    >>> version_numbers("2.13.0+cpu"), version_numbers("2.14.0a0")
    ((2, 13, 0), (2, 14, 0))
    """
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def oldest_version(package: str) -> str | None:
    """The oldest version of a package that pippy accepts."""
    with suppress(PackageNotFoundError):
        for line in requires(DISTRIBUTION) or ():
            match = re.match(rf"{package}\s*>=\s*([\d.]+)\s*$", line)
            if match:
                return match[1]
    return None


def python() -> Outcome:
    """The interpreter and the system."""
    here = f"{platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Outcome(here, "workers need Linux; graphs, schedules and drawings work here", fatal=True)
    with suppress(PackageNotFoundError):
        wanted = metadata(DISTRIBUTION)["Requires-Python"].removeprefix(">=")
        if sys.version_info[: len(version_numbers(wanted))] < version_numbers(wanted):
            return Outcome(here, f"pippy needs Python {wanted} or newer; make an environment with one", fatal=True)
    return Outcome(here)


def torch_itself() -> Outcome:
    """Whether torch can be imported, is new enough, and was built with RPC."""
    began = time.perf_counter()
    import torch
    from torch.distributed import rpc

    here = f"{torch.__version__}, imported in {time.perf_counter() - began:.1f} s"
    wanted = oldest_version("torch")
    if wanted and version_numbers(torch.__version__)[: len(version_numbers(wanted))] < version_numbers(wanted):
        return Outcome(here, f"pippy is made for torch {wanted} or newer; pip install 'torch>={wanted}'", fatal=True)
    if not rpc.is_available() or not hasattr(rpc, "TensorPipeRpcBackendOptions"):
        return Outcome(f"{here}, without RPC", "workers need a torch that was built with distributed RPC", fatal=True)
    return Outcome(here)


def packages() -> Outcome:
    """The other packages that pippy imports, and whether functions can be sent to other processes."""
    versions = []
    for name in ("cloudpickle", "networkx"):
        importlib.import_module(name)
        versions.append(f"{name} {version(name)}")
        wanted = oldest_version(name)
        if wanted and version_numbers(version(name))[: len(version_numbers(wanted))] < version_numbers(wanted):
            return Outcome(
                versions[-1], f"pippy needs {name} {wanted} or newer; pip install '{name}>={wanted}'", fatal=True
            )
    from pippy.drivers.wire.pickling import pickle_by_value, unpickle

    three = 3
    if unpickle(pickle_by_value(lambda: three))() != 3:
        return Outcome(
            f"{', '.join(versions)}, and a function did not come back as it was", REMEDIES["packages"], fatal=True
        )
    return Outcome(f"{', '.join(versions)}; functions travel by value")


def cores() -> Outcome:
    """How many cores this process may use, and whether there is a quota."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    said = count_with_noun(count, "core")
    if quota is not None and quota < count:
        return Outcome(
            f"{said}, and a quota of {quota:g}",
            f"threads take turns for what the quota allows; start at most {max(1, int(quota))} workers with threads=1",
        )
    if count == 1:
        return Outcome(said, "workers take turns on one core: a pipeline works here, and gains no time")
    return Outcome(f"{said}; cluster({count}) computes with a thread for each worker")


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How much time the control group allows, in cores; None if there is no limit."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        allowed = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return allowed / int((root / "cpu/cpu.cfs_period_us").read_text()) if allowed > 0 else None
    return None


def memory() -> Outcome:
    """How much memory is free, by the kernel and by the control group."""
    from pippy.drivers.base.free_memory import free_bytes

    free = free_bytes()
    said = f"{free / GIB:.1f} GiB free"
    if free < GIB:
        return Outcome(said, "a worker takes some 0.3 GiB before its first stage; free some, or start fewer workers")
    return Outcome(said)


def shared_memory() -> Outcome:
    """Whether processes can share memory: that is how workers of a host send tensors."""
    try:
        from pippy.drivers.wire.memory import create_shared, map_shared

        fd, mine = create_shared(1 << 16)
        try:
            mine.bytes[:5] = b"pippy"
            seen = bytes(map_shared(fd).bytes[:5])
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return Outcome(
            f"memfd_create does not work here: {error}",
            "allow memfd_create in the container's seccomp profile, or write cluster(n, join=True): workers that join pass "
            "tensors by TCP here",
            fatal=True,
        )
    if seen != b"pippy":
        return Outcome("memory is mapped, and not shared", "write cluster(n, join=True)", fatal=True)
    return Outcome("memfd works: tensors pass between workers through memory")


def system_calls() -> Outcome:
    """System calls that clusters need, and that old kernels or strict containers do not have."""
    os.close(os.eventfd(0))
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Outcome(
            f"eventfd and unix sockets work, pidfd_open does not: {error}",
            "workers end with their controller all the same, unless it has forked processes that live on; a newer kernel, or "
            "a container that allows pidfd_open, mends that",
        )
    return Outcome("eventfd, pidfd and unix sockets work")


def folder() -> Outcome:
    """The folder for temporary files, where processes meet."""
    with tempfile.TemporaryDirectory(prefix="pippy-") as made:
        Path(made, "store").write_text("x")
        return Outcome(f"{tempfile.gettempdir()} can be written")


def loopback() -> Outcome:
    """RPC's connections between processes of this host."""
    if "lo" not in [name for _, name in socket.if_nameindex()]:
        return Outcome("there is no interface lo", REMEDIES["loopback"], fatal=True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
        return Outcome("127.0.0.1 answers")


def limits() -> Outcome:
    """Open files, processes, locked memory."""
    import resource  # not on Windows

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = f"open files {limit_text(files)}, processes {limit_text(processes)}, "
    said += f"locked memory {limit_text(locked, 1024, ' KiB')}"
    if 0 <= files < _FEW_FILES:
        return Outcome(said, f"many workers need many open files; ulimit -n {_FEW_FILES} or more")
    if 0 <= processes < _FEW_PROCESSES:
        return Outcome(said, f"workers are processes with several threads each; ulimit -u {_FEW_PROCESSES} or more")
    if 0 <= locked < _SMALL_LOCK and Path("/dev/nvidiactl").exists():
        return Outcome(said, "copies to GPUs are faster from locked memory; ulimit -l unlimited")
    return Outcome(said)


def limit_text(value: int, unit: int = 1, word: str = "") -> str:
    """A limit in words.

    >>> limit_text(-1), limit_text(65536, 1024, " KiB")
    ('unlimited', '64 KiB')
    """
    return "unlimited" if value < 0 else f"{value // unit}{word}"


def gpus() -> Outcome:
    """The GPUs that torch can use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        for index in range(count):
            torch.ones(8, device=f"cuda:{index}").sum().item()
        names = [torch.cuda.get_device_name(index) for index in range(count)]
        return Outcome(f"{count}: {', '.join(dict.fromkeys(names))}; name them: cluster({count}, devices=[…])")
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        built = torch.version.cuda or torch.version.hip
        why = f"a driver that is too old for CUDA {built}, perhaps" if built else "this torch is built for CPUs only"
        return Outcome(
            f"this host has a GPU, and torch cannot use it: {why}",
            "install a torch that fits the driver: https://pytorch.org/get-started/locally",
        )
    return Outcome("none; workers compute on the CPU")


def host_name() -> Outcome:
    """Whether this host's name can be looked up. It matters only with several hosts."""
    name = socket.gethostname()
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError as error:
        return Outcome(
            f"{name!r} cannot be looked up: {error}",
            "on one host nothing needs it; with several, give torchrun addresses: --master-addr 10.0.0.1",
        )
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return Outcome(
            f"{name} is {', '.join(sorted(addresses))}: with several hosts, give torchrun --master-addr an address"
        )
    return Outcome(f"{name} is {', '.join(sorted(addresses))}")


def environment() -> Outcome:
    """Variables that change what clusters do."""
    here = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    said = ", ".join(f"{name}={value}" for name, value in here.items()) or "nothing is set that bears on clusters"
    interfaces = [name for _, name in socket.if_nameindex()]
    if "RANK" in here and "WORLD_SIZE" in here:
        return Outcome(
            said, "cluster() takes this for a process of torchrun, and waits for others; else unset RANK and WORLD_SIZE"
        )
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in here and here[name] not in interfaces:
            return Outcome(
                said, f"there is no interface {here[name]!r}, there are {', '.join(interfaces)}; correct {name}"
            )
    if not here.get("PIPPY_WORKERS", "1").isdecimal():
        return Outcome(said, "PIPPY_WORKERS is a number of workers, 1 or more; correct or unset it")
    proxies = [
        name for name in ("http_proxy", "https_proxy", "all_proxy") if name in os.environ or name.upper() in os.environ
    ]
    return Outcome(said + (f"; {', '.join(proxies)} set, which workers do not use" if proxies else ""))


_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TP_SOCKET_IFNAME GLOO_SOCKET_IFNAME PIPPY_WORKERS PIPPY_LOG "
    "OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"
).split()


def workers() -> Outcome:
    """Two workers, and a training step on them whose loss is compared with plain torch."""
    import torch
    from torch import nn

    from pippy.drivers.driver.drivers import PipelineDriver1F1B
    from pippy.drivers.engines.local.local_cluster import local_cluster
    from pippy.ir.pipe import Pipe

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x, target = torch.ones(4, 4), torch.zeros(4, 1)
    began = time.perf_counter()
    with local_cluster(2, threads=1) as cluster:
        started = time.perf_counter() - began
        driver = PipelineDriver1F1B(Pipe.from_sequential(model, nn.MSELoss()), cluster)
        loss = driver.run(2, x, target)
        began = time.perf_counter()
        for _ in range(10):
            driver.run(2, x, target)
        step = (time.perf_counter() - began) / 10
    said = f"2 workers started in {started:.1f} s; a step of next to nothing takes {1e3 * step:.1f} ms"
    if not torch.allclose(loss, nn.functional.mse_loss(model(x), target), rtol=1e-4):
        return Outcome(
            f"{said}, and its loss is wrong", "please report this, with what `pippy doctor --json` prints", fatal=True
        )
    return Outcome(said)


DOCTOR_CHECKS: dict[str, Check] = {
    "python": python,
    "torch": torch_itself,
    "packages": packages,
    "cores": cores,
    "memory": memory,
    "shared memory": shared_memory,
    "system calls": system_calls,
    "temporary files": folder,
    "loopback": loopback,
    "limits": limits,
    "GPUs": gpus,
    "host name": host_name,
    "environment": environment,
    "workers": workers,
}
NEEDS_TORCH = ("packages", "shared memory", "GPUs", "workers")
REMEDIES = {
    "torch": f"install it: pip install 'torch>={oldest_version('torch') or '2.13'}'",
    "packages": "reinstall pippy in this environment: pip install --force-reinstall pippy-compiler",
    "system calls": "workers need these; use a newer kernel, or a container that allows them",
    "temporary files": "set TMPDIR to a folder that you can write",
    "loopback": "RPC needs the loopback interface: ip link set lo up; in a container, give it a network",
    "GPUs": "keep workers on the CPU with device='cpu', or mend the driver",
    "workers": "look at the lines above first; then docs/errors.md, ClusterError",
}


_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fails": ("FAILS", "red")}


@click.command(short_help="Check what works on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--quick", is_flag=True, help="Do not start workers.")
def doctor(as_json: bool, quick: bool) -> None:
    """Check what pippy needs on this host: Python, torch, memory, limits, devices, and two workers for a step.

    Each line is ok, a warning (pippy works, but perhaps not as you want), or FAILS, with what to do. The exit status is 1
    if anything fails.

    \b
    Examples:
      pippy doctor
      pippy doctor --json > host.json
    """
    results: list[CheckResult] = []
    for name, check in DOCTOR_CHECKS.items():
        if quick and name == "workers":
            continue
        result = run_check(name, check, results)
        results.append(result)
        if not as_json:
            print_result(result)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in results], indent=2))
    else:
        click.echo(f"\n{conclusion(results)}")
    if any(each.state == "fails" for each in results):
        raise click.exceptions.Exit(1)


def print_result(result: CheckResult) -> None:
    """Print a result: a line, and another for its remedy."""
    word, colour = _MARKS[result.state]
    click.echo(f"{click.style(word.ljust(8), fg=colour)} {result.name.ljust(16)} {result.said}")
    if result.remedy:
        click.echo(f"{'':26}→ {result.remedy}")


def conclusion(results: list[CheckResult]) -> str:
    """The last line: whether pippy works here.

    >>> conclusion([CheckResult("torch", "ok", "2.13.0"), CheckResult("limits", "warning", "few", "more")])
    'pippy works here; 1 warning'
    """
    failing = [each.name for each in results if each.state == "fails"]
    warned = sum(each.state == "warning" for each in results)
    also = f"; {count_with_noun(warned, 'warning')}" if warned else ""
    if failing:
        return f"pippy does not work here: {', '.join(failing)}{also}"
    return f"pippy works here{also}"
