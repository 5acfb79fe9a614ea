"""Replicas of a pipeline: the numbers of plain PyTorch on the whole batch, and equal parameters on all replicas."""

import copy
import gc
import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from pippy import (
    MultiUseParameterConfig,
    Pipe,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    convert_deferred_batch_norm,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, StepError, WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.protocol.state import GiveState
from pippy.ir.run.batch_norm import DeferredBatchNorm
from tests.comparisons import assert_gradients, assert_loss, update
from tests.drivers.models import TiedLanguage, tokens
from tests.drivers.processes import stop, within

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rows=11):
    return torch.randn(rows, 4), torch.randn(rows, 2)


def copies(driver, name):
    """The copies of a parameter or buffer on all workers."""
    return [
        driver.commands.call({rank: GiveState((place,))})[rank].tensors[place]
        for rank, place in driver.placed.locations(name)
    ]


def check_replicas_are_equal(driver, replicas=2):
    for name in driver.state_dict():
        found = copies(driver, name)
        assert len(found) >= replicas
        assert all(torch.equal(found[0], each) for each in found), name


def check_state(driver, plain):
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(driver.state_dict()[name], value, rtol=1e-12, atol=1e-12)


def cut_in_two(loss=nn.MSELoss):
    return Pipe.from_sequential(nn.Sequential(*(nn.Sequential(*part) for part in (model()[:2], model()[2:]))), loss())


class Plain(nn.Module):
    """The model of `cut_in_two`, with its names, trained as ever."""

    def __new__(cls):
        return nn.Sequential(model()[:2], nn.Sequential(*model()[2:]))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 5), ("fill_drain", 4), ("zb_h1", 6)])
def test_training_is_that_of_plain_pytorch_on_the_whole_batch(cluster, schedule, chunks):
    plain = Plain()
    driver = PipelineDriver(cut_in_two(), cluster, schedule=schedule, replicas=2)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):  # the third and fourth are one update
        x, target = batch(rows=11 + step)
        assert_loss(driver.run(chunks, x, target), nn.functional.mse_loss(plain(x), target), rtol=1e-12, atol=1e-12)
        if step == 2:
            continue
        ours = driver.clip_grad_norm_(0.05)
        torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(plain.parameters(), 0.05), rtol=1e-12, atol=1e-12)
        assert_gradients(driver, plain, rtol=1e-12, atol=1e-12)
        update(optimizer, theirs)
    check_state(driver, plain)
    check_replicas_are_equal(driver)
    with torch.no_grad():
        torch.testing.assert_close(driver.run(chunks, x, target), nn.functional.mse_loss(plain(x), target))
    torch.testing.assert_close(driver.run(chunks, x, target, outputs=True).outputs, plain(x).detach())


def test_random_numbers_and_results_do_not_depend_on_replicas(cluster):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2))
    x, _ = batch(8)
    found = []
    for replicas in (1, 2):
        pipe = Pipe.from_sequential(nn.Sequential(net[:2], nn.Sequential(net[2])))
        driver = PipelineDriver1F1B(pipe, cluster, replicas=replicas, keyed_random=5)
        found.append([driver.run(4, x) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("tied", ["TRANSMIT", "REPLICATE"])
def test_tied_parameters(cluster, tied):
    torch.manual_seed(2)
    plain = TiedLanguage()
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    pipe = pipeline(
        copy.deepcopy(plain),
        lambda output, target: loss(output.flatten(0, 1), target.flatten()),
        multi_use_param_spec=MultiUseParameterConfig[tied],
    )
    driver = PipelineDriver1F1B(pipe, cluster, world_size=4, replicas=2, loss_reduction=count)
    optimizer, theirs = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        x, target = tokens(6)
        target[3:, 2:] = -100  # the second replica has fewer targets
        assert_loss(driver.run(3, x, target), loss(plain(x).flatten(0, 1), target.flatten()), rtol=1e-12, atol=1e-12)
        update(optimizer, theirs)
    check_state(driver, plain)
    check_replicas_are_equal(driver)


def count(target):
    return (target != -100).sum()


def test_what_is_sent_to_a_replica_are_its_own_rows(cluster):
    driver = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2)
    sent = []
    post = driver.commands.post_step
    driver.commands.post_step = lambda steps, *rest: sent.append(steps) or post(steps, *rest)
    x, target = batch(10)
    driver.run(5, x, target)
    rows = {
        rank: {n: [len(t) for t in step.inputs.whole(n)] for n in step.inputs.arguments}
        for rank, step in sent[0].items()
    }
    assert rows == {0: {"input_1": [6]}, 1: {"target": [6]}, 2: {"input_1": [4]}, 3: {"target": [4]}}


def test_who_is_who(cluster):
    driver = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2, all_ranks=[3, 1, 0, 2])
    assert driver.topology.ranks == ((3, 1), (0, 2))
    assert str(driver.topology).splitlines()[1] == "replica 0  worker3  worker1"
    assert repr(driver) == "<PipelineDriver1F1B: 1f1b, 2 stages in 2 replicas on worker3, worker1, worker0, worker2>"
    assert driver.program(4).workers == 4


