"""Sums over copies are the same on all workers, and do not depend on buckets or on who adds up."""

import threading
from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.placement import placed_pipe as buckets_module
from pippy.drivers.placement.placed_pipe import gradient_buckets
from pippy.drivers.protocol.state import ReplicatedParameter, TensorLocation
from pippy.drivers.wire.worker_transport import in_process
from pippy.drivers.worker.gradients.gradient_sums import AddingUp, GradientSums
from pippy.ir.run.stage_backward import add_gradients


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
        places = [TensorLocation(f"submod_{copy}", f"p{number}") for copy in range(len(workers))]
        parameters.append(ReplicatedParameter(f"p{number}", tuple(zip(workers, places))))
        for copy, place in enumerate(places):
            made = torch.randn(sizes[number], generator=generator)
            gradients[place] = None if (number, copy) in without else made
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
