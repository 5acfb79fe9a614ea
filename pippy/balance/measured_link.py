"""The speed of the link between two workers of the current cluster, measured with values that a driver passes there.

    one worker      makes a value  send ──▶                                receive   the time between the two, by one clock
    the other                            receive  takes one number of it   send ──▶

It is measured with a large value and with a small one. What is longer with the large one is the time of its bytes.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from pippy.balance.transfer_times import Link
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.current_cluster import current_cluster
from pippy.drivers.plan.language.instructions import Receive, Send
from pippy.ir.base.errors import BalanceError
from pippy.ir.base.marks import pipe_split
from pippy.ir.pipe import pipe_of
from pippy.ir.request import Request

SMALL, FIRST, LARGEST = (
    1 << 10,
    1 << 20,
    1 << 26,
)  # bytes of the small value, and of the large one: at first, and at most
LONG = 0.02  # seconds that the large value is to take
TIMES = 5  # that each is sent; the median counts


class _ThereAndBack(nn.Module):
    """Each row is a KiB, made from one number of it, so that the controller sends little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x.repeat(1, 256)
        pipe_split()
        first = value[0, :1] + 1.0
        pipe_split()
        return first * 1.0


def measured_link(stages: int) -> Link:
    """The slowest of the links from each worker of the current cluster to the next one, for so many stages in a row."""
    try:
        cluster = current_cluster()
    except ClusterError as error:
        raise BalanceError(
            f'link="measured" measures between the workers of the current cluster, but {error}; or say how fast the link is, '
            'as in link="10Gbit"'
        ) from None
    workers = list(cluster.session.log.present)[:stages]
    if len(workers) < 2:
        raise BalanceError(
            f'link="measured" measures between workers, and {"the stages are" if stages < 2 else "the current cluster is"} '
            'on one; leave link out, or say how fast the link will be, as in link="10Gbit"'
        )
    speeds = {pair: bytes_per_second(cluster, pair) for pair in pairwise(workers)}
    one, other = slowest = min(speeds, key=speeds.__getitem__)
    names = f"from {cluster.workers[one]} to {cluster.workers[other]}"
    which = f", the slowest of {len(speeds)}" * (len(speeds) > 1)
    return Link(speeds[slowest], f"measured, {speed_text(speeds[slowest])} {names}{which}")


def speed_text(speed: float) -> str:
    """Bytes per second, as `link=` takes them.

    >>> speed_text(112_345_678), speed_text(5.4321e9)
    ('112 MB/s', '5.43 GB/s')
    """
    return f"{speed / 1e9:.3g} GB/s" if speed >= 1e9 else f"{speed / 1e6:.3g} MB/s"


def bytes_per_second(cluster: Cluster, pair: Sequence[int]) -> float:
    """How many bytes go from one worker to another in a second."""
    pipe = pipe_of(_ThereAndBack(), Request())
    driver = PipelineDriver(
        pipe, cluster, schedule="fill_drain", placement={0: 0, 1: 1, 2: 0}, all_ranks=list(pair), check=False
    )
    try:
        small, size = there_and_back(driver, SMALL), FIRST
        while (large := there_and_back(driver, size)) < LONG and size < LARGEST:
            size *= 4
        return size / (large - small if large > small else large)
    finally:
        driver.close()


def there_and_back(driver: PipelineDriver, size: int) -> float:
    """How long it takes to send so many bytes, and to have an answer."""
    x, found = torch.zeros(size // 1024, 1, dtype=torch.float32, device="cpu"), []
    with torch.no_grad():
        driver.run(1, x)
        with driver.record() as recording:
            for _ in range(TIMES):
                driver.run(1, x)
    for step in recording.steps:
        spans = step.noted[0].spans()
        (sent,), (received,) = (
            [span for span, each in zip(spans, step.program.orders[0]) if isinstance(each, kind)]
            for kind in (Send, Receive)
        )
        found.append(received[1] - sent[0])
    return statistics.median(found)
