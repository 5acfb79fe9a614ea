"""How many values do residuals by attention send, and what does it save that one gradient of a value leaves a worker?

Question: a block reads what all earlier blocks gave (AttentionResiduals in exps/tried_models/residual_streams.py). With P
          workers and V blocks on each, how many values and bytes go over each link, there and back; and how much shorter is a
          step because gradients of one value are added on the worker that makes them (`add` in its program)? On two hosts,
          what goes from host to host, and what does it save that a value goes there once and is handed on?
Command:  python -m exps.residuals                 transfers: counted in a step that runs, beside the formulas
          python -m exps.residuals --time          two workers of this host: steps with the sums and without, in turns
          python -m exps.residuals --time --hosts --delay 0.001 --rate 1e9
                                                   a worker on each of two hosts (network namespaces; as root)
          python -m exps.residuals --time --hosts --per-host 2 --delay 0.001 --rate 1e9
                                                   two workers on each: with values handed on and without, in turns
Method:   transfers and bytes are those of a recorded step, on workers that are threads. For the times two drivers of one Pipe
          are on one cluster, and take turns in random order, a step each round; the first two rounds are not counted. Their
          programs are the same but for the sums, without which each stage sends its gradient, or for who sends the values. The
          gradients are compared.
Finding:  transfers of a micro-batch, there and back: P=4, V=2: 18 and 18, without sums 24 back; V=4: 42 and 42, without 96.
          The paper's cache sends 22 and 54 forward, and passing all blocks on at each cut 28 and 120. Steps
          with sums take 0.993 (0.956–1.011) of those without on two workers for V=2, and 0.981 (0.942–1.019) for V=4; between
          two hosts with 1 ms and 1 Gbit/s 0.954 (0.940–0.969) and 0.861 (0.834–0.874): --time --rounds 20, and with --hosts
          --delay 0.001 --rate 1e9.
          Values from host to host, P=4 on two hosts: V=2: 6 there, by makers 12; V=4: 14, by makers 28; 12 and 28 back.
          Steps with values handed on take 0.917 (0.900–0.935) of those by makers for V=2, and 0.932 (0.928–0.964) for V=4, with
          four workers on two cores: --time --hosts --per-host 2 --delay 0.001 --rate 1e9 --rounds 20.
"""

import argparse
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from exps.peers.hosts import Host, hosts
from exps.peers.process import Child
from exps.tried_models.residual_streams import AttentionResiduals
from pippy import PipelineDriver, cluster, pipeline
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import Program, add_communication, make_schedule
from pippy.drivers.report.record import RecordedStep
from tests.drivers.thread_cluster import thread_cluster

Make = Callable[[nn.Module, int, int, int], dict[str, Program]]
SHAPES = ((4, 2), (4, 4), (2, 2), (2, 4))  # P, V
HOSTS = 2
PORT = 29850


def model_of(blocks: int, width: int) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return AttentionResiduals(blocks, width=width)


def programs(model: nn.Module, workers: int, blocks: int, chunks: int) -> dict[str, Program]:
    """The program of the model, and the same without sums."""
    schedule = make_schedule("interleaved_1f1b", workers=workers, chunks=chunks, stages_per_worker=blocks)
    program = lower(pipeline(model, nn.MSELoss()), schedule).program
    return {"sums": program, "no sums": add_communication(replace(program, added=()))}


