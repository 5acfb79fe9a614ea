"""Steps of a model that really run, by turns: how long they take, and how much memory they make workers take."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exps.memory import kilobytes
from exps.peers.rounds import quartiles
from exps.seeds.layer_costs import LayerCosts
from exps.seeds.layers import Layers, cut_into
from exps.seeds.memory import held
from exps.seeds.settings import Setting
from exps.seeds.wires import recorded_bytes
from pippy import Cluster, PipelineDriver, cluster
from pippy.drivers.report.record import RecordedStep

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Steps:
    """Runs settings of one model on one batch. ``model`` makes it anew; its parameters are alike each time."""

    model: Callable[[], Layers]
    loss_fn: Any
    batch: Batch

    def driver(self, opened: Cluster, setting: Setting) -> PipelineDriver:
        torch.manual_seed(0)
        pipe = cut_into(self.model(), setting.balance, self.loss_fn)
        return PipelineDriver(pipe, opened, world_size=setting.workers, schedule=setting.program())

    def seconds(self, opened: Cluster, settings: Mapping[str, Setting], rounds: int) -> dict[str, list[float]]:
        """The seconds of each setting's steps. In each round each has a step, in random order; the first is not counted."""
        drivers = {name: self.driver(opened, setting) for name, setting in settings.items()}
        found: dict[str, list[float]] = {name: [] for name in drivers}
        dice = random.Random(0)
        for turn in range(rounds + 1):
            for name in dice.sample(list(drivers), len(drivers)):
                begin = time.perf_counter()
                drivers[name].run(settings[name].chunks, *self.batch)
                if turn:
                    found[name].append(time.perf_counter() - begin)
                drivers[name].zero_grad()
        for driver in drivers.values():
            driver.close()
        return found

    def recorded(self, opened: Cluster, setting: Setting, steps: int = 3) -> RecordedStep:
        """A typical step of some, after one that is not recorded."""
        driver = self.driver(opened, setting)
        driver.run(setting.chunks, *self.batch)
        with driver.record() as recording:
            for _ in range(steps):
                driver.run(setting.chunks, *self.batch)
        driver.close()
        return recording.typical

    def megabytes(self, setting: Setting) -> list[float]:
        """By how much the memory of each worker grows, at most, from before it has a model: in new processes, in two steps."""
        with cluster(setting.workers, threads=1) as opened:
            before = [resident(worker.pid) for worker in opened.session.workers]
            driver = self.driver(opened, setting)
            for _ in range(2):
                driver.run(setting.chunks, *self.batch)
            return [resident(worker.pid, "VmHWM") - was for worker, was in zip(opened.session.workers, before)]

    def counted(self, setting: Setting) -> list[float]:
        """The megabytes that each worker holds at its peak, by our count: without what kernels and the allocator take."""
        return [each.peak.total / 2**20 for each in held(self.model(), setting, self.loss_fn, *self.batch)]


def passes(step: RecordedStep) -> float:
    """The seconds of all passes of a step."""
    return sum(float(span.duration) for spans in step.timeline.spans for span in spans)


def resident(pid: int, which: str = "VmRSS") -> float:
    """The megabytes of a process: now, or at most until now."""
    return kilobytes(Path(f"/proc/{pid}/status"))[which] / 1024


def steps_table(steps: Steps, settings: Mapping[str, Setting], costs: LayerCosts, rounds: int) -> list[str]:
    """Run all settings on a cluster, and print what was measured beside what these costs of layers make of it.

    "passes" is how long all workers compute, of how long they do in the first setting. "of passes" is a
    simulation with passes as long as they were, of the measured step.
    """
    workers = max(setting.workers for setting in settings.values())
    with cluster(workers, threads=1, pin=True) as opened:
        seconds = steps.seconds(opened, settings, rounds)
        recorded = {name: steps.recorded(opened, setting) for name, setting in settings.items()}
    first = next(iter(settings))
    base = settings[first].throughput(costs)
    alone = passes(recorded[first])
    head = (
        f"{'step ms':>9}  {'quartiles':16}{'speed-up':>9}{'simulated':>11}{'passes':>8}{'of passes':>11}{'MB sent':>9}"
    )
    lines = [f"{'really run':12}{head}  {'workers grow':14}counted"]
    for name, setting in settings.items():
        low, middle, high = (1e3 * each for each in quartiles(seconds[name]))
        ratio, foreseen = 1e3 * quartiles(seconds[first])[1] / middle, setting.throughput(costs) / base
        grown = " ".join(f"{each:.0f}" for each in steps.megabytes(setting))
        holds = " ".join(f"{each:.0f}" for each in steps.counted(setting))
        took = f"{middle:9.0f}  {f'{low:.0f}–{high:.0f}':16}{ratio:9.3f}{foreseen:11.3f}"
        step = recorded[name]
        longer = passes(step) / alone
        took += f"{longer:8.2f}{float(step.predicted.makespan) / step.makespan:11.3f}"
        sent = sum(recorded_bytes(step).values()) / 2**20
        lines.append(f"{name:12}{took}{sent:9.1f}  {grown:14}{holds}")
    return lines
