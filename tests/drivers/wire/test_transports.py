"""What every transport promises, and the ways to have it: through shared memory, by messages that others carry, and both."""

import dataclasses
import math
import os
import socket
import threading
from collections import OrderedDict, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.pickling import pickle_by_value, pickle_message, unpickle
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.wire.transport import SentCount
from pippy.drivers.wire.worker_transport import WorkerTransport, in_process
from pippy.ir.base.trees import form_and_parts, nbytes
from tests.drivers.simulated_device import SimulatedDevice

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    hidden: Any
    cache: Any = None


def shared_memory(count, **options):
    pairs = {(i, j): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for i in range(count) for j in range(i)}
    ends = [{} for _ in range(count)]
    for (i, j), (first, second) in pairs.items():
        ends[i][j], ends[j][i] = first, second
    return [WorkerTransport(index, peers, **options) for index, peers in enumerate(ends)]


def carried(make, count):
    """Transports whose messages another thread carries, as RPC's threads do."""
    carrier = ThreadPoolExecutor(1)
    transports = []

    def post(to, key, value):
        carrier.submit(lambda: transports[to].deliver(key, value))

    transports.extend(make(index, post) for index in range(count))
    transports[0].received.carrier = carrier
    return transports


def far(count):
    """Nobody shares memory."""
    return carried(lambda index, post: WorkerTransport(index, far=range(count), post=post), count)


def tcp(count):
    """Nobody shares memory, and values go by connections."""
    transports = [WorkerTransport(index, far=range(count)) for index in range(count)]
    for one, other in combinations(transports, 2):
        ends = socket.socketpair()
        one.add_far(other.index, ends[0])
        other.add_far(one.index, ends[1])
    return transports


def mixed(count):
    """The first worker shares no memory with the others, which share it."""
    pairs = {
        (i, j): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for i in range(1, count) for j in range(1, i)
    }

    def make(index, post):
        ends = {i + j - index: pair[index == i] for (i, j), pair in pairs.items() if index in (i, j)}
        return WorkerTransport(index, ends, far=range(1, count) if index == 0 else [0], post=post)

    return carried(make, count)


def patient(count):
    """Looks for its values for longer than any of these tests takes."""
    return shared_memory(count, patience=1.0)


class SendsAtOnce(DeviceTransport):
    """Here one thread has all transports: nobody would wait in the sender's and send what has been copied."""

    def send(self, to, key, value):
        super().send(to, key, value)
        self.finish()


def of_devices(count):
    """Copies values from a device to the host and back."""
    devices = [SimulatedDevice() for _ in range(count)]
    for device in devices:
        device.set_current()
    return [SendsAtOnce(each, DeviceCopies(device)) for each, device in zip(shared_memory(count), devices)]


