"""How much do slices of a long sequence save, and what do they cost?

Question: workers train a GPT-2 on rows of one long sequence each, by 1F1B: how many bytes does each worker hold at its peak,
          and how long does a step take, with 1, 2, 4 and 8 slices of a sequence as micro-batches?
Command:  python -m exps.slices                  bytes, on two workers: counted before a step, and measured in one
          python -m exps.slices --time           times of steps, too; on a quiet machine (--rounds)
          python -m exps.slices --count --workers 4 --rows 8 --layers 8
                                                 bytes counted alone: no step runs, so any size can be asked for
Method:   counted bytes are those of `driver.memory`. "Activations" are what a worker holds at its peak beside parameters and
          their gradients. Measured bytes are those of the live storages of a recorded step. For the times, the drivers of one
          Pipe are on one cluster, and take turns in random order, a step each round; the first round is not counted. Losses
          are compared.
Finding:  activations of the first worker and of the last one, in MiB, for 1, 2, 4 and 8 slices of 2,048 tokens. Two workers,
          4 layers: 138, 96, 77, 69 and 148, 135, 127, 126; measured peaks are the counted ones, to the byte. Four workers, 8
          layers, 8 rows: 177, 104, 68, 53 and 126, 113, 105, 104. Of p workers the first one holds p + n - 1 of n slices in
          place of p rows, so 5/8 of it with p = 2 and n = 4, and 7/16 with p = 4; the bytes fall a little more, since what a
          forward needs while it runs is that of a slice, too. The last worker holds a row whatever n is: its slices all go
          forward before the first one goes back.
          A step on two workers takes 1.54 s (1.52–1.56) whole, and 1.24 (1.22–1.26), 1.02 (1.00–1.03) and 1.00 (0.98–1.01) in
          2, 4 and 8 slices. That is not only because the pipeline fills and drains by slices: one worker, which does neither,
          takes 0.80, 0.72 and 0.72 of a step of whole sequences (--workers 1 --rounds 6). Why was not looked into; with 512
          tokens it takes 0.99, 1.05 and 1.26 (--length 512).
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from pippy import Cluster, Pipe, PipelineDriver1F1B, cluster, pipeline

WORDS = 1024


def loss_of(output: object, target: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())  # type: ignore[attr-defined]


def pipe_of(stages: int, length: int, width: int, layers: int) -> Pipe:
    """A GPT-2 without dropout, in stages of as many parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_positions": length,
        "n_embd": width,
        "n_layer": layers,
        "n_head": width // 32,
        "vocab_size": WORDS,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, tie_word_embeddings=False))
    ids = torch.zeros(1, length, dtype=torch.long)
    return pipeline(
        model, loss_of, num_stages=stages, split="parameters", example_kwargs={"input_ids": ids, "target": ids}
    )


def drivers(pipe: Pipe, workers: Cluster, slices: Sequence[int]) -> dict[int, PipelineDriver1F1B]:
    """A driver for each number of slices."""
    return {count: PipelineDriver1F1B(pipe, workers, slices=count, check=False) for count in slices}


def counted(driver: PipelineDriver1F1B, rows: int, call: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The bytes that the workers hold at their peaks, and those of them that are no parameters and no gradients of these."""
    held = [each.peak for each in driver.memory(rows, **call).workers]
    return [each.total for each in held], [each.total - each.parameters - each.gradients for each in held]


def measured(driver: PipelineDriver1F1B, rows: int, call: dict[str, Any]) -> list[int]:
    """The most bytes that each worker held in a recorded step. The first step is not recorded."""
    driver.run(rows, **call)
    driver.zero_grad()
    with driver.record(memory=True) as recording:
        driver.run(rows, **call)
    driver.zero_grad()
    return [max(each.held[0]) for each in recording.steps[-1].noted if each.held is not None]


def times(made: dict[int, PipelineDriver1F1B], rows: int, call: dict[str, Any], rounds: int) -> dict[int, list[float]]:
    """The seconds of each driver's steps, round by round."""
    found: dict[int, list[float]] = {count: [] for count in made}
    dice, losses = random.Random(0), set[str]()
    for turn in range(rounds + 1):
        for count in dice.sample(list(made), len(made)):
            made[count].zero_grad()
            begin = time.perf_counter()
            losses.add(f"{float(made[count].run(rows, **call)):.4f}")
            if turn:
                found[count].append(time.perf_counter() - begin)
    assert len(losses) == 1, losses
    return found


def mebibytes(counts: Sequence[int]) -> str:
    """
    >>> mebibytes([1 << 20, 1 << 19])
    '1.00 0.50'
    """
    return " ".join(f"{count / 2**20:.2f}" for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step, each a micro-batch")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--count", action="store_true")
    given = parser.parse_args()

    ids = torch.randint(WORDS, (given.rows, given.length), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "target": ids.roll(-1, 1)}
    pipe = pipe_of(given.workers, given.length, given.width, given.layers)
    with cluster(given.workers, threads=1) as workers:
        made = drivers(pipe, workers, given.slices)
        for count, driver in made.items():
            peaks, activations = counted(driver, given.rows, call)
            print(
                f"{count} slices, MiB of each worker: counted {mebibytes(peaks)}, activations {mebibytes(activations)}",
                end="",
            )
            print("" if given.count else f", measured {mebibytes(measured(driver, given.rows, call))}")
        for count, its in times(made, given.rows, call, given.rounds).items() if given.time else ():
            parts = statistics.quantiles(its, n=4)
            print(f"{count} slices: {statistics.median(its):.3f} s a step ({parts[0]:.3f}–{parts[2]:.3f})")


if __name__ == "__main__":
    main()
