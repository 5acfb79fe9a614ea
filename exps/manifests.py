"""Is a `checkpoint.json` refused in which one bit is not as it was written?

Question: a run has two checkpoints. One bit of the newer one's manifest is flipped, and the run is loaded. Is that a
          CheckpointError, or is something else loaded, the older checkpoint above all?
Command:  python -m exps.manifests                                                  (--count 300 --seed 1 takes some bits)
Method:   the model has tied parameters and an optimizer with a state, on three workers. All that `pippy.load_checkpoint` gives
          is compared with what the undamaged checkpoint has. Then the same bit is flipped in the manifest of version 1, without
          a hash, as earlier versions wrote it: there the schema alone can find it.
Finding:  each of 25,368 flipped bits is refused. Without the hash, of 24,752 bits 24,254 are refused, 421 change nothing, 76
          change the name of a tied parameter, and one makes the newer checkpoint the older one. Before there was a schema, of
          40,584 bits of another manifest 111 loaded the older checkpoint, 63 something else, and 49 ended in a KeyError.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pippy import load_checkpoint
from pippy.errors import CheckpointError
from tests.drivers.model.state.saved_runs import many
from tests.drivers.thread_cluster import thread_cluster

MANIFEST = "checkpoint.json"
REFUSED, SAME, OLDER, OTHER = "refused", "the same was loaded", "an older one was loaded", "something else was loaded"
EXPECTED = {REFUSED, SAME}  # of a manifest with a hash


def saved_run(folder: str) -> str:
    """Save a run of two checkpoints in this folder. Returns the path of the newer one."""
    with thread_cluster(4) as workers:
        _, driver, optimizer = many(workers)
        for step in (10, 20):
            driver.run(2, torch.randn(6, 4), torch.randn(6, 4))
            optimizer.step()
            driver.zero_grad()
            path = driver.save(folder, optimizer=optimizer, step=step)
    return path


def as_version_1(path: str | os.PathLike[str]) -> None:
    """Make the manifest of a checkpoint what earlier versions wrote, which has no hash."""
    file = os.path.join(path, MANIFEST)
    with open(file) as manifest:
        content = {**json.load(manifest), "version": 1}
    del content["hash"]
    with open(file, "w") as manifest:
        json.dump(content, manifest, indent=1)


def same(one: Any, other: Any) -> bool:
    """Whether two loaded values are equal, to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def outcome(load: Callable[[], Any], expected: Any) -> str:
    """What becomes of loading: refused, what was loaded, or the error that is none of pippy's."""
    try:
        found = load()
    except CheckpointError:
        return REFUSED
    except Exception as error:
        return f"{type(error).__name__}"
    return SAME if same(found, expected) else OLDER if found.get("step") == 10 else OTHER


def flipped(path: str | os.PathLike[str], bits: Iterable[int]) -> Counter[str]:
    """Flip these bits of a checkpoint's manifest, one by one, and load its run each time."""
    file, run = os.path.join(path, MANIFEST), os.path.dirname(path)
    expected = load_checkpoint(path)
    with open(file, "rb") as manifest:
        text = manifest.read()
    outcomes: Counter[str] = Counter()
    for bit in bits:
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with open(file, "wb") as manifest:
            manifest.write(damaged)
        outcomes[outcome(lambda: load_checkpoint(run), expected)] += 1
    with open(file, "wb") as manifest:
        manifest.write(text)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="how many bits, drawn at random; without it, all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = saved_run(folder)
        wrong = 0
        for version in (2, 1):
            if version == 1:
                as_version_1(path)
            bits: Sequence[int] = range(8 * os.path.getsize(os.path.join(path, MANIFEST)))
            if given.count is not None:
                bits = random.Random(given.seed).sample(bits, given.count)
            outcomes = flipped(path, bits)
            found = ", ".join(f"{count:,} {what}" for what, count in outcomes.most_common())
            print(f"version {version}: {len(bits):,} flipped bits: {found}", flush=True)
            wrong += len(outcomes.keys() - (EXPECTED if version == 2 else {*EXPECTED, OLDER, OTHER}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
