"""What does it save to load rows where they are used? Tensors, a DataLoader in the script, and indices, in one run.

    python -m exps.data

Each way runs the same steps of the same model on two local workers, in turn, several times. It prints the bytes that the
controller sends in a step, and the least time of a step.

Finding: see docs/loop.md.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pippy import IndexLoader, PipelineDriver1F1B, local_cluster, pipe_split, pipeline
from pippy.drivers.wire.pickling import pickle_message

ROWS = 256


def rows() -> TensorDataset:
    """A dataset that workers make by this name."""
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, 3, 32, 32, generator=numbers), torch.randint(10, (ROWS,), generator=numbers))


class Decoded(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that take a while to make, as images do."""

    def __init__(self, passes: int) -> None:
        self.rows, self.passes = rows(), passes

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.rows[index]
        for _ in range(self.passes):
            image = image.flip(-1).sin()
        return image, label


class Net(nn.Module):
    """Two stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3 * 32 * 32, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Flatten, and two layers."""
        x = torch.tanh(self.first(x.flatten(1)))
        pipe_split()
        return self.last(x)


def main() -> None:
    """Time each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--passes", type=int, default=0, help="how much work it is to make a row")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    dataset = Decoded(given.passes) if given.passes else rows()
    images, labels = (torch.stack(each) for each in zip(*(dataset[at] for at in range(ROWS))))
    loader = DataLoader(dataset, batch_size=given.batch)
    indices = IndexLoader(dataset, batch_size=given.batch)
    ahead = IndexLoader(dataset, batch_size=given.batch, prefetch=2)

    def tensors() -> Iterator[tuple[torch.Tensor, ...]]:
        yield from zip(images.split(given.batch), labels.split(given.batch))

    ways: dict[str, Callable[[], Iterator[tuple[torch.Tensor, ...]]]] = {
        "tensors that are there": tensors,
        "a DataLoader in the script": lambda: iter(loader),
        "indices": lambda: iter(indices),  # type: ignore[arg-type, return-value]
        "indices, two ahead": lambda: iter(ahead),  # type: ignore[arg-type, return-value]
    }
    with local_cluster(2, threads=1) as workers:
        driver = PipelineDriver1F1B(pipeline(Net(given.width), nn.CrossEntropyLoss()), workers)
        sent = counted_bytes(driver)
        least, bytes_of = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, 0)
        for _ in range(given.rounds):
            for name, batches in ways.items():
                driver.run(4, *next(batches()))
                before, begin = sent[0], time.perf_counter()
                steps = sum(1 for batch in batches() if driver.run(4, *batch) is not None)
                least[name] = min(least[name], (time.perf_counter() - begin) / steps)
                bytes_of[name] = (sent[0] - before) // steps
    for name in ways:
        print(f"{name:28} {bytes_of[name]:>10,} bytes a step {1e3 * least[name]:8.2f} ms")


def counted_bytes(driver: PipelineDriver1F1B) -> list[int]:
    """A list with the bytes of all messages from now on."""
    session, found = driver.session, [0]
    send = session.send

    def counting(worker: int, message: object) -> object:
        pickled = pickle_message(message)
        found[0] += len(pickled.data) + sum(each.nbytes for each in pickled.tensors)
        return send(worker, message)

    session.send = counting  # type: ignore[method-assign, assignment]
    return found


if __name__ == "__main__":
    main()