def test_who_is_who_in_the_cluster(cluster):
    before = len(cluster.topology.drivers)
    replicas = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2, all_ranks=[3, 1, 0, 2])
    alone = PipelineDriverFillDrain(cut_in_two(), cluster, world_size=1)
    topology = cluster.topology
    assert [each.pid for each in topology.workers] == [each.pid for each in cluster.session.workers]
    assert [each.holds.get(replicas.number) for each in topology.workers] == [
        "replica 1, stage 0",
        "replica 0, stage 1",
        "replica 1, stage 1",
        "replica 0, stage 0",
    ]
    assert topology[0].holds[alone.number] == "stages 0, 1" and alone.number not in topology[1].holds
    first = str(topology).splitlines()[2]
    assert all(each in first for each in ("worker0", "replica 1, stage 0", "stages 0, 1", str(topology[0].pid)))
    assert "replica 1, stage 0" in topology._repr_html_()
    alone.close()
    del replicas
    gc.collect()
    assert len(cluster.topology.drivers) <= before, "neither one that was closed nor one that is gone"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas=0: give how many pipelines"),
        ({"replicas": True}, "replicas=True: give how many pipelines"),
        ({"replicas": 2, "world_size": 3}, "replicas=2 on 3 workers: every replica needs the same number of workers"),
        ({"replicas": 5}, "replicas=5 on 4 workers"),
        ({"replicas": 2, "schedule": "auto"}, "replicas=2 and schedule='auto' cannot be combined"),
        ({"replicas": 2, "schedule": "fill_drain", "single_loss": True}, "no worker has the outputs of the whole"),
        ({"replicas": 2, "_debug_mask_minibatches": True}, "_debug_mask_minibatches=True cannot be combined"),
    ],
)
def test_what_is_refused(cluster, given, message):
    with pytest.raises(DriverError, match=message):
        PipelineDriver(cut_in_two(), cluster, **given)


def test_a_program_for_another_number_of_replicas(cluster):
    program = PipelineDriverFillDrain(cut_in_two(), cluster, replicas=2).program(4)
    with pytest.raises(
        DriverError, match="for 2 replicas of the pipeline, and the driver for one pipeline; give the driver"
    ):
        PipelineDriver(cut_in_two(), cluster, schedule=program)
    x, target = batch(8)
    found = PipelineDriver(cut_in_two(), cluster, schedule=program, replicas=2).run(4, x, target)
    assert found == PipelineDriverFillDrain(cut_in_two(), cluster).run(4, x, target)
    with pytest.raises(Exception, match="chunks=1 for 2 replicas of the pipeline"):
        PipelineDriver1F1B(cut_in_two(), cluster, replicas=2).run(1, x, target)


