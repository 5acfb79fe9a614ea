"""Inputs that workers load, in a run: what is refused, the loop, and loading ahead of the steps."""

import itertools
import os
import pickle
import random
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from pippy import (
    IndexLoader,
    MicroBatches,
    PipelineDriver,
    PipelineDriver1F1B,
    PippyError,
    pipe_split,
    pipeline,
    train,
)
from pippy.drivers.base.errors import DriverError, MicrobatchError, StepError, WorkerLostError
from pippy.drivers.batch.items import call_of_items
from pippy.ir.base.errors import InputError
from tests.comparisons import update
from tests.drivers.driver.test_data import ROWS, Noisy, Rows, assert_same, classes, step
from tests.drivers.model.recovery.runs import opened
from tests.drivers.models import Chain, TwoLayers
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(3) as cluster:
        yield cluster


class Raising(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("broken image")
        return super().__getitem__(index)


class Endless(IterableDataset):
    def __iter__(self):
        yield from itertools.count()


def unlike(rows):
    return torch.stack([row[0] for row in rows[1:]]), torch.stack([row[1] for row in rows])


def test_what_a_dataset_does_wrong_is_said_with_worker_index_and_line(threads):
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    wrong = [
        (
            Raising(x, target),
            {},
            r"worker \d \(worker\d\) failed at Step\nDriverError: dataset\[5\] raised ValueError: broken image\n"
            r"  \S+test_loading\.py:\d+, in __getitem__: raise ValueError",
        ),
        (Rows(x, target), {"collate_fn": unlike, "columns": 2}, "8 indices gave 7 rows"),
        (Rows(x), {"columns": 2}, "has no column 1"),
        (Rows(x.clone().requires_grad_(), target), {}, "requires a gradient"),
    ]
    before = driver.run(2, x[:8], target[:8])
    for dataset, options, words in wrong:
        loader = IndexLoader(dataset, **options)
        with pytest.raises((StepError, InputError), match=words):
            driver.run(2, *loader.batch(range(8)))
    driver.zero_grad()
    assert driver.run(2, x[:8], target[:8]) == before


def test_what_is_refused_before_anything_is_sent(threads):
    x = torch.randn(ROWS, 8)
    loader = IndexLoader(TensorDataset(x, x))
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    automatic = PipelineDriver(driver.pipe, threads, schedule="auto", memory="1 GiB")
    counts = list(threads.session.counts)
    refused = [
        (lambda: IndexLoader(iter([])), "cannot be indexed"),
        (lambda: IndexLoader(Endless()), "cannot be indexed"),
        (lambda: IndexLoader("rows"), "'package.module:function'"),
        (lambda: IndexLoader("package:rows"), "columns= is missing: the dataset"),
        (lambda: IndexLoader("package:rows", columns=2), "give its indices in order"),
        (lambda: IndexLoader([1], batch_size=0), "batch_size=0: give how many rows"),
        (lambda: IndexLoader([1], sampler=[0], shuffle=True), "both decide the order"),
        (lambda: IndexLoader([1], batch_sampler=[[0]], shuffle=True), "combined with batch_size, shuffle"),
        (lambda: IndexLoader([1], columns=0), "columns=0: give how many columns"),
        (lambda: IndexLoader([1], collate_fn=3), "collate_fn=3: give a function"),
        (
            lambda: IndexLoader(["a", object()], columns=None).batch([7]),
            "index 7 is out of range: the dataset has 2 rows",
        ),
        (lambda: loader.batch([]), "no indices"),
        (lambda: driver.run(9, *loader.batch(range(8))), "8 rows .* too few for 9 micro-batches"),
        (lambda: driver.run(2, loader.batch(range(8))[0], x[:9]), "different numbers of rows"),
        (
            lambda: driver.memory(2, *loader.batch(range(8))),
            "memory\\(\\) needs sizes, .* are not known in this process",
        ),
        (lambda: automatic.run(None, *loader.batch(range(8))), r"schedule='auto' with memory= needs sizes"),
        (
            lambda: driver.run(2, *IndexLoader(Rows(x, x, names=threading.Lock()), columns=2).batch([0, 1])),
            r"cannot pickle.*give the name of a function",
        ),
        (lambda: driver.run(2, MicroBatches(list(loader.batch([0, 1]))), x[:2]), "give one column with all indices"),
        (lambda: pickle.dumps(loader.batch([0])[0]), "a Column cannot be pickled"),
    ]
    for call, words in refused:
        with pytest.raises((PippyError, TypeError), match=words):
            call()
    assert list(threads.session.counts) == counts or list(threads.session.counts)[1] == counts[1] + 1  # a program


class GivesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        pipe_split()
        return x, y * 2


def test_a_model_that_returns_what_is_loaded(threads):
    x = torch.randn(8, 8)
    driver = PipelineDriver1F1B(pipeline(GivesInput()), threads)
    with pytest.raises(DriverError, match="the model returns its input 'x', which only the workers load"):
        driver.run(2, *IndexLoader(x).batch(range(8)))


class Asks(TwoLayers):
    def forward(self, x, mask):
        x = self.first(x)
        pipe_split()
        return self.last(x) * mask if mask.shape[1] > 4 else self.last(x)


def test_what_the_example_has_fixed_is_checked_where_rows_are_loaded(threads):
    x, mask = torch.randn(ROWS, 8), torch.ones(ROWS, 8)
    pipe = pipeline(Asks(), nn.MSELoss(), example_args=(x[:4], mask[:4], x[:4]))
    driver = PipelineDriver1F1B(pipe, threads)
    assert_same(
        step(driver, 2, *IndexLoader(TensorDataset(x, mask, x)).batch(range(8))),
        step(driver, 2, x[:8], mask[:8], x[:8]),
    )
    for wrong, words in [
        (TensorDataset(x[:, 0], mask, x), "x is float64"),
        (TensorDataset(x, mask[:, :1], x), "forward asked for a value .* went on for True"),
    ]:
        with pytest.raises(StepError, match=words):  # tensors in this process would go by another graph
            driver.run(2, *IndexLoader(wrong).batch(range(8)))


def test_steps_in_flight_records_outputs_and_accumulation(threads):
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    loader = IndexLoader(TensorDataset(x, target), batch_size=8)
    with driver.record(memory=True) as recording:
        running = [driver.run_async(2, *batch) for batch in loader]
        losses = [each.result() for each in running]
    assert recording.steps
    summed = driver.gradients()
    driver.zero_grad()
    assert losses == [driver.run(2, x[at : at + 8], target[at : at + 8]) for at in range(0, ROWS, 8)]
    assert_same(driver.gradients().values(), summed.values())
    both = [driver.run(2, *rows, outputs=True) for rows in (loader.batch(range(8)), (x[:8], target[:8]))]
    assert_same(*both)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_takes_a_loader_and_goes_on_with_it(cluster, tmp_path, accumulate):
    """With mini-batches of 7, 7 and 4 rows: those that are run as one are cut and weighted each by itself."""
    x, labels = classes(18)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    pipe = pipeline(model, nn.CrossEntropyLoss(), split="parameters", num_stages=2)

    def trained(data, **options):
        driver = PipelineDriver1F1B(pipe, cluster, keyed_random=7)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        result = train(driver, data, optimizer, chunks=3, steps=4, accumulate=accumulate, **options)
        return result.losses, driver.state_dict()

    def loader():
        return IndexLoader(TensorDataset(x, labels), batch_size=7, shuffle=True, seed=1)

    order = loader()
    epochs = [[(x[each], labels[each]) for each in (batch[0].batches[0].indices for batch in order)] for _ in range(4)]

    class Given(list):
        def __iter__(self):
            return iter(epochs.pop(0))

    wanted, state = trained(Given())
    losses, end = trained(loader(), folder=tmp_path, save_every=2)
    assert losses == wanted and all(map(torch.equal, end.values(), state.values()))
    resumed, again = trained(loader(), folder=tmp_path, resume=tmp_path / "step-2")
    assert resumed[-2:] == losses[-2:] and all(map(torch.equal, end.values(), again.values()))


def test_mini_batches_that_are_run_as_one(threads):
    x, labels = classes()
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.CrossEntropyLoss()), threads)
    loader, parts = IndexLoader(Rows(x, labels)), [range(7), range(7, 14), range(14, 16)]
    given = [(x[part], labels[part]) for part in parts]
    calls = [call_of_items(items, 3) for items in ([loader.batch(part) for part in parts], given)]
    assert calls[0].chunks == calls[1].chunks == 8
    assert_same(*(step(driver, call.chunks, *call.args) for call in calls))
    other = IndexLoader(Rows(x, labels))
    with pytest.raises(MicrobatchError, match="take all of them from one loader"):
        call_of_items([loader.batch(range(7)), other.batch(range(7))], 3)


