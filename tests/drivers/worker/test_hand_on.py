"""Values and gradients handed on between workers, and added up."""

import copy
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from exps.tried_models.residual_streams import AttentionResiduals
from pippy import MicroBatches, PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.lowering.lower import lower
from pippy.drivers.placement import placed_pipe as buckets_module
from pippy.drivers.placement.placed_pipe import gradient_buckets
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.language.instructions import Receive, parse_instruction
from pippy.drivers.protocol.state import ReplicatedParameter, TensorLocation
from pippy.drivers.report import tables
from pippy.drivers.wire.worker_transport import in_process
from pippy.drivers.worker.gradients.gradient_sums import AddingUp, GradientSums
from pippy.ir.run.stage_backward import add_gradients
from tests.drivers.lowering.test_transfers import handed_on
from tests.drivers.thread_cluster import as_on_hosts, thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


@contextmanager
def driver_on(cluster, hosts, pipe, **options):
    """A driver on workers of these hosts, whose first step is not compared with the plain model."""
    with as_on_hosts(cluster, hosts):
        driver = PipelineDriver(pipe, cluster, **{"schedule": "1f1b", "check": False, **options})
        yield driver
        driver.close()


class Keeping(fx.Tracer):
    """Does not look into some modules."""

    def is_leaf_module(self, module, path):
        return isinstance(module, (Changes, Fails)) or super().is_leaf_module(module, path)


DRIVERS = [  # the hosts, the schedule, the stages of each worker, and what else
    ("a a b b", "interleaved_1f1b", 2, {}),
    ("a b a b", "looped_bfs", 2, {"checkpoint": "always"}),
    ("a a b b", "zb_v", 2, {}),
    ("a b b b", "v_min", 2, {}),
    ("a a b b", "zb_h1", 1, {}),
    ("a b c d", "dualpipe_v", 2, {"checkpoint": "except_last"}),
    ("a a b b", "interleaved_1f1b", 2, {"out_of_order": True}),
    ("a b b b", "1f1b", 1, {"out_of_order": 8}),
    ("a b a b", "interleaved_1f1b", 2, {"replicas": 2}),
    ("a b b b", "looped_bfs", 2, {"single_loss": True}),
    ("a b b b", "1f1b", 1, {"compile": "graphs"}),
]


def trained(cluster, hosts, model, schedule, **options):
    """The loss and the gradients of a step, what evaluation gives, and the programs of both."""
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(15, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), example_args=(x, target))
    with driver_on(cluster, hosts, pipe, schedule=schedule, **options) as driver:
        loss = driver.run(4, x, target)
        found = {"loss": loss, **driver.gradients()}
        programs = [driver.program(4)]
        with torch.no_grad():
            found["evaluated"] = driver.run(4, x, target)
            programs.append(driver.program(4))
    return found, programs


@pytest.mark.parametrize(("hosts", "schedule", "per_worker", "options"), DRIVERS)
def test_a_step_has_the_bits_of_one_host(threads, hosts, schedule, per_worker, options):
    stages = per_worker * 4 // options.get("replicas", 1)
    model = AttentionResiduals(stages, layers=2)
    here, (plain, _) = trained(threads, "a a a a", model, schedule, **options)
    there, programs = trained(threads, hosts, model, schedule, **options)
    assert plain.hosts is None and not handed_on(plain)
    assert all(program.hosts is not None for program in programs)
    # With gradients, hosts of one worker have as much to send as with values handed on; the replicas have one reader on a host.
    expected = [options.get("replicas", 1) == 1 and hosts != "a b c d", options.get("replicas", 1) == 1]
    assert [bool(handed_on(program)) for program in programs] == expected
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert value is there[name] or torch.equal(value, there[name]), name


def test_unequal_micro_batches_that_are_given(threads):
    model = AttentionResiduals(4)
    x, target = torch.randn(7, 8), torch.randn(7, 8)
    losses = []
    for hosts in ("a a a a", "a a b b"):
        with driver_on(threads, hosts, pipeline(copy.deepcopy(model), nn.MSELoss())) as driver:
            losses.append(driver.run(3, MicroBatches(x.split([4, 1, 2])), MicroBatches(target.split([4, 1, 2]))))
            assert bool(handed_on(driver.program(3))) == (hosts == "a a b b")
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0], nn.functional.mse_loss(model(x), target).detach())


