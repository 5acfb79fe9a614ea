"""A controller of the campaign: it prints a line of JSON for every fault that it has had."""

import faulthandler
import gc
import json
import os
import random
import signal
from dataclasses import asdict
from typing import Any

import torch

from exps.injected import joined_place
from exps.injected.deadly import deadly
from exps.injected.gentle import gentle
from exps.injected.kinds import ANYWHERE, GENTLE, TIMEOUT, TORCHRUN
from exps.injected.left import Held
from exps.injected.ray_place import OPTIONS
from exps.injected.training import Report, Training
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.open_cluster import cluster
from tests.drivers.interrupted_everywhere import descriptors

SIZES = {
    "local": (2, 3, 4),
    "ray": (3, 4),
    "joined": (2, 3),
}  # numbers of workers; those of a Ray are on both of its nodes


def play(seed: int, place: str, kinds: list[str]) -> None:
    """Open a cluster, have these faults, and see what is left. Under torchrun this is what each rank does."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    if os.environ.get("RANK", "0") == "0":
        say(pid=os.getpid())  # an import of torch may lose an interrupt
    if place in TORCHRUN:
        with cluster(threads=1, timeout=TIMEOUT, controller_hosts=rng.choice([True, False])) as opened:
            have(opened, kinds, rng)
            raise SystemExit("a worker was lost")  # as a script ends that does not catch it
    elif kinds == [ANYWHERE]:
        while True:  # a cluster is opened and closed again, so that Ctrl-C may meet any of it
            with cluster(2, timeout=TIMEOUT, **_options(place)) as opened:
                Training(opened, rng).step()
    else:
        beside_the_controller(place, kinds, rng)


def _options(place: str) -> dict[str, Any]:
    if place == "joined":
        return joined_place.options(os.environ[joined_place.PLACE])
    return {"threads": 1} | (OPTIONS if place == "ray" else {})


def beside_the_controller(place: str, kinds: list[str], rng: random.Random) -> None:
    """The faults on a cluster of this process. No descriptor is left, and the next cluster of the same process is right."""
    before = descriptors()
    with cluster(rng.choice(SIZES[place]), timeout=TIMEOUT, **_options(place)) as opened:
        have(opened, kinds, rng)
    gc.collect()
    after = descriptors()
    if place != "ray" and len(after) > len(before):  # Ray itself keeps some
        new = {number: what for number, what in after.items() if before.get(number) != what}
        wrong = f"descriptors: {len(before)} before, {len(after)} after, among them {new}"
        say(**asdict(Report(kinds[-1], 0.0, wrong)))
    if kinds[-1] == "kill head":  # nobody would place workers
        return
    with cluster(2, timeout=TIMEOUT, **_options(place)) as opened:
        right_steps(opened, rng)


def have(opened: Cluster, kinds: list[str], rng: random.Random) -> None:
    """The faults on one cluster."""
    workers = [worker.pid for worker in opened.session.workers]
    say(workers=workers)
    held = Held(workers)
    for kind in kinds:
        if kind == ANYWHERE:
            while True:
                right_steps(opened, rng)
        training = Training(opened, rng)
        if kind in GENTLE:
            report = gentle(training, kind)
            training.driver.close()
            report.wrong = report.wrong or held.grown()
        else:
            training.step()
            say(begins=kind)
            report = deadly(training, kind)
        say(**asdict(report))
        if report.ends:
            return
        del training


def right_steps(opened: Cluster, rng: random.Random) -> None:
    """A driver of its own, and two steps of it."""
    training = Training(opened, rng)
    for _ in range(2):
        training.step()
        training.check()
    training.driver.close()


def say(**what: Any) -> None:
    """Print a line for the watcher of this process."""
    print(json.dumps(what), flush=True)
