"""Mini-batches as indices: workers load rows of a dataset."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, StackDataset, TensorDataset, default_collate

from pippy import (
    IndexLoader,
    Pipe,
    PipelineDriver1F1B,
    Replicate,
    TensorChunkSpec,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, MicrobatchError, StepError
from pippy.drivers.driver.drivers import PipelineDriverFillDrain
from pippy.drivers.wire.pickling import pickle_message
from tests.drivers.models import Chain, TwoLayers
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

ROWS = 40


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four():
    with thread_cluster(4) as cluster:
        yield cluster


class Rows(Dataset):
    """Rows of several columns, one by one; ``seen`` has the indices that were asked for."""

    def __init__(self, *columns, names=None):
        self.columns, self.names, self.seen = columns, names, []

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        self.seen.append(index)
        row = tuple(column[index] for column in self.columns)
        return dict(zip(self.names, row)) if self.names else row


class ManyRows(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def classes(rows=ROWS, width=8):
    """Images and labels, of which some are left out: micro-batches have weights that only labels say."""
    labels = torch.randint(width, (rows,))
    labels[torch.rand(rows) < 0.4] = -100
    return torch.randn(rows, width), labels


def mine(output, target):
    """A loss that only its author can read."""
    return F.cross_entropy(output, target)


class Named(TwoLayers):
    """Two inputs by name; the last stage uses a second one."""

    def forward(self, ids, mask, scale=2.0):
        x = torch.tanh(self.first(ids))
        pipe_split()
        return self.last(x) * mask * scale


CASES = {
    "a tensor dataset": (TensorDataset, lambda: pipeline(Chain(3), nn.MSELoss()), "floats", {}),
    "row by row": (Rows, lambda: pipeline(Chain(3), nn.CrossEntropyLoss()), "classes", {}),
    "many rows at once": (ManyRows, lambda: pipeline(Chain(2), F.cross_entropy), "classes", {}),
    "a stack": (StackDataset, lambda: pipeline(Chain(3), nn.CrossEntropyLoss(reduction="sum")), "classes", {}),
    "a loss of my own": (
        Rows,
        lambda: pipeline(Chain(2), mine),
        "classes",
        {"loss_reduction": lambda target: (target != -100).sum()},
    ),
    "one loss": (Rows, lambda: pipeline(Chain(2), mine), "classes", {"single_loss": True}),
    "masks": (Rows, lambda: pipeline(Chain(2), nn.MSELoss()), "floats", {"_debug_mask_minibatches": True}),
}


def columns_of(which):
    return classes() if which == "classes" else (torch.randn(ROWS, 8), torch.randn(ROWS, 8))


def step(driver, chunks, *args, **kwargs):
    driver.zero_grad()
    loss = driver.run(chunks, *args, **kwargs)
    return loss, *(grad for grad in driver.gradients().values())


def assert_same(one, other):
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_step(threads, case):
    make, pipe, which, options = CASES[case]
    columns = columns_of(which)
    kind = PipelineDriverFillDrain if "single_loss" in options else PipelineDriver1F1B
    driver = kind(pipe(), threads, **options)
    loader = IndexLoader(make(*columns), batch_size=10, shuffle=True)
    orders = [[column.batches[0].indices for column in batch] for batch in loader]
    assert sorted(index for (indices, _) in orders for index in indices) == list(range(ROWS))
    loader.set_epoch(0)
    for batch, (indices, same) in zip(loader, orders, strict=True):
        assert indices is same or indices == same
        assert batch[0].batches[0].indices == indices
        assert_same(step(driver, 4, *batch), step(driver, 4, *(column[indices] for column in columns)))
    with torch.no_grad():
        assert torch.equal(driver.run(4, *loader.batch(range(9))), driver.run(4, *(column[:9] for column in columns)))


def test_a_loss_that_only_its_author_can_read_is_checked_where_the_targets_are(threads):
    """What torch's loss leaves out is counted where the targets are, also if a later step has the first of them."""
    x, labels = torch.randn(ROWS, 8), torch.randint(8, (ROWS,))
    labels[25] = labels[27] = labels[31] = -100
    driver = PipelineDriver1F1B(pipeline(Chain(2), mine), threads)
    loader = IndexLoader(TensorDataset(x, labels))
    for start in (0, 10):
        assert_same(
            step(driver, 4, *loader.batch(range(start, start + 10))),
            step(driver, 4, x[start : start + 10], labels[start : start + 10]),
        )
    assert_same(step(driver, 4, *loader.batch(range(20, 35))), step(driver, 4, x[20:35], labels[20:35]))
    refused, pipe = [], pipeline(Chain(2), lambda o, t: F.cross_entropy(o[t >= 0], t[t >= 0]))
    for batch in ((x[20:35], labels[20:35]), loader.batch(range(20, 35))):
        with pytest.raises(MicrobatchError, match="are not the loss of the whole") as raised:
            PipelineDriver1F1B(pipe, threads).run(4, *batch)
        refused.append(
            str(raised.value).partition("They agree if")[2]
        )  # other rows are tried, as here only indices are known
    assert refused[0] == refused[1] != ""