def ahead(driver, worker=0):
    """What a worker loads, or has loaded, for steps to come: by the position of the mini-batch."""
    reader = driver.cluster.engine.workers[worker].drivers[driver.number].datasets
    return {draws[-1]: each for (_, draws), each in reader.ahead.items()}


@pytest.mark.parametrize("count", [1, 3])
def test_the_next_mini_batches_are_loaded_beside_the_steps(threads, count):
    columns = classes()
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.CrossEntropyLoss()), threads)
    loader = IndexLoader(Rows(*columns), batch_size=8, columns=2, prefetch=count)
    losses = []
    for at, batch in enumerate(loader):
        losses.append(driver.run(2, *batch))
        assert list(ahead(driver)) == list(ahead(driver, 1)) == list(range(at + 1, min(at + 1 + count, 5)))
    plain = [driver.run(2, *(column[each : each + 8] for column in columns)) for each in range(0, ROWS, 8)]
    assert losses == plain
    held = [
        worker.drivers[driver.number].datasets.datasets[loader.source.number].parts
        for worker in threads.engine.workers[:2]
    ]
    assert [sorted(each[None].seen) for each in held] == [list(range(ROWS))] * 2  # each row once
    driver.run(2, *next(iter(loader)))
    left = ahead(driver)
    driver.run(2, *loader.batch(range(4)))
    assert ahead(driver) == {} and all(each.ended for each in left.values())


