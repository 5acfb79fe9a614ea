"""What has to be seen on a GPU: are the numbers the same, how long is a step, what does it hold, how fast do values travel?

Question: two workers on one GPU, and on two if there are two, train the GPT of exps/peers/gpt.py in 8 micro-batches. Are the
          loss and all gradients those of the plain model? How long is a step beside plain PyTorch's and beside that of
          torch.distributed.pipelining? Is the peak of the allocator what driver.memory counts? How many GB/s go from worker
          to worker?
Command:  make gpu        (that is: python -m exps.gpu --tests; --device cpu --size tiny tries the script on the CPU)
Method:   contestants have processes of their own and take turns. A step ends when the devices are done. NCCL takes no two
          processes on one GPU, so there torch's two stages are in one process. A transfer is timed with the step around it: a
          worker computes each of 8 values, and sends it. Where values stay on GPUs, they do from the third step on.
          A worker's peak may be higher than what was counted by what torch's matrix products keep (WORKSPACE).
Finding:  on one H200, with torch 2.13.0 for CUDA 13.0, of plain PyTorch's step (296 ms, 295.4 to 296.0): one worker with both
          stages 1.02, torch's two stages in one process 1.00. Two workers that share the GPU take turns on it, which costs:
          1f1b 1.23, zb_h1 1.19. Losses and gradients are off by 9e-7 in float32, torch's too. Peaks are as counted. Values
          stay on the GPU from the third step on: 0.93 GB/s for 1 MiB, 15.5 for 16 MiB, 47 for 64 MiB, and by the host
          1.0, 4.5 and 2.6. Two GPUs have not been tried.
"""

import argparse
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing

import torch

from exps.peers import gpt
from exps.peers.contestant import Contestant
from exps.peers.on_devices import DeviceTeam, MeetingTeam, PippyRank, PlainRank, TorchRank, TransferRank
from exps.peers.rounds import check, started, take_turns
from pippy.ir.base.readable import bytes_text

SIZES = {**gpt.SIZES, "large": gpt.Size(layers=16, width=1024, heads=16, length=512, vocabulary=8192)}
TESTS = [
    *("tests/drivers/test_devices.py", "tests/drivers/test_on_gpus.py", "tests/balance/test_profile.py"),
    *("-k", "cuda or gpu", "-q", "-rs"),
]
TRANSFERS = (1 << 20, 16 << 20, 64 << 20)
APART = 0.05  # what is measured may differ from what was counted by so much,
WORKSPACE = 80 << 20  # and by what torch's matrix products keep for themselves: cuBLAS and cuBLASLt, once for a process

Devices = tuple[str, ...]


def places(kind: str) -> dict[str, Devices]:
    """The devices of two workers, in each way that there is here."""
    if kind == "cpu":
        return {"CPU": ("cpu", "cpu")}
    found: dict[str, Devices] = {"one GPU": (f"{kind}:0", f"{kind}:0")}
    if torch.accelerator.device_count() > 1:
        found["two GPUs"] = (f"{kind}:0", f"{kind}:1")
    return found


def contestants(size: gpt.Size, devices: Devices) -> dict[str, Contestant]:
    """Who takes a step on these devices; the first is what the others are compared with."""
    found: dict[str, Contestant] = {
        "plain": DeviceTeam(1, PlainRank, size, devices[0]),
        "torch, one process": MeetingTeam(1, TorchRank, size, devices[:1]),
    }
    if devices[0] != devices[1] or devices[0] == "cpu":
        found["torch 1F1B"] = MeetingTeam(2, TorchRank, size, devices)
    found["pippy, one worker"] = DeviceTeam(1, PippyRank, size, devices[:1], "interleaved_1f1b")
    for schedule in ("1f1b", "zb_h1"):
        found[f"pippy {schedule}"] = DeviceTeam(1, PippyRank, size, devices, schedule)
    return found


def steps(name: str, size: gpt.Size, devices: Devices, rounds: int, only: list[str] | None = None) -> bool:
    """Print the time of a step, and the peaks. Returns whether the peaks are those that were counted."""
    teams = {
        each: team for each, team in contestants(size, devices).items() if only is None or each in ("plain", *only)
    }
    agree = True
    with started(teams):
        for team in teams.values():
            team.step()
        off = {each: check(each, team, teams["plain"]) for each, team in teams.items()}
        seconds = take_turns(teams, rounds, warm=1, steps=3)
        print(f"\n{name}, a step        ms (least to most)     of plain    off by")
        for each, times in seconds.items():
            middle = statistics.median(times)
            spread = f"({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
            of_plain = middle / statistics.median(seconds["plain"])
            print(f"{each:22}{middle * 1e3:8.1f} {spread:20}{of_plain:7.2f}{off[each]:10.0e}", flush=True)
        print(f"\n{name}, a worker's peak    counted    measured")
        for each, team in teams.items():
            for worker, (counted, measured) in enumerate(peaks(team)):
                apart = max(0, abs(measured - counted) - (WORKSPACE if devices[0] != "cpu" else 0)) / counted
                agree = agree and apart <= APART
                note = "" if apart <= APART else f"   {apart:.0%} apart"
                print(f"{each:12} worker {worker}{bytes_text(counted):>16}{bytes_text(measured):>12}{note}", flush=True)
    return agree


def peaks(team: Contestant) -> list[tuple[int, int]]:
    """The peaks of pippy's workers, counted and measured; none of others."""
    if not isinstance(team, DeviceTeam) or team._make is not PippyRank:
        return []
    return team.peaks()


def transfers(name: str, devices: Devices, sizes: tuple[int, ...], rounds: int) -> None:
    """Print how fast values of some sizes travel from worker to worker."""
    print(f"\n{name}, from worker to worker    GB/s (least to most)")
    for nbytes in sizes:
        with closing(DeviceTeam(1, TransferRank, devices, nbytes)) as team:
            team.start()
            team.step()
            by_host = gpt.CHUNKS * nbytes / team.step() / 1e9
            team.step()  # from now on values may stay on GPUs
            rates = [gpt.CHUNKS * nbytes / team.step() / 1e9 for _ in range(rounds)]
            way = team.way()
        spread = f"({min(rates):.2f} to {max(rates):.2f})"
        before = f"; {by_host:.2f} before, in one step by the host" if way == "GPU memory" else ""
        print(f"{bytes_text(nbytes):>12}{statistics.median(rates):24.2f} {spread} by {way}{before}", flush=True)


def tests() -> bool:
    """Run the tests that need a GPU. Returns whether they passed."""
    return subprocess.run([sys.executable, "-m", "pytest", *TESTS], check=False).returncode == 0


def described(kind: str, found: Mapping[str, Devices]) -> str:
    """The line above the tables."""
    device = platform.processor() or platform.machine() if kind == "cpu" else torch.cuda.get_device_name(0)
    return f"{device}; torch {torch.__version__}; two workers on: {', '.join(found)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transfers", type=int, nargs="*", default=TRANSFERS, help="the sizes of values, in bytes")
    parser.add_argument("--only", nargs="+", help="contestants, beside the plain model")
    parser.add_argument("--tests", action="store_true", help="run the tests that need a GPU first")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"there is no GPU: torch {torch.__version__} finds no CUDA device here; nothing was run")
        return 0
    passed = tests() if options.tests else True
    found = places(options.device)
    print(described(options.device, found))
    for name, devices in found.items():
        passed = steps(name, SIZES[options.size], devices, options.rounds, options.only) and passed
        transfers(name, devices, tuple(options.transfers), options.rounds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