def test_running_statistics_are_refused_and_the_advice_works(cluster):
    def driver(norm, **given):
        return PipelineDriver1F1B(
            Pipe.from_sequential(nn.Sequential(nn.Linear(4, 3), norm), nn.MSELoss()), cluster, **given
        )

    x, target = torch.randn(8, 4), torch.randn(8, 3)
    norm = nn.BatchNorm1d(3)
    with pytest.raises(DriverError, match="'1' would change running statistics in training"):
        driver(norm, replicas=2).run(2, x, target)
    driver(norm).run(2, x, target)
    driver(norm.eval(), replicas=2).run(2, x, target)
    driver(nn.BatchNorm1d(3, track_running_stats=False), replicas=2).run(2, x, target)
    driver(nn.LayerNorm(3), replicas=2).run(2, x, target)
    driver(convert_deferred_batch_norm(nn.BatchNorm1d(3)), replicas=2).run(2, x, target)


def with_norms(parts=2):
    """A Pipe whose stages have batch norms that count the whole mini-batch."""
    torch.manual_seed(6)
    stages = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None if number % 2 else 0.3))
        for number in range(parts)
    ]
    stages[-1].append(nn.Linear(4, 2))
    return Pipe.from_sequential(nn.Sequential(*map(convert_deferred_batch_norm, stages)), nn.MSELoss())


@pytest.mark.parametrize(
    ("schedule", "parts", "out_of_order"),
    [("1f1b", 2, False), ("interleaved_1f1b", 4, False), ("zb_h1", 2, True), ("fill_drain", 2, True)],
)
def test_deferred_batch_norms_count_the_micro_batches_of_all_replicas(cluster, schedule, parts, out_of_order):
    states = []
    for replicas in (1, 2):
        torch.manual_seed(7)
        driver = PipelineDriver(
            with_norms(parts), cluster, schedule=schedule, replicas=replicas, out_of_order=out_of_order
        )
        for _ in range(3):
            driver.run(5, *batch(13))
            driver.zero_grad()
        driver.eval()
        driver.run(5, *batch(13))
        if replicas == 2:
            check_replicas_are_equal(driver)
        states.append(driver.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_notes_of_a_step_are_one_message_for_each_twin(threads):
    """Each worker has two norms, in two stages. A step that counts none sends none."""
    pipe = with_norms(4)
    driver = PipelineDriver(pipe, threads, schedule="interleaved_1f1b", replicas=2)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    norms = [each for each in pipe.modules() if isinstance(each, DeferredBatchNorm)]
    sent = {}
    for counts in (True, False):
        for norm in norms:
            norm.train(counts)
        *_, sent[counts] = sent_to_twins(threads, driver, optimizer, 2)
    assert [values for values, _ in sent[True]] == [values + 1 for values, _ in sent[False]]
    size = 2 * 4 * 8 * 2 * 2  # mean and variance of four channels, of two norms on two micro-batches
    assert all(size <= more - less <= size + 64 for (_, more), (_, less) in zip(sent[True], sent[False]))


def test_a_worker_that_waits_for_notes_says_so(alone):
    with local_cluster(4, threads=1) as workers:
        driver = PipelineDriver1F1B(with_norms(), workers, replicas=2)
        driver.run(4, *batch(8))
        what = "receive notes from 3; waits for notes of batch norms of step \\d+, from worker 3"
        with while_worker_1_waits(workers, driver, *batch(8), what) as running, within(5.0):
            os.kill(workers.session.workers[3].pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="worker3"):
                running.result()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1.0)
        return self.linear(x)