class Gated(Rows):
    """Its sixth row waits until it may come."""

    opened, asked = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if index == 5:
            Gated.asked.set()
            assert Gated.opened.wait(60)
        return super().__getitem__(index)


def test_a_step_goes_on_while_rows_are_loaded_and_what_is_not_needed_is_given_up(threads):
    x = torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads)
    batches = iter(IndexLoader(Gated(x, x), batch_size=4, prefetch=1))
    assert driver.run(2, *next(batches)).isfinite()
    assert Gated.asked.wait(60)
    late = driver.run_async(2, *next(batches))  # waits for the row
    driver.session.give_up(KeyboardInterrupt())
    with pytest.raises(StepError, match="given up"):
        late.result()
    assert driver.run(2, x[:4], x[:4]).isfinite()
    Gated.opened.set()


@pytest.mark.parametrize("dataset", [Noisy, Raising])
def test_what_goes_wrong_beside_a_step_is_said_by_the_step_that_needs_it(threads, dataset):
    x = torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads)
    loader = iter(IndexLoader(dataset(x, x), batch_size=4, prefetch=1))
    words = "draws from a random generator of the process" if dataset is Noisy else r"dataset\[5\] raised ValueError"
    for _ in range(dataset is Raising):
        driver.run(2, *next(loader))
    with pytest.raises(StepError, match=words):
        driver.run(2, *next(loader))


class DrawsPythons(Rows):
    def __getitem__(self, index):
        return self.columns[0][index] * random.random(), self.columns[1][index]


def test_rows_that_draw_are_not_loaded_beside_a_step(cluster):
    x = torch.randn(ROWS, 8)
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), cluster)
    with pytest.raises(StepError, match="Leave prefetch= out"):
        driver.run(2, *IndexLoader(DrawsPythons(x, x), prefetch=1).batch(range(8)))
    with pytest.raises(DriverError, match="prefetch=-1: give how many"):
        IndexLoader(x, prefetch=-1)


def test_a_worker_that_takes_the_place_of_another_gets_the_dataset(tmp_path):
    x, labels = classes()
    with opened() as workers:
        driver = PipelineDriver1F1B(pipeline(Chain(2), nn.CrossEntropyLoss()), workers)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        loader = IndexLoader(TensorDataset(x, labels), batch_size=8, shuffle=True, prefetch=1)

        def losses():
            found = []
            for batch in loader:
                found.append(driver.run(2, *batch))
                update(optimizer)
            return found

        batches = iter(loader)
        driver.run(2, *next(batches))
        update(optimizer)
        driver.save(tmp_path, optimizer=optimizer, loader=loader)
        wanted = losses()
        assert len(wanted) == 4
        os.kill(workers.session.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            losses()
        driver.recover()
        assert losses() == wanted


def test_tokens_are_not_made_behind_columns(threads):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 4, "n_head": 1, "n_layer": 2, "n_positions": 8, "use_cache": False}
    ids = torch.randint(11, (4, 5))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs={"input_ids": ids, "labels": ids})
    driver = PipelineDriver1F1B(pipe.eval(), threads)
    rows = [{"input_ids": each, "labels": each} for each in ids]
    loader = IndexLoader(rows)
    both = [driver.run(2, **rows).loss for rows in (loader.batch(range(4)), {"input_ids": ids, "labels": ids})]
    assert both[0] == both[1]
    with pytest.raises(PippyError, match="Column"):
        driver.generate(loader.batch([0, 1])["input_ids"], max_new_tokens=2)