def test_values_that_are_no_tensors_are_handed_on(threads):
    """A tuple with a view that is not contiguous, whole numbers and None: as it came, to the strides."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            made = {"h": self.layers[0](x).view(-1, 2, 3).transpose(1, 2), "n": x.shape[0], "none": None}
            for layer in self.layers[1:]:
                pipe_split()
                x = layer(x) + made["h"].reshape(-1, 6) * made["h"].stride(1) + (0 if made["none"] is None else 1)
            return x

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(8, 6)
    with driver_on(threads, "a b b b", pipeline(model, nn.MSELoss(), example_args=(x, x))) as driver:
        loss = driver.run(1, x, x)
        assert handed_on(driver.program(1))
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(x), x).detach())


# Changes in place


class Changes(nn.Module):
    """A part that tracing does not look into, and that changes what it is given."""

    def forward(self, x):
        return x.mul_(2.0) + 1.0


class Changed(nn.Module):
    """Of the two stages that read a value, one changes it in place. Neither waits for the other."""

    def __init__(self, where):
        super().__init__()
        self.first, self.change, self.where = nn.Linear(4, 4), Changes(), where

    def forward(self, x):
        y = self.first(x)
        found = []
        for stage in (1, 2):
            pipe_split()
            found.append(self.change(y) if self.where == stage else y + 1.0)
        pipe_split()
        return found[0] * found[1]


def test_the_last_stage_that_reads_a_value_may_change_it(threads):
    """It is on the worker that gets the value first, and what that hands on is what came."""
    model, x = Changed(where=2), torch.randn(4, 4)
    pipe, placed = pipeline(model, tracer=Keeping()), {0: 0, 1: 2, 2: 1, 3: 0}
    options = {"schedule": "fill_drain", "placement": placed, "world_size": 3, "check": True}
    with torch.no_grad(), driver_on(threads, "a b b c", pipe, **options) as driver:
        assert torch.equal(driver.run(2, x), model(x))
        assert handed_on(driver.program(2)) == {("first", 1, 2)}
        order = list(map(str, driver.program(2).orders[1]))
        assert order.index("send first.0 to 2") < order.index("F2.0")


def test_another_stage_that_changes_it_is_refused_as_on_one_host(threads):
    x = torch.randn(4, 4)
    said = []
    for hosts in ("a a a a", "a b b b"):
        with driver_on(
            threads, hosts, pipeline(Changed(where=1), tracer=Keeping()), world_size=3, check=True
        ) as driver:
            with torch.no_grad(), pytest.raises(StepError, match=r"changed.* in place") as caught:
                driver.run(2, x)
            said.append(str(caught.value).splitlines()[-1])
    assert said[0] == said[1]


# Programs of other kinds


class Skip(nn.Module):
    """The last stage takes what the first and the second one give, the latter first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        pipe_split()
        z = self.second(y)
        pipe_split()
        return self.third(z) + y


def test_a_worker_out_of_order_hands_on_before_it_can_use_the_value(threads):
    """By hand: worker 1 uses the value with what worker 2 makes of it, and that worker 2 gets from worker 1."""
    pipe, x = pipeline(Skip(), nn.MSELoss()), torch.randn(6, 8)
    schedule = make_schedule("fill_drain", workers=3, chunks=3, placement={0: 0, 1: 2, 2: 1})
    program = lower(pipe, schedule).program
    orders = [[str(each) for each in order] for order in program.orders]
    for chunk in range(3):
        received, sent = f"receive first.{chunk} from 0", f"send first.{chunk} to 2"
        orders[0].remove(sent)
        orders[1].remove(received)
        at = orders[1].index(f"receive second.{chunk} from 2")
        orders[1][at:at] = [received, sent]
        orders[2][orders[2].index(received)] = f"receive first.{chunk} from 1"
    by_hand = program.with_orders(map(parse_instruction, order) for order in orders)
    losses = set()
    for each, options in ((program, {}), (by_hand, {}), (by_hand, {"out_of_order": True})):
        driver = PipelineDriver(pipe, threads, schedule=each, world_size=3, check=False, step_timeout=20.0, **options)
        losses.update(driver.run(3, x, x).item() for _ in range(3))
        driver.close()
    assert len(losses) == 1


