"""Why micro-batches do not give the results of the whole batch bit for bit, and how they can.

Question: if a batch is cut, run in pieces and merged again, is the result the same, bit for bit? If not, is there a test of
          micro-batches without a tolerance?
Command:  python exps/split_example.py, with --no-workers for plain PyTorch alone
Finding:  no, and yes. The numbers of a row depend on how many rows are computed with it: for a matrix product of another
          shape torch uses another kernel, which adds in another order. The difference is rounding, about 1e-7 of the
          result in float32. If every micro-batch is the whole batch, and only its own rows are taken from the output, each
          row is computed in the same shape as before, and is the same to the bit. With `_debug_mask_minibatches=True`, a
          driver does this, with zeros in the other rows. Then no row may depend on another, as in batch normalization.
          Each micro-batch computes the whole batch, so this is for tests.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import nn

from pippy import PipelineDriverFillDrain, cluster, pipe_split, pipeline

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
    """The same by a driver, as slices or masked. Workers have as many threads as this process, for the same kernels."""
    driver = PipelineDriverFillDrain(pipeline(model), _debug_mask_minibatches=mask)
    return lambda model, x, chunks: driver.run(chunks, x)


def ways(
    model: nn.Module, workers: bool
) -> Iterator[tuple[str, Callable[[nn.Module, torch.Tensor, int], torch.Tensor]]]:
    """The ways of cutting that are compared with the whole batch."""
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
    with cluster(2, threads=1):
        compare(model, x, workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-workers", dest="workers", action="store_false")
    main(**vars(parser.parse_args()))