def test_arguments_by_name_and_what_is_given_beside_them(threads):
    ids, mask, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Named(), nn.MSELoss()), threads)
    loader = IndexLoader(Rows(ids, mask, names=("ids", "mask")), batch_size=8)
    for at, batch in enumerate(loader):
        rows = slice(8 * at, 8 * at + 8)
        mixed = step(driver, 3, **batch, target=target[rows])
        assert_same(mixed, step(driver, 3, ids=ids[rows], mask=mask[rows], target=target[rows]))


def test_specs_are_those_of_the_call(threads):
    """Rows in the second dimension, as collated; a column that is no part of the batch."""

    def collated(rows):
        xs, masks, targets = zip(*rows)
        return torch.stack(xs, 1), masks[0], torch.stack(targets)

    class Across(Named):
        def forward(self, ids, mask):
            return super().forward(ids.transpose(0, 1), mask)

    ids, mask, target = torch.randn(ROWS, 8), torch.randn(8), torch.randn(ROWS, 8)
    specs = {"ids": TensorChunkSpec(1), "mask": Replicate()}
    driver = PipelineDriver1F1B(pipeline(Across(), nn.MSELoss()), threads, chunk_spec=specs)
    loader = IndexLoader(Rows(ids, mask.expand(ROWS, 8), target), collate_fn=collated)
    given = step(driver, 3, ids[:10].T, mask, target[:10])
    assert_same(step(driver, 3, *loader.batch(range(10))), given)


# Who loads what


def loads(driver, number):
    """For each worker what it has of a dataset: the keys of its columns, or None for whole rows."""
    readers = [worker.drivers[driver.number].datasets for worker in driver.cluster.engine.workers]
    held = [reader.datasets.get(number) for reader in readers]
    return [each and set(each.parts) for each in held]


@pytest.mark.parametrize(
    "make, wanted",
    [(StackDataset, [{0}, None, {1}]), (TensorDataset, [{0}, None, {1}]), (Rows, [{None}, None, {None}])],
)
def test_only_those_load_that_use_it(threads, make, wanted):
    columns = classes()
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.CrossEntropyLoss()), threads)
    loader = IndexLoader(make(*columns), batch_size=8)
    with torch.no_grad():
        driver.run(2, *loader.batch(range(8)))
    driver.run(2, *loader.batch(range(8, 16)))
    assert loads(driver, loader.source.number) == wanted
    held = [worker.drivers[driver.number].datasets.datasets for worker in threads.engine.workers]
    assert [len(each) for each in held] == [1, 0, 1]  # the worker in the middle has none
    number = loader.source.number
    del loader
    other = IndexLoader(make(*columns), batch_size=8)
    driver.run(2, *other.batch(range(8)))
    assert [number in each for each in held] == [False] * 3  # dropped with the loader