def test_a_program_that_says_what_is_sent_stays_as_it_is(threads):
    pipe = pipeline(AttentionResiduals(4), nn.MSELoss())
    program = lower(pipe, make_schedule("1f1b", workers=4, chunks=2)).program
    with driver_on(threads, "a a b b", pipe, schedule=program) as driver:
        assert driver.program(2) == program


@pytest.mark.parametrize(("given", "hands_on"), [((0, 1, 1, 1), True), ((0, 0, 0, 0), False)])
def test_hosts_that_a_program_says_are_those_that_count(threads, given, hands_on):
    pipe = pipeline(AttentionResiduals(4), nn.MSELoss())
    program = replace(make_schedule("1f1b", workers=4, chunks=2), hosts=given)
    with driver_on(threads, "a a b b", pipe, schedule=program) as driver:
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                assert driver.program(2).hosts == given
                assert bool(handed_on(driver.program(2))) == hands_on


class Fails(nn.Module):
    """Fails when it is told to, behind what its worker hands on."""

    now = False

    def forward(self, x):
        if Fails.now:
            raise ValueError("it was told to fail")
        return x * 1.0


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fails = nn.Linear(4, 4), Fails()

    def forward(self, x):
        y = self.first(x)
        pipe_split()
        z = self.fails(y)
        pipe_split()
        return z + y


@pytest.mark.parametrize("out_of_order", [False, True])
def test_a_worker_that_fails_behind_what_it_has_handed_on(threads, monkeypatch, out_of_order):
    """What the next worker got of that step is dropped, and the next step is a good one."""
    model, x = Failing(), torch.randn(4, 4)
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), tracer=Keeping())
    with driver_on(threads, "a b b b", pipe, world_size=3, out_of_order=out_of_order) as driver:
        assert handed_on(driver.program(2)) == {("first", 1, 2)}
        for fails in (True, False, True, False):
            monkeypatch.setattr(Fails, "now", fails)
            with pytest.raises(StepError, match="it was told to fail") if fails else nullcontext():
                torch.testing.assert_close(driver.run(2, x, x), nn.functional.mse_loss(model(x), x).detach())
        assert not any(each.context.transport.received.values for each in threads.engine.workers)


def test_the_automatic_schedule_hands_on(threads):
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    pipe, losses = pipeline(AttentionResiduals(4), nn.MSELoss(), example_args=(x, target)), set()
    with driver_on(threads, "a a b b", pipe, schedule="auto") as driver:
        for _ in range(8):
            losses.add(driver.run(2, x, target).item())
            assert handed_on(driver.program(2))
        assert driver.choice is not None and len(losses) == 1


def test_recorded_values_are_those_of_the_links(threads):
    """Counted on the wires: what worker 2 sends to worker 3 are the values that came from the other host, and its own."""
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    pipe = pipeline(AttentionResiduals(4), nn.MSELoss())
    with driver_on(threads, "a a b b", pipe) as driver, driver.record() as recording:
        driver.run(2, x, target)
    links = Counter()
    for moved in recording.steps[-1].traffic():
        if "grad" not in moved.value:
            links[moved.source, moved.to] += moved.bytes
    assert links == {(0, 1): 512, (0, 2): 512, (1, 2): 512, (2, 3): 3 * 512}
    assert recording.steps[-1].between_hosts() == {(0, 1): 2 * 512, (1, 0): 4 * 512}
    assert "in all; 1.0 KiB from host 0 to host 1; 2.0 KiB from host 1 to host 0.</p>" in tables.traffic(
        recording.steps[-1]
    )
    orders = recording.steps[-1].program.orders
    assert not any(isinstance(each, Receive) and each.source < 2 for each in orders[3])


# Sums over copies are the same on all workers, and do not depend on buckets or on who adds up.