class Normalizing(nn.Module):
    """Has statistics that torch changes, and counts no version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.seen, training=True)[:, :2]


@pytest.mark.parametrize("kind", [Counting, Normalizing])
def test_other_buffers_that_a_step_changes_are_refused(cluster, kind):
    def driver(replicas):
        pipe = Pipe.from_sequential(nn.Sequential(kind(), nn.Linear(2, 2)), nn.MSELoss())
        return PipelineDriver1F1B(pipe, cluster, replicas=replicas)

    with pytest.raises(StepError, match=r"submod_0 changed the buffers '.*seen', so each"):
        driver(2).run(2, *batch(4))
    alone = driver(1)
    alone.run(2, *batch(4))
    assert (alone.state_dict()["0.seen"] != kind().seen).all()


def test_memory_and_recordings_have_all_replicas(cluster):
    driver = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2)
    x, target = batch(8)
    memory = driver.memory(4, x, target, optimizer=torch.optim.SGD)
    alone = PipelineDriver1F1B(cut_in_two(), cluster).memory(2, x[:4], target[:4], optimizer=torch.optim.SGD)
    pairs = zip(memory.workers, list(alone.workers) * 2, strict=True)
    assert all(each.most[: len(other.most) - 1] == other.most[:-1] for each, other in pairs)
    with driver.record(memory=True) as recording:
        driver.run(4, x, target)
    assert all(f"worker {rank}" in recording._repr_html_() for rank in range(4))
    assert "worker 0, worker 2" in recording._repr_html_()


def sent_to_twins(threads, driver, optimizer, steps):
    """For each step, how many values and bytes each worker sends to the one with its stage in the other replica."""
    x, target = batch(8)
    sent = [each.context.transport.sent for each in threads.engine.workers]
    for _ in range(steps):
        before = [{peer: (count.values, count.bytes) for peer, count in each.items()} for each in sent]
        driver.run(4, x, target)
        update(optimizer)
        found = []
        for worker, (counts, old) in enumerate(zip(sent, before)):
            twin = (worker + 2) % 4
            values, total = old.get(twin, (0, 0))
            found.append((counts[twin].values - values, counts[twin].bytes - total))
        yield found


def expected_of_twins():
    """Two messages of each worker, and in them as many bytes as its stage's parameters have."""
    return [(2, 8 * sum(p.numel() for p in part.parameters())) for part in Plain()] * 2


def test_the_gradients_of_a_stage_go_once_each_way_in_one_message_for_each_bucket(threads):
    driver = PipelineDriver1F1B(cut_in_two(), threads, replicas=2, check=False)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    for sent in sent_to_twins(threads, driver, optimizer, 3):
        assert sent == expected_of_twins(), "the gradients that the other adds up, and the sums of this one"


@pytest.mark.parametrize("out_of_order", [False, True])
def test_the_gradients_of_a_stage_leave_while_others_still_compute(threads, monkeypatch, out_of_order):
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), nn.MSELoss())
    driver = PipelineDriver(pipe, threads, schedule="interleaved_1f1b", replicas=2, out_of_order=out_of_order)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    sent = []
    for worker in threads.engine.workers:

        def send(to, key, value, worker=worker, inner=worker.context.transport.send):
            if (executor := worker.drivers[driver.number].running) and "gradients" in str(executor.current()):
                sent.append((worker.context.index, to, str(executor.current())))
            inner(to, key, value)

        monkeypatch.setattr(worker.context.transport, "send", send)
    for _ in range(2):
        sent.clear()
        driver.run(4, torch.randn(8, 4), torch.randn(8, 4))
        update(optimizer)
    # each worker has two stages, of each of which it adds up the weight or the bias
    assert sorted(sent) == [
        (w, (w + 2) % 4, f"send gradients of stage {stage} part {1 - w // 2} to {(w + 2) % 4}")
        for w in range(4)
        for stage in (w % 2, w % 2 + 2)
    ]
    for worker, order in enumerate(driver.program(4).computations):
        last = [
            max(at for at, each in enumerate(order) if each.stage == stage) for stage in (worker % 2, worker % 2 + 2)
        ]
        assert last[1] < last[0], "the later stage is over while the earlier one still computes"


class FailsInBackward(torch.autograd.Function):
    """The identity; its backward fails if what came was below -9."""

    @staticmethod
    def forward(ctx, x):
        ctx.fails = bool((x < -9).any())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("too low")
        return gradient


class Failing(nn.Linear):
    def forward(self, x):
        return super().forward(FailsInBackward.apply(x))


