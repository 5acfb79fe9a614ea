"""How much memory do workers take, compared with the ranks of torch.distributed.pipelining, and with one process?

Question: two workers train the GPT of exps/versus_torch.py, or the GPT-2 of exps/gpt2_step.py, 8 micro-batches: how much memory
          does each process hold after some steps, and what is its peak, under 1F1B and under GPipe, which pippy calls
          fill_drain? How much does one process hold that runs the micro-batches one after another?
Command:  python -m exps.memory                               (from the root of the repository; --model gpt2, --size, --steps)
Method:   contestants run one after another, each in processes of its own. After two steps the kernel's peak of resident memory
          is reset; after some more steps the peak and the resident memory are read from the kernel's files. *own* is
          memory that no other process has; *share* counts memory of several processes in equal parts. The controller of
          pippy, which holds the whole model, has a figure of its own: it is not a worker. pippy's workers have an
          allocator that keeps freed memory; "kept" torch has the same settings.
Finding:  one run each on a quiet machine, MB of worker 0 and 1. gpt2: pippy's 1F1B holds 411 and 388 in share, at most 553 and
          527; torch's 568 and 818, at most 680 and 914 (kept: 622 and 886, 684 and 948); one process 839, at most 890. GPipe:
          664 and 719, at most 805 and 857, against 876 and 1067, at most 954 and 1203.
          medium: 1F1B 267 and 275 against 405 and 462 (kept: 426 and 426), at most 414 and 423 against 487 and 524. GPipe:
          374 and 387 against 506 and 538; at most 521 and 534 against 581 and 611. torch's figures contain the whole model,
          which each rank makes before it takes its part, and the libraries. pippy's workers share the libraries, because they
          are forks of one process.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from exps import gpt2_step
from exps.peers import gpt, gpt2, pippy_peer, torch_peer
from exps.peers.contestant import Team
from exps.peers.single import single

Make = Callable[[gpt.Size], Team]

DECODER: dict[str, Make] = {
    "one process": single,
    "torch 1F1B": partial(torch_peer.torch_peer, "1F1B"),
    "torch 1F1B, kept": partial(torch_peer.torch_peer, "1F1B", keep_memory=True),
    "pippy 1f1b": partial(pippy_peer.pippy_peer, "1f1b"),
    "torch GPipe": partial(torch_peer.torch_peer, "GPipe"),
    "torch GPipe, kept": partial(torch_peer.torch_peer, "GPipe", keep_memory=True),
    "pippy fill_drain": partial(pippy_peer.pippy_peer, "fill_drain"),
}
GPT2: dict[str, Make] = {
    "one process": partial(gpt2_step.single, keep_memory=False),
    "torch 1F1B": partial(gpt2_step.torch_peer, "1F1B", keep_memory=False),
    "torch 1F1B, kept": partial(gpt2_step.torch_peer, "1F1B", keep_memory=True),
    "pippy 1f1b": partial(gpt2_step.pippy_peer, "1f1b", gpt2.FromExample),
    "torch GPipe": partial(gpt2_step.torch_peer, "GPipe", keep_memory=False),
    "pippy fill_drain": partial(gpt2_step.pippy_peer, "fill_drain", gpt2.FromExample),
}
MODELS = {"decoder": (DECODER, gpt.SIZES), "gpt2": (GPT2, gpt2.SIZES)}


def kilobytes(file: Path) -> dict[str, int]:
    """The lines of a file of /proc that give a size in kB."""
    lines = [line.split() for line in file.read_text().splitlines() if line.endswith("kB")]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def held(pid: int) -> dict[str, float]:
    """The megabytes of a process."""
    now, process = kilobytes(Path(f"/proc/{pid}/smaps_rollup")), Path(f"/proc/{pid}/status")
    own = now["Private_Clean"] + now["Private_Dirty"] + now.get("Private_Hugetlb", 0)
    return {"own": own / 1024, "share": now["Pss"] / 1024, "most": kilobytes(process)["VmHWM"] / 1024}


def forget_peak(pid: int) -> None:
    """Reset the kernel's peak of resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(make: Make, size: gpt.Size, steps: int) -> list[dict[str, float]]:
    """The memory of each worker of a contestant."""
    team = make(size)
    try:
        team.start()
        for _ in range(2):
            team.step()
        pids = team.pids()
        for pid in pids:
            forget_peak(pid)
        for _ in range(steps):
            team.step()
        return [held(pid) for pid in pids]
    finally:
        team.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="decoder")
    parser.add_argument("--size", choices=[size for _, sizes in MODELS.values() for size in sizes])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    contestants, sizes = MODELS[options.model]
    name = options.size or next(iter(sizes))  # the largest
    if name not in sizes:
        parser.error(f"--size {name} is none of --model {options.model}; give one of {', '.join(sizes)}")
    print(f"{name}: {sizes[name]}; MB of worker 0 and worker 1")
    print(f"{'contestant':22}{'own':>16}{'share':>16}{'at most':>16}")
    for contestant, make in contestants.items():
        found = measure(make, sizes[name], options.steps)
        columns = (" ".join(f"{worker[what]:7.1f}" for worker in found) for what in ("own", "share", "most"))
        print(f"{contestant:22}" + "".join(f"{each:>16}" for each in columns), flush=True)


if __name__ == "__main__":
    main()