@st.composite
def cases(draw):
    """Parameters with copies on some of four workers; sizes; which copies have no gradient; and a size of buckets."""
    holders = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8))
    sizes = [draw(st.integers(1, 6)) for _ in holders]
    without = draw(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=6))
    return holders, sizes, without, draw(st.sampled_from([1, 20, 1000]))


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 2**30))
def test_every_copy_gets_the_sum_in_the_order_of_the_copies(case, seed):
    holders, sizes, without, most = case
    generator = torch.Generator().manual_seed(seed)
    parameters, gradients = [], {}
    for number, workers in enumerate(holders):
        places = [TensorLocation(f"submod_{at}", f"p{number}") for at in range(len(workers))]
        parameters.append(ReplicatedParameter(f"p{number}", tuple(zip(workers, places))))
        for at, place in enumerate(places):
            made = torch.randn(sizes[number], generator=generator)
            gradients[place] = None if (number, at) in without else made
    bytes_of = {each.name: 4 * size for each, size in zip(parameters, sizes)}
    before = {place: None if each is None else each.clone() for place, each in gradients.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "BUCKET_BYTES", most)
        buckets = [replace(each, sum=str(at)) for at, each in enumerate(gradient_buckets(parameters, bytes_of))]
    tensors = {place: torch.zeros(1) for place in gradients}
    found = summed(buckets, tensors, gradients)
    for each in parameters:
        own = [before[place] for _, place in each.copies]
        expected = reduce(add_gradients, own)
        for _, place in each.copies:
            assert (found[place] is None) == (expected is None)
            assert expected is None or torch.equal(found[place], expected)
    there = [tensor.data_ptr() for tensor in found.values() if tensor is not None]
    assert len(there) == len(set(there)), "each copy has a sum of its own"
    for place, each in gradients.items():
        assert each is None or torch.equal(each, before[place]), "what a worker gave is as it was"


def summed(buckets, tensors, gradients):
    """The sums of all copies, by place, each worker in a thread of its own."""
    transports, found = in_process(4), {}
    workers = [GradientSums(buckets, index, tensors.__getitem__) for index in range(4)]

    def work(index):
        places = {id(tensor): place for place, tensor in tensors.items()}
        adding = AddingUp(workers[index], lambda copies: [(gradients[places[key]], False) for key in copies])
        transport, held = transports[index], [(at, each) for at, each in enumerate(buckets) if index in each.workers]
        for at, each in held:
            if each.owner != index:
                (_, given), *_ = adding.leaving(each.sum)
                transport.send(each.owner, (5, at, index), given)
        for at, each in held:
            others = [worker for worker in each.workers if worker != index]
            if each.owner == index:
                for other in reversed(others):
                    adding.arrived(at, other, transport.receive((5, at, other), other), whole=at % 2 == 0)
                adding.add_up(each.sum)
                for other in others:
                    transport.send(other, (5, at, other), adding.made[at])
        for at, each in held:
            if each.owner != index:
                adding.take(at, transport.receive((5, at, index), each.owner))
        found.update({places[key]: each for key, each in adding.totals.items()})

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "workers wait for each other"
    return found


def test_the_bytes_are_shared_among_the_workers_and_buckets_are_not_too_large(monkeypatch):
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 100)
    places = [TensorLocation(f"submod_{number // 10}", f"p{number}") for number in range(30)]
    parameters = [ReplicatedParameter(each.name, tuple((worker, each) for worker in (0, 2, 5))) for each in places]
    sizes = {each.name: 10 + number for number, each in enumerate(parameters)}
    buckets = gradient_buckets(parameters, sizes)
    loads = [sum(sizes[p.name] for b in buckets if b.owner == owner for p in b.parameters) for owner in (0, 2, 5)]
    assert sum(loads) == sum(sizes.values()) and max(loads) - min(loads) <= max(sizes.values())
    assert all(sum(sizes[each.name] for each in bucket.parameters) <= 100 for bucket in buckets)
    assert sorted(p.name for b in buckets for p in b.parameters) == sorted(sizes)
    stages = [{place.call for p in bucket.parameters for _, place in p.copies} for bucket in buckets]
    assert all(len(each) == 1 for each in stages), "each leaves when the last backward of its stage is over"