def test_a_step_that_fails_when_gradients_have_left_leaves_those_of_before(cluster):
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 4), Failing(4, 4), *(nn.Linear(4, 4) for _ in range(2)))
    driver = PipelineDriver(
        Pipe.from_sequential(copy.deepcopy(plain), nn.MSELoss()), cluster, schedule="interleaved_1f1b", replicas=2
    )
    optimizer, (x, y) = driver.instantiate_optimizer(torch.optim.SGD, lr=0.0), torch.randn(2, 8, 4)
    for _ in range(2):  # the next two calls make an update, too
        driver.run(4, x, y)
    update(optimizer)
    driver.run(4, x, y)
    with pytest.raises(StepError, match="too low"):
        driver.run(4, 1e3 * x, y)
    driver.run(4, x + 1, y)
    for each in (x, x + 1):
        nn.functional.mse_loss(plain(each), y).backward()
    assert_gradients(driver, plain, rtol=1e-12, atol=1e-12)


def test_a_gradient_scaler_skips_on_all_replicas(cluster):
    driver = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2, check=False)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    scaler = driver.instantiate_grad_scaler(init_scale=4.0)
    x, target = batch(8)
    before = driver.state_dict()
    for bad in (True, False):
        driver.run(4, x, target.index_fill(0, torch.tensor([7]), torch.inf) if bad else target)  # of the second replica
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = driver.state_dict()
        assert all(torch.equal(before[name], now[name]) for name in now) == bad
        check_replicas_are_equal(driver)


def test_checkpoints_are_those_of_one_pipeline(cluster, tmp_path):
    x, target = batch(8)
    one, two = (PipelineDriver1F1B(cut_in_two(), cluster, replicas=replicas) for replicas in (1, 2))
    optimizers = [each.instantiate_optimizer(torch.optim.AdamW, lr=0.1) for each in (one, two)]
    for driver, optimizer in zip((one, two), optimizers):
        for _ in range(2):
            driver.run(4, x, target)
            update(optimizer)
    path = two.save(tmp_path, optimizer=optimizers[1], step=1)
    alone = one.save(tmp_path / "one", optimizer=optimizers[0], step=1)
    sizes = [sorted(each.stat().st_size for each in Path(folder).glob("*.safetensors")) for folder in (path, alone)]
    assert sizes[0] == sizes[1], "each parameter and state is written once"
    with torch.no_grad():
        two.load_state_dict({name: torch.zeros_like(value) for name, value in two.state_dict().items()})
    check_replicas_are_equal(two)
    for driver, optimizer in zip((one, two), optimizers):
        driver.load(path, optimizer=optimizer)
        for _ in range(2):
            driver.run(4, x, target)
            update(optimizer)
    check_replicas_are_equal(two)
    check_state(two, one)
    for name, state in optimizers[0].state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(optimizers[1].state_dict()["state"][name][key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_several_stages_on_each_worker(cluster, schedule):
    x, target = batch(9)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    pipe = Pipe.from_sequential(copy.deepcopy(plain), nn.MSELoss())
    driver = PipelineDriver(pipe, cluster, schedule=schedule, replicas=2, checkpoint="except_last")
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, divide_state=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        assert_loss(driver.run(5, x, target), nn.functional.mse_loss(plain(x), target), rtol=1e-12, atol=1e-12)
        update(optimizer, theirs)
    check_state(driver, plain)
    check_replicas_are_equal(driver)


@pytest.mark.parametrize("out_of_order", [True, 3])
def test_workers_that_take_their_instructions_out_of_order(cluster, out_of_order):
    x, target = batch(8)
    driver = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2, out_of_order=out_of_order)
    assert_loss(driver.run(4, x, target), nn.functional.mse_loss((plain := Plain())(x), target), rtol=1e-12, atol=1e-12)
    assert_gradients(driver, plain, rtol=1e-12, atol=1e-12)


@contextmanager
def while_worker_1_waits(workers, driver, x, target, what):
    """A step in which worker 1 waits for worker 3, which has stopped, and says for ``what``."""
    stop(workers.session.workers[3].pid)
    running, end = driver.run_async(4, x, target), time.monotonic() + 60
    while not re.search(f"worker 1 .* {what}", said := workers.dump(0.3)):
        assert time.monotonic() < end, said
    yield running
