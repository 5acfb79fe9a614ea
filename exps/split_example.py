"""Why the results of micro-batches are not bit for bit those of the whole batch, and the way to get those that are.

Question: if a batch is cut, run in pieces and put together again, is the result the same, bit for bit? If not, can the
          machinery of micro-batches be tested without a tolerance?
Command:  python exps/split_example.py, with --no-workers for plain PyTorch alone
Finding:  no, and yes. A row's numbers depend on how many rows are computed with it: a matrix product of another shape
          is another kernel, which adds in another order. The difference is rounding, some 1e-7 of the result in
          float32. If every micro-batch is the whole batch, and its own rows are taken from what comes out, each row is
          computed in the same shape as before, and is the same to the bit. With zeros in the rows that are not its own
          (`_debug_mask_minibatches=True`) a driver does just this; no row may depend on another, as in batch
          normalization. It costs the whole batch for each micro-batch, so it is for tests.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import nn

from pippy import PipelineDriverFillDrain, local_cluster, pipe_split, pipeline

ROWS, WIDTH = 32, 512
CHUNKS = (2, 4, 8, 16, 32)
TABLE = "{:<28} {:>6} {:>12} {:>16}"


class Net(nn.Module):
    """Linear layers, the first and the last of which are stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        pipe_split()
        return self.last(x)


def in_pieces(model: nn.Module, x: torch.Tensor, chunks: int) -> torch.Tensor:
    """Each micro-batch is a slice of the batch."""
    return torch.cat([model(piece) for piece in x.tensor_split(chunks)])


def in_masked_wholes(model: nn.Module, x: torch.Tensor, chunks: int) -> torch.Tensor:
    """Each micro-batch is the whole batch, with zeros in all rows but its own; these rows are taken from the output."""
    results = []
    for rows in torch.arange(len(x)).tensor_split(chunks):
        masked = torch.zeros_like(x)
        masked[rows] = x[rows]
        results.append(model(masked)[rows])
    return torch.cat(results)


def on_workers(model: nn.Module, mask: bool) -> Callable[[nn.Module, torch.Tensor, int], torch.Tensor]:
    """The same by a driver: as slices, or masked. Workers of the same threads, so that kernels are chosen alike."""
    driver = PipelineDriverFillDrain(pipeline(model), _debug_mask_minibatches=mask)
    return lambda model, x, chunks: driver.run(chunks, x)


def ways(
    model: nn.Module, workers: bool
) -> Iterator[tuple[str, Callable[[nn.Module, torch.Tensor, int], torch.Tensor]]]:
    """What is compared with the whole batch."""
    yield "slices", in_pieces
    yield "masked wholes", in_masked_wholes
    if workers:
        yield "a driver, slices", on_workers(model, mask=False)
        yield "a driver, masked wholes", on_workers(model, mask=True)


def compare(model: nn.Module, x: torch.Tensor, workers: bool) -> None:
    """A line for each way and number of micro-batches."""
    with torch.no_grad():
        whole = model(x)
        print(TABLE.format("", "chunks", "same bits", "difference"))
        for name, way in ways(model, workers):
            for chunks in CHUNKS:
                result = way(model, x, chunks)
                largest = ((result - whole).abs().max() / whole.abs().max()).item()
                print(TABLE.format(name, chunks, "yes" if torch.equal(result, whole) else "no", f"{largest:.1e}"))


def main(workers: bool = True) -> None:
    """Compare both ways, and both on workers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    if not workers:
        compare(model, x, workers)
        return
    with local_cluster(2, threads=1):
        compare(model, x, workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-workers", dest="workers", action="store_false")
    main(**vars(parser.parse_args()))