def programs_on_hosts(model: nn.Module, workers: int, blocks: int, chunks: int) -> dict[str, Program]:
    """The program for workers of two hosts, half of them on each; and that of one host, where makers send their values."""
    made = programs(model, workers, blocks, chunks)["sums"]
    hosts = tuple(worker * HOSTS // workers for worker in range(workers))
    return {"handed on": add_communication(replace(made, hosts=hosts)), "by makers": made}


def formulas(workers: int, blocks: int) -> dict[str, int]:
    """The transfers of a micro-batch, one way."""
    stages, once = workers * blocks, workers * (workers - 1) // 2
    return {
        "P(P-1)/2 + (V-1)P(P-1)": once + (blocks - 1) * workers * (workers - 1),
        "the paper's cache": once + (blocks - 1) * workers * workers,
        "all blocks at each cut": stages * (stages - 1) // 2,
    }


def formulas_between(workers: int, blocks: int, hosts: int) -> dict[str, int]:
    """The transfers of a micro-batch from host to host, one way, if each of ``hosts`` has as many of the workers."""
    away = workers - workers // hosts
    return {
        "P(H-1)/2 + (V-1)P(H-1)": workers * (hosts - 1) // 2 + (blocks - 1) * workers * (hosts - 1),
        "P(P-P/H)/2 + (V-1)P(P-P/H)": workers * away // 2 + (blocks - 1) * workers * away,
    }


def recorded(
    workers: int, blocks: int, chunks: int, width: int, rows: int, make: Make = programs
) -> dict[str, RecordedStep]:
    """A recorded step with each of the programs."""
    found = {}
    with thread_cluster(workers) as threads:
        for name, program in make(model_of(blocks * workers, width), workers, blocks, chunks).items():
            pipe = pipeline(model_of(blocks * workers, width), nn.MSELoss())
            driver = PipelineDriver(pipe, threads, schedule=program, check=False)
            x = torch.randn(rows * chunks, width, generator=torch.Generator().manual_seed(0))
            driver.run(chunks, x, x)
            with driver.record() as recording:
                driver.run(chunks, x, x)
            found[name] = recording.steps[-1]
            driver.close()
    return found


def by_link(step: RecordedStep) -> dict[str, Counter[tuple[int, int]]]:
    """The values and bytes of a step that went over each link, there ("F", "F bytes") and back ("B", "B bytes")."""
    phase = {edge.value: edge.source.phase for edge in step.program.flow}
    found: dict[str, Counter[tuple[int, int]]] = {key: Counter() for key in ("F", "F bytes", "B", "B bytes")}
    for moved in step.traffic():
        link = moved.source, moved.to
        found[phase[moved.value]][link] += moved.times
        found[f"{phase[moved.value]} bytes"][link] += moved.bytes
    return found


def by_hosts(step: RecordedStep) -> dict[str, Counter[tuple[int, int]]]:
    """The same between hosts, for workers of two hosts. The links are those from host to host."""
    found = by_link(step)
    return {
        key: sum(
            (
                Counter({(source, to): number})
                for (one, other), number in links.items()
                if (source := one * HOSTS // step.program.workers) != (to := other * HOSTS // step.program.workers)
            ),
            Counter[tuple[int, int]](),
        )
        for key, links in found.items()
    }


def print_links(what: str, found: dict[str, Counter[tuple[int, int]]], chunks: int) -> None:
    """The values and bytes of a micro-batch over each link."""
    for link in sorted(found["F"] | found["B"]):
        parts = (f"{found[key][link] / chunks:3.0f} ({found[f'{key} bytes'][link] / chunks:,.0f} B)" for key in "FB")
        print(f"    {what} {link[0]} to {link[1]}:  there {next(parts)}, back {next(parts)}")


def count_between(workers: int, blocks: int, chunks: int, width: int, rows: int) -> None:
    """Print the transfers of a micro-batch between two hosts with half of the workers each."""
    print(f"P={workers}, V={blocks} on {HOSTS} hosts: values of a micro-batch from host to host, one way")
    for name, number in formulas_between(workers, blocks, HOSTS).items():
        print(f"  {name:28}{number:5}")
    for name, step in recorded(workers, blocks, chunks, width, rows, programs_on_hosts).items():
        found = by_hosts(step)
        values = {key: sum(found[key].values()) / chunks for key in "FB"}
        print(f"  {f'here, {name}':28}{values['F']:5.0f} there,{values['B']:4.0f} back")
        print_links("host", found, chunks)


def count(shapes: tuple[tuple[int, int], ...], chunks: int, width: int, rows: int) -> None:
    """Print the transfers of a micro-batch, as they were recorded and by the formulas."""
    for workers, blocks in shapes:
        print(f"\nP={workers}, V={blocks}: values of a micro-batch, one way")
        for name, number in formulas(workers, blocks).items():
            print(f"  {name:24}{number:5}")
        for name, step in recorded(workers, blocks, chunks, width, rows).items():
            found = by_link(step)
            values = {key: sum(found[key].values()) / chunks for key in "FB"}
            print(f"  {f'here, {name}':24}{values['F']:5.0f} there,{values['B']:4.0f} back")
            print_links("worker", found, chunks)
        if workers > HOSTS:
            count_between(workers, blocks, chunks, width, rows)


class Turns:
    """A cluster of two workers, or of ``per_host`` on each of two hosts, with a driver of each program. On hosts, a rank of it.

    Where a host has several workers, the programs are those with values handed on, and without.
    """

    def __init__(
        self, rank: int, address: str | None, per_host: int, blocks: int, chunks: int, width: int, rows: int
    ) -> None:
        size = per_host * HOSTS
        if address is not None:  # as torchrun would start it
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
            os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
        self.opened = ExitStack()
        workers = self.opened.enter_context(cluster(size, threads=1))  # in that of a worker this does not return
        make = programs if per_host == 1 else programs_on_hosts
        self.drivers = {
            name: PipelineDriver(
                pipeline(model_of(size * blocks, width), nn.MSELoss()), workers, schedule=program, check=False
            )
            for name, program in make(model_of(size * blocks, width), size, blocks, chunks).items()
        }
        self.chunks, self.x = chunks, torch.randn(rows * chunks, width, generator=torch.Generator().manual_seed(0))

    def times(self, rounds: int) -> dict[str, list[float]]:
        """The seconds of each driver's steps, round by round."""
        found: dict[str, list[float]] = {name: [] for name in self.drivers}
        dice = random.Random(0)
        for turn in range(rounds + 2):
            for name in dice.sample(list(self.drivers), len(self.drivers)):
                self.drivers[name].zero_grad()
                begin = time.perf_counter()
                self.drivers[name].run(self.chunks, self.x, self.x)
                if turn >= 2:
                    found[name].append(time.perf_counter() - begin)
        mine, theirs = (driver.gradients() for driver in self.drivers.values())
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        return found

    def close(self) -> None:
        self.opened.close()


@contextmanager
def on_hosts(both: list[Host], per_host: int, *args: Any) -> Iterator[Child]:
    """`Turns` with so many workers on each of two hosts: the process of the first."""
    from exps import residuals  # a child cannot import what is in __main__

    children = []
    try:
        for rank in range(per_host * HOSTS):
            given = rank, both[0].address, per_host, *args
            children.append(Child(0, residuals.Turns, *given, host=both[rank // per_host]))
        yield children[0]
        children[0].ask("close")
        children[0].answer()
    finally:
        for child in children:
            child.close()


def print_times(what: str, found: dict[str, list[float]]) -> None:
    """Medians and quartiles, and the share of the second program's step that the first one's takes."""
    for name, seconds in found.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
        print(f"  {what:12}{name:9}{middle:8.1f} ms ({low:.1f}–{high:.1f})")
    low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in zip(*found.values())], n=4)
    print(f"  {what:12}{' of '.join(found)} {middle:.3f} ({low:.3f}–{high:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="measure steps; else transfers are counted")
    parser.add_argument("--hosts", action="store_true", help="workers on two hosts")
    parser.add_argument("--per-host", type=int, default=1, help="workers on each host; several hand values on")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a packet takes between hosts")
    parser.add_argument("--rate", type=float, default=0.0, help="bits that a link between hosts carries in a second")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4], help="on each of the two workers, of --time")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not options.time:
        count(SHAPES, options.chunks, options.width, options.rows)
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}")
    for blocks in options.blocks:
        args = options.per_host, blocks, options.chunks, options.width, options.rows
        what = f"P={options.per_host * HOSTS}, V={blocks}"
        if not options.hosts:
            turns = Turns(0, None, *args)
            print_times(what, turns.times(options.rounds))
            turns.close()
            continue
        with hosts(HOSTS, options.delay, rate=options.rate) as both, on_hosts(both, *args) as child:
            child.ask("times", options.rounds)
            print_times(what, child.answer())


if __name__ == "__main__":
    main()