def test_a_step_is_one_message_to_every_worker_and_its_bytes_are_those_of_the_indices(threads, monkeypatch):
    sizes = []
    send = type(threads.session).send

    def counting(self, worker, message):
        data, tensors = pickle_message(message)
        sizes.append(len(data) + sum(tensor.nbytes for tensor in tensors))
        return send(self, worker, message)

    driver = PipelineDriver1F1B(pipeline(Chain(3, width=256), nn.MSELoss()), threads)
    x, target = torch.randn(512, 256), torch.randn(512, 256)
    loader = IndexLoader(TensorDataset(x, target), batch_size=64)
    for batch in (loader.batch(range(64)), loader.batch(range(64)), (x[:64], target[:64])):
        driver.run(4, *batch)
    monkeypatch.setattr(type(threads.session), "send", counting)
    driver.run(4, *loader.batch(range(64, 128)))
    by_index, sizes[:] = sizes[:], []
    driver.run(4, x[:64], target[:64])
    given, sizes[:] = sizes[:], []
    driver.run(4, *loader.batch(range(448, 512)))
    assert len(by_index) == len(given) == len(sizes) == 3
    assert [each > 64 * 256 * 8 for each in given] == [True, False, True]
    assert all(each < 1500 for each in by_index)
    assert max(sizes) - max(by_index) <= 64  # an index of two bytes is a byte longer


def make_rows():
    return TensorDataset(
        torch.arange(320.0, dtype=torch.float64).view(ROWS, 8), torch.ones(ROWS, 8, dtype=torch.float64)
    )


def make_other_rows():
    """Another one each time: as if a folder were listed in another order."""
    return TensorDataset(torch.full((ROWS, 8), float(next(calls))), torch.ones(ROWS, 8))


def make_fewer_rows():
    return Rows(*[torch.ones(ROWS - next(calls), 8)] * 2)


calls = itertools.count(1)
HERE = "tests.drivers.driver.test_data"


def test_by_the_name_of_a_function(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    x, target = make_rows().tensors
    loader = IndexLoader(f"{HERE}:make_rows", columns=2, batch_size=8, sampler=range(16))
    for at, batch in enumerate(loader):
        rows = slice(8 * at, 8 * at + 8)
        assert_same(step(driver, 2, *batch), step(driver, 2, x[rows], target[rows]))
    assert len(loader) == 2
    with pytest.raises(DriverError, match="index 40 is out of range: the dataset has 40 rows, 0 to 39"):
        loader.batch([40])  # as the workers have said


@pytest.mark.parametrize(
    "name, words",
    [
        (f"{HERE}:make_other_rows", "the digest"),
        (f"{HERE}:make_fewer_rows", r"a Rows of \d+ rows, .* a Rows of \d+ rows"),
        (f"{HERE}:nothing", "has no attribute 'nothing'; the module must be one"),
        ("no_such_module:rows", "No module named 'no_such_module'"),
        ("builtins:object", "which cannot be indexed"),
    ],
)
def test_datasets_that_workers_cannot_make_alike(threads, name, words):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    loader = IndexLoader(name, columns=2, sampler=range(8))
    with pytest.raises((DriverError, StepError), match=words):
        driver.run(2, *loader.batch(range(8)))
    assert driver.run(2, torch.ones(8, 8), torch.ones(8, 8)).isfinite()


@pytest.mark.parametrize("how", [None, lambda target: (target != -100).sum()])
def test_replicas_of_the_pipeline_take_their_shares(cluster, how):
    x, labels = classes()
    driver = PipelineDriver1F1B(pipeline(Chain(2), F.cross_entropy), cluster, replicas=2, loss_reduction=how)
    loader = IndexLoader(TensorDataset(x, labels))
    for chunks in (2, 3, 4):
        assert_same(step(driver, chunks, *loader.batch(range(10))), step(driver, chunks, x[:10], labels[:10]))
    if how is not None:
        counted = driver.steps.datasets.loss_reduction = lambda target, x: (target != -100).sum()
        driver.steps.settings.loss_reduction = counted
        with pytest.raises(DriverError, match="by index, or all as tensors"):
            driver.run(2, x[:10], loader.batch(range(10))[1])


@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        (Rows, {}, True),
        (Rows, {"prefetch": 2}, True),
        (Rows, {"collate_fn": lambda rows: default_collate(rows)}, False),  # may look at all rows
        (StackDataset, {}, True),
    ],
)
def test_each_replica_loads_its_own_rows(four, kind, options, own):
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    columns = (Rows(x), Rows(target)) if kind is StackDataset else (x, target)
    columns = [each if isinstance(each, torch.Tensor) else Single(*each.columns) for each in columns]
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), four, replicas=2)
    loader = IndexLoader(kind(*columns), batch_size=10, **options)
    for at, batch in enumerate(loader):
        assert_same(step(driver, 4, *batch), step(driver, 4, x[10 * at : 10 * at + 10], target[10 * at : 10 * at + 10]))
    readers = [worker.drivers[driver.number].datasets.datasets for worker in four.engine.workers]
    for worker, datasets in enumerate(readers):
        held = [part for each in datasets.values() for part in each.parts.values()]
        seen = {index for each in held for index in each.seen if index >= 20}  # the first step checks the loss
        share = range(6) if worker < 2 else range(6, 10)
        last = worker % 2 == 1  # it weighs the losses by the targets of all
        assert seen == {index for index in range(20, ROWS) if last or not own or index % 10 in share}