KINDS = {
    "shared_memory": shared_memory,
    "patient": patient,
    "in_process": in_process,
    "of_devices": of_devices,
    "far": far,
    "tcp": tcp,
    "mixed": mixed,
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def three(kind):
    transports = kind(3)
    yield transports
    close(transports)


def close(transports):
    carrier = getattr(transports[0].received, "carrier", None)
    if carrier is not None:
        carrier.shutdown()
    for transport in transports:
        transport.close()


def same(left, right):
    """Equal to the bit, and alike in all that travels."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
        assert torch.equal(bits(left), bits(right))
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            same(one, other)
    elif isinstance(left, dict):
        assert [*map(repr, left)] == [*map(repr, right)]
        same([*left.values()], [*right.values()])
    elif dataclasses.is_dataclass(left):
        same(vars(left), vars(right))
    else:
        assert repr(left) == repr(right)
    return right


def bits(tensor):
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).flatten()
    return plain.view(torch.uint8)


FRACTIONS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPES = [*FRACTIONS, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.arange(math.prod(shape)).reshape(shape) * 3 + draw(st.integers(0, 9))).to(dtype)
    how = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded", "conj", "neg", "grad"]))
    if how == "permuted":
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if how == "sliced" and shape:
        tensor = tensor[..., ::2]
    if how == "expanded":
        tensor = tensor.expand(2, *shape)
    if how == "conj" and dtype.is_complex:
        tensor = tensor.conj()
    if how == "neg" and dtype.is_complex:
        tensor = tensor.conj().imag
    if how == "grad" and dtype in FRACTIONS:
        tensor = tensor.requires_grad_()
    return tensor


NUMBERS = [True, False, 1, 0, 1.0, -0.0, 0.0, float("nan"), 2**70, 1j]
CONSTANTS = [None, *NUMBERS, "a", b"b", range(3), torch.float32, torch.finfo(torch.bfloat16), torch.iinfo(torch.int8)]
TREES = st.recursive(
    st.one_of(tensors(), st.sampled_from(CONSTANTS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", 1, "b"]), inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", True, 2.0]), inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(lambda items: defaultdict(list, items)),
        st.builds(Point, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", KINDS)
def test_any_value_arrives_as_it_was(name):
    transports = KINDS[name](2)
    counter = iter(range(1_000_000))

    @settings(max_examples=50)
    @given(st.lists(TREES, min_size=1, max_size=4))
    def check(values):
        keys = [(0, next(counter), 0) for _ in values]
        for key, value in zip(keys, values):
            transports[0].send(1, key, value)
        for key, value in reversed([*zip(keys, values)]):
            same(value, transports[1].receive(key, 0))

    try:
        check()
    finally:
        close(transports)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(300, 5, 7).permute(2, 0, 1),
        torch.randn(4, 1, 3).as_strided((4, 1, 3), (3, 99, 1)),
    ],
)
def test_strides_of_dense_tensors_are_kept(three, tensor):
    three[0].send(1, (0, 0, 0), tensor)
    assert same(tensor, three[1].receive((0, 0, 0), 0)).stride() == tensor.stride()


@pytest.mark.parametrize("tensor", [torch.randn(5).expand(700, 5), torch.randn(9, 9)[:, ::2], torch.randn(5)[1::2]])
def test_other_tensors_arrive_contiguous(three, tensor):
    three[0].send(1, (0, 0, 0), tensor)
    arrived = same(tensor, three[1].receive((0, 0, 0), 0))
    assert arrived.is_contiguous() and arrived.untyped_storage().nbytes() == arrived.numel() * 4


def test_torch_pickles_tensors_that_are_more_than_bytes(three):
    quantized = torch.quantize_per_tensor(torch.eye(3), 0.5, 0, torch.qint8)
    three[0].send(1, (0, 0, 0), [quantized, torch.ones(2)])
    arrived, ones = three[1].receive((0, 0, 0), 0)
    assert torch.equal(arrived.dequantize(), torch.eye(3)) and torch.equal(ones, torch.ones(2))


UNCOALESCED = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 2.0]] * 3), (4, 2))
SPARSE = {
    "uncoalesced": UNCOALESCED,
    "coalesced": UNCOALESCED.coalesce(),
    "large": torch.eye(700).to_sparse(),
    "requires a gradient": torch.eye(3, dtype=torch.bfloat16).to_sparse().requires_grad_(),
    "made from one that does": (torch.eye(3, requires_grad=True) * 2).to_sparse(),
    "nothing stored": torch.zeros(2, 3).to_sparse(),
    "csr": torch.eye(4).to_sparse_csr(),
    "csc": torch.eye(4).to_sparse_csc().requires_grad_(),
    "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_arrive_as_they_were(three, name):
    sparse, payload = SPARSE[name], nbytes(SPARSE[name])
    for microbatch in range(2):
        three[0].send(1, (0, 0, microbatch), {"a": [sparse, 7], "b": torch.ones(2)})
        arrived = three[1].receive((0, 0, microbatch), 0)
        assert same_sparse(sparse, arrived["a"][0]) and arrived["a"][1] == 7 and arrived["b"].sum() == 2
    assert three[0].sent[1].bytes == 2 * (payload + 8)
    assert same_sparse(sparse, unpickle(pickle_message([sparse]))[0])
    assert same_sparse(sparse, unpickle(pickle_by_value([sparse]))[0])
    assert all(tensor.layout is torch.strided for tensor in pickle_message([sparse]).tensors)
    assert not torch._utils._sparse_tensors_to_validate  # torch's unpickling would keep them


def same_sparse(left, right):
    assert type(right) is torch.Tensor and right.is_leaf
    form, parts = form_and_parts(left)
    assert form == form_and_parts(right)[0]
    return [same(*pair) for pair in zip(parts, form_and_parts(right)[1], strict=True)]


@pytest.mark.parametrize(("sender", "size"), [(0, 3), (0, 100_000), (1, 3)])
def test_what_arrives_is_nobodys_else(three, sender, size):
    tensor, rest = torch.ones(size), {"x"}
    for microbatch in range(2):
        three[sender].send(1, (0, 0, microbatch), (tensor, rest))
    tensor.zero_()
    rest.clear()
    first, rest_of_first = three[1].receive((0, 0, 0), sender)
    first.mul_(7)
    second, _ = three[1].receive((0, 0, 1), sender)
    assert torch.equal(first, torch.full((size,), 7.0)) and torch.equal(second, torch.ones(size))
    assert rest_of_first == {"x"}


def test_what_arrives_is_a_leaf_that_may_be_changed_and_differentiated(three):
    three[0].send(1, (0, 0, 0), torch.ones(3, requires_grad=True) * 2)
    arrived = three[1].receive((0, 0, 0), 0)
    assert arrived.is_leaf and arrived.requires_grad and arrived._base is None
    arrived.detach_().requires_grad_()
    (arrived.clone().relu_() * 3).sum().backward()
    assert torch.equal(arrived.grad, torch.full((3,), 3.0))


def test_dataclass_with_more_than_its_fields(three):
    for extra in ("one", "two"):
        value = Output(torch.ones(1))
        value.extra = extra
        three[0].send(1, (0, 0, 0), value)
        assert three[1].receive((0, 0, 0), 0).extra == extra


def test_classes_of_a_script_travel_by_value(three):
    class Local:
        number = 5

    three[0].send(1, (0, 0, 0), Local())
    assert three[1].receive((0, 0, 0), 0).number == 5


def test_values_are_taken_in_any_order_and_from_any_peer(three):
    keys = [(0, number, microbatch) for number in range(4) for microbatch in range(4)]
    for number, key in enumerate(keys):
        three[number % 2].send(2, key, torch.tensor(number))
    for number, key in reversed([*enumerate(keys)]):
        assert three[2].receive(key, number % 2).item() == number


def test_one_way_does_not_wait_for_the_other():
    """A worker that has much on its way to one peer reaches the other; a lost far peer is no matter of a near one."""
    transports = mixed(3)
    for number in range(300):
        transports[1].send(2, (0, number, 0), torch.full((40_000,), number))
    transports[1].send(0, (0, 0, 1), torch.ones(3))
    assert transports[0].receive((0, 0, 1), 1).sum() == 3
    transports[2].mark_lost(0)
    with pytest.raises(PeerLost):
        transports[2].receive((0, 0, 2), 0)
    transports[2].send(0, (0, 0, 3), "dropped")
    flushing, flushed = os.pipe()
    serving = threading.Thread(target=transports[1].wait_for, args=(flushing,), daemon=True)
    serving.start()
    for number in range(300):
        assert transports[2].receive((0, number, 0), 1)[0] == number
    os.write(flushed, b"x")
    serving.join(60)
    close(transports)
    assert transports[2].sent[0].values == 1 and (0, 0, 3) not in transports[0].received.values
    for fd in (flushing, flushed):
        os.close(fd)


def test_a_near_peer_that_dies_is_noticed_at_once_and_a_far_one_goes_on():
    transports = mixed(3)
    receiving = Receiving(transports[1], (0, 0, 0), source=2)
    transports[2].close()
    assert receiving.result().peer == 2
    transports[1].send(0, (0, 1, 0), torch.ones(2))
    assert transports[0].receive((0, 1, 0), 1).sum() == 2
    close(transports)


def test_counts_are_those_of_the_tensors(three):
    three[0].send(1, (0, 0, 0), (torch.ones(3), "text", None, torch.ones(2, 2, dtype=torch.float64)))
    three[0].send(2, (0, 0, 0), torch.ones(100).expand(50, 100))
    three[0].send(2, (0, 0, 1), None)
    assert three[0].sent[1] == SentCount(1, 12 + 32) and three[0].sent[2] == SentCount(2, 20_000)


def wait_until_waiting(transport, thread):
    """The receive has said what it waits for; from there to its sleep nothing can be lost."""
    while transport.waiting_for() is None:
        assert thread.is_alive()
        os.sched_yield()


class Receiving:
    """A receive in a thread of its own."""

    def __init__(self, transport, key, source=0):
        self.transport, self.outcome = transport, None
        self.thread = threading.Thread(target=self.run, args=(key, source), daemon=True)
        self.thread.start()
        wait_until_waiting(transport, self.thread)

    def run(self, key, source):
        try:
            self.outcome = self.transport.receive(key, source)
        except Exception as error:
            self.outcome = error

    def result(self):
        self.thread.join(60)
        assert not self.thread.is_alive(), "the receive hangs"
        return self.outcome


def test_a_receive_that_waits_gets_its_value(three):
    receiving = Receiving(three[1], (7, 3, 2))
    assert three[1].waiting_for() == (7, 3, 2)
    three[0].send(1, (7, 3, 1), "another")
    three[0].send(1, (7, 3, 2), "this")
    assert receiving.result() == "this" and three[1].waiting_for() is None
    assert three[1].ready((7, 3, 1))


def test_an_interrupt_ends_the_receive_that_waits_and_those_that_follow(three):
    receiving = Receiving(three[1], (0, 0, 0))
    three[1].interrupt()
    assert isinstance(receiving.result(), Interrupted) and three[1].waiting_for() is None
    three[0].send(1, (0, 0, 0), 1)
    for here_or_not in range(2):
        with pytest.raises(Interrupted, match="step 0"):
            three[1].receive((0, 0, here_or_not), 0)
    three[1].clear_interrupt()
    assert three[1].receive((0, 0, 0), 0) == 1


def test_an_abandoned_step_is_forgotten(three):
    three[0].send(1, (1, 0, 0), "old, arrived")
    while not three[1].ready((1, 0, 0)):
        os.sched_yield()
    three[1].discard_before(2)
    assert not three[1].ready((1, 0, 0))
    three[0].send(1, (1, 0, 1), torch.ones(70_000))
    three[0].send(1, (2, 0, 0), torch.ones(2))
    assert three[1].receive((2, 0, 0), 0).sum() == 2
    assert not three[1].ready((1, 0, 1)) and not three[1].received.values
    with pytest.raises(Interrupted):
        three[1].receive((1, 0, 1), 0)


def test_a_value_that_came_another_way(three):
    receiving = Receiving(three[1], (0, 0, 0), source=77)
    three[1].deliver((0, 0, 0), "from the controller")
    assert receiving.result() == "from the controller"


def test_a_lost_peer_ends_the_receive_but_what_had_arrived_counts(three):
    three[0].send(1, (0, 0, 0), "before")
    assert three[1].receive((0, 0, 0), 0) == "before"
    receiving = Receiving(three[1], (0, 9, 1))
    three[1].mark_lost(0)
    error = receiving.result()
    assert isinstance(error, PeerLost) and error.peer == 0
    assert "value 9 of micro-batch 1 of step 0" in str(error)


def test_waiting_for_a_file_serves_the_traffic(three):
    reading, writing = os.pipe()
    waiting = threading.Thread(target=three[1].wait_for, args=(reading,), daemon=True)
    waiting.start()
    for number in range(2000):  # more than a socket holds: this can only arrive if it is taken in
        three[0].send(1, (0, number, 0), number)
    three[0].send(1, (0, 2000, 0), torch.ones(100_000))
    flushing, flushed = os.pipe()
    serving = threading.Thread(target=three[0].wait_for, args=(flushing,), daemon=True)
    serving.start()
    while (0, 2000, 0) not in three[1].received.values:
        os.sched_yield()
    os.write(writing, b"x")
    os.write(flushed, b"x")
    for thread in (waiting, serving):
        thread.join(5)
        assert not thread.is_alive()
    assert [three[1].receive((0, number, 0), 0) for number in range(2000)] == [*range(2000)]
    assert three[1].receive((0, 2000, 0), 0).sum() == 100_000
    for fd in (reading, writing, flushing, flushed):
        os.close(fd)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_cannot_be_read_is_the_affair_of_who_takes_it(three, size):
    class Unreadable:
        def __reduce__(self):
            return int, ("no number",)

        def __deepcopy__(self, memo):
            return self

    three[0].send(1, (0, 0, 0), (Unreadable(), torch.ones(size)))
    three[0].send(1, (0, 0, 1), torch.ones(size))
    assert three[1].receive((0, 0, 1), 0).sum() == size
    if any(0 in getattr(three[1], each, ()) for each in ("connections", "far_connections")):
        with pytest.raises(ValueError, match="no number"):
            three[1].receive((0, 0, 0), 0)


def test_closing_twice(kind):
    transports = kind(2)
    close(transports)
    close(transports)
    transports[0].interrupt()


WANTED = [((0, 0, 0), 0), ((0, 1, 0), 2)]


def test_waiting_for_any_of_several_values_or_until_the_time_is_up(three):
    three[1].wait_any(WANTED, seconds=0.01)
    assert not three[1].ready((0, 0, 0))
    three[2].send(1, (0, 1, 0), torch.ones(2))
    three[1].wait_any(WANTED)
    assert three[1].ready((0, 1, 0)) and not three[1].ready((0, 0, 0)) and three[1].waiting_for() is None
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(three[1].wait_any, WANTED[:1])
        three[0].send(1, (0, 0, 0), torch.zeros(2))
        waits.result(10)
    assert three[1].ready((0, 0, 0))


def test_waiting_for_any_is_interrupted_and_does_not_wait_for_the_lost(three):
    """One of the sources is gone: the step cannot end well, whatever else comes."""
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(three[1].wait_any, WANTED)
        three[1].interrupt()
        with pytest.raises(Interrupted):
            waits.result(10)
        assert three[1].waiting_for() is None
        three[1].clear_interrupt()
        waits = pool.submit(three[1].wait_any, WANTED)
        three[1].mark_lost(2)
        with pytest.raises(PeerLost) as caught:
            waits.result(10)
    assert caught.value.peer == 2