def test_replicas_of_rows_that_draw_are_those_of_one_pipeline(cluster):
    rows, found = Noisy(torch.zeros(ROWS, 8), torch.zeros(ROWS, 8)), []
    for replicas in (1, 2):
        driver = PipelineDriver1F1B(
            pipeline(Difference(), lambda y, t: (y * 2 - t).sum()), cluster, loss_reduction="sum", replicas=replicas
        )
        found.append([driver.run(4, *batch) for batch in IndexLoader(rows, batch_size=10, shuffle=True, seed=3)])
        driver.close()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


# Random numbers


class Single(Rows):
    """Rows of one column."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0]


class Noisy(Rows):
    """Input and target are changed by the same random number."""

    def __getitem__(self, index):
        noise = torch.rand(()) + random.random() + np.random.rand()
        return self.columns[0][index] + noise, self.columns[1][index] + noise


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.one
        pipe_split()
        return x * self.other


def test_all_workers_change_a_row_alike_and_a_run_is_repeated(cluster):
    zeros = torch.zeros(ROWS, 8)
    for _ in range(2):
        driver = PipelineDriver1F1B(pipeline(Difference(), nn.MSELoss()), cluster)
        loader = IndexLoader(Noisy(zeros, zeros), batch_size=8, shuffle=True, seed=3)
        assert [driver.run(2, *batch) for batch in loader] == [0] * 5
    driver = PipelineDriver1F1B(pipeline(Difference(), lambda y, t: (y * 2 - t).sum()), cluster, loss_reduction="sum")
    first, second = ([driver.run(2, *batch) for batch in loader] for _ in range(2))
    loader.set_epoch(1)
    assert [driver.run(2, *batch) for batch in loader] == first
    assert not {*map(float, first)} & {*map(float, second)}


def test_dropout_draws_what_it_draws_without(threads):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    for keyed in (True, False):
        found = []
        for rows in ((x, target), IndexLoader(TensorDataset(x, target)).batch(range(8))):
            torch.manual_seed(5)
            driver = PipelineDriver1F1B(
                Pipe.from_sequential(model, nn.MSELoss()), threads, keyed_random=keyed, world_size=1
            )
            found.append([driver.run(2, *rows) for _ in range(2)])
        assert found[0] == found[1] or not keyed


# Going on


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_goes_on_where_another_was(shuffle):
    rows = TensorDataset(torch.arange(10))

    def order(loader):
        return [(batch[0].batches[0].indices, batch[0].batches[0].draws) for batch in loader]

    whole = IndexLoader(rows, 3, shuffle, seed=1)
    wanted = [order(whole), order(whole)]
    assert sorted(index for indices, _ in wanted[1] for index in indices) == list(range(10))
    assert (wanted[0] != wanted[1]) and [len(indices) for indices, _ in wanted[0]] == [3, 3, 3, 1]
    for epoch, given in [(0, 0), (0, 2), (1, 0), (1, 3)]:
        first, other = IndexLoader(rows, 3, shuffle, seed=1), IndexLoader(rows, 3, shuffle, seed=2)
        for _ in range(epoch):
            list(first)
        batches = iter(first)
        for _ in range(given):
            next(batches)
        other.load_state_dict(first.state_dict())
        assert order(other) == wanted[epoch][given:]
    other.load_state_dict({**first.state_dict(), "epoch": 1, "given": 0})
    other.set_epoch(0)  # nothing is left of it
    assert [order(other), order(other)] == [[], wanted[1]]
    other.set_epoch(0)
    assert order(other) == wanted[0]


# What is refused


# With an example, and what else a step has


# In the loop


# Ahead of the steps


# A worker that is lost, and tokens
