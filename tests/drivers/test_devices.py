"""Stages on devices that compute beside the host: GPUs, where there are some, and simulated ones."""

import copy
import inspect
import pickle
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import torch
from torch import nn
from torch.multiprocessing import reductions
from torch.nn import functional as F

from exps.tried_models.residual_streams import AttentionResiduals
from pippy import (
    MultiUseParameterConfig,
    Pipe,
    PipelineDriver,
    PipelineDriver1F1B,
    convert_deferred_batch_norm,
    local_cluster,
    pipe_split,
    pipeline,
)
from pippy.drivers.plan import make_schedule
from pippy.drivers.wire.gpu import copies as accelerator_module
from pippy.drivers.wire.gpu.copies import Accelerator, NotShared, Shared
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.worker.executor import Executor
from pippy.errors import StepError
from tests.comparisons import Beside, update
from tests.drivers.models import TiedLanguage, cross_entropy, tokens
from tests.drivers.processes import close_open_cluster
from tests.drivers.simulated_device import SimulatedDevice
from tests.drivers.thread_cluster import thread_cluster

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def gpus():
    """Two workers on the first GPU, one on the last, one without."""
    close_open_cluster()
    last = f"cuda:{torch.cuda.device_count() - 1}"
    return local_cluster(4, devices=["cuda:0", "cuda:0", last, "cpu"])


@pytest.fixture
def simulated():
    """Three simulated devices."""
    return [SimulatedDevice() for _ in range(3)]


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=needs_gpu)])
def devices(request, simulated):
    """Three workers that compute on devices, and one that does not."""
    with ExitStack() as opened:
        yield opened.enter_context(gpus() if request.param == "cuda" else thread_cluster(4, [*simulated, None]))
    assert {fault for device in simulated for fault in device.faults} == set()


@pytest.fixture
def three(simulated):
    """A cluster of three workers, each on a simulated device; at the end none of these was misused."""
    with thread_cluster(3, simulated) as cluster:
        yield cluster
    assert [device.faults for device in simulated] == [[]] * 3


@pytest.mark.parametrize("options", [{}, {"out_of_order": True}])
def test_a_device_hands_values_on(devices, options):
    """Worker 1, as if it were on another host with workers 2 and 3, hands on what worker 0 has made."""
    torch.manual_seed(0)
    program = replace(make_schedule("1f1b", workers=4, chunks=3), hosts=(0, 1, 1, 1))
    both = Beside(devices, AttentionResiduals(4).double(), schedule=program, check=False, **options)
    for _ in range(2):
        both.zero_grad()
        both.step(3, torch.randn(6, 8).double(), torch.randn(6, 8).double())
    orders = [list(map(str, order)) for order in both.driver.program(3).orders]
    assert "send tanh.0 to 3" in orders[1] and "send tanh.0 to 2" in orders[1] and "send tanh.0 to 2" not in orders[0]


@pytest.mark.parametrize(("schedule", "options"), [("1f1b", {}), ("zb_h1", {}), ("1f1b", {"out_of_order": True})])
@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_training_is_that_of_the_plain_model(devices, config, schedule, options):
    torch.manual_seed(0)
    model, pipe = TiedLanguage().double(), {"multi_use_param_spec": config}
    both = Beside(devices, model, cross_entropy, pipe=pipe, schedule=schedule, **options)
    both.optimize(torch.optim.AdamW, lr=1e-2)
    for _ in range(3):
        both.run(3, *tokens(), rtol=1e-9, atol=0)
        norm = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.5)
        torch.testing.assert_close(both.driver.clip_grad_norm_(0.5), norm)
        both.update()
    both.same_state(rtol=1e-8, atol=1e-11)


@needs_gpu
@pytest.mark.parametrize("second", ["cuda:0", "cuda:1"])
def test_values_that_stay_on_gpus_are_those_that_go_by_the_host(second):
    if second == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    close_open_cluster()
    with local_cluster(2, devices=["cuda:0", second]) as cluster:
        driver = chained(cluster, schedule="interleaved_1f1b").driver
        losses = [driver.run(4, *GIVEN) for _ in range(5)]
        print(cluster.routes)
        assert losses == losses[:1] * 5, "the first two went by the host"


@needs_gpu
def test_inputs_may_be_on_a_gpu():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with gpus() as cluster:
        driver = PipelineDriver1F1B(Pipe.from_sequential(model), cluster)
        x = torch.randn(4, 8)
        torch.testing.assert_close(driver.run(2, x.cuda()).cpu(), model(x), rtol=1e-4, atol=1e-5)
        driver.close()


@contextmanager
def started_only(monkeypatch):
    """Inside, a worker that waits for its device between the first and the last instruction of a step is a fault."""
    inner = Executor._go_through

    def go_through(executor, *given):
        with executor.copies.accelerator.forbidding_waits() if executor.copies else nullcontext():
            inner(executor, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "_go_through", go_through)
        yield


def mean_square(output, target):
    return F.mse_loss(output, target)


class Chained(nn.Module):
    """Stages whose outputs are changed in place by what follows, on the same worker and on the next."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x).relu_() if number % 2 else layer(x)
            if number < 3:
                pipe_split()
        return x


GIVEN = torch.randn(2, 8, 4, dtype=torch.float64)


def chained(cluster, **options):
    torch.manual_seed(0)
    options = {"schedule": "1f1b", "world_size": 2} | options
    return Beside(cluster, Chained().double(), mean_square, loss_reduction="mean", **options)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "interleaved_1f1b"}])
def test_a_step_starts_its_work_and_waits_at_its_end_only(monkeypatch, simulated, three, options):
    both = chained(three, **options)
    with started_only(monkeypatch):
        loss = both.run(8, *GIVEN)
        with torch.no_grad():
            output = both.driver.run(4, *GIVEN)
    torch.testing.assert_close(output, loss)
    assert simulated[0].arrived >= 8 + 4, "inputs of the model are copied, too"


def test_replicas_tell_each_other_what_batch_norms_have_noted_and_wait_for_no_device(monkeypatch, three):
    states = []
    for replicas in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
        pipe = Pipe.from_sequential(convert_deferred_batch_norm(model), nn.MSELoss())
        options = {"replicas": replicas, "all_ranks": list(range(replicas))}
        driver = PipelineDriver(pipe, three, schedule="interleaved_1f1b", **options)
        for _ in range(2):
            with started_only(monkeypatch):
                driver.run(4, *GIVEN)
            driver.zero_grad()
        states.append(driver.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def steps_of(monkeypatch, devices, count=4):
    """The losses and gradients of so many steps, the copies of the last one, and how values went."""
    with thread_cluster(len(devices), devices) as cluster:
        driver = chained(cluster, schedule="interleaved_1f1b").driver
        losses, gradients = [], []
        for _ in range(count):
            copied = sum(device.copied for device in devices)
            with started_only(monkeypatch):
                losses.append(driver.run(4, *GIVEN))
            copied = sum(device.copied for device in devices) - copied
            gradients.append(driver.gradients(["layers.0.weight"])["layers.0.weight"])
            driver.zero_grad()
        found = losses, gradients, copied, cluster.routes, cluster._repr_html_()
    assert cluster.routes.on_devices == {}, "it is closed"
    return found


def test_values_stay_on_devices_from_the_third_step_on(monkeypatch, simulated):
    """A value is copied once on each of the two devices, and nobody waits for that inside a step."""
    losses, gradients, copied, routes, html = steps_of(monkeypatch, simulated)
    assert str(routes).splitlines()[1:] == [
        "from worker0 to worker1: memory of worker0's GPU, which worker1 maps",
        "from worker1 to worker0: memory of worker1's GPU, which worker0 maps",
    ]
    assert [routes.between(0, 1), routes.between(0, 2)] == ["GPU memory", "shared memory"]
    assert "which worker1 maps" in html
    others = [SimulatedDevice(shares=False) for _ in range(3)]
    by_host = steps_of(monkeypatch, others)
    assert "from worker1 to worker0: shared memory of the host, not of a GPU: it shares no memory" in str(by_host[3])
    assert copied == by_host[2] - 6 * 4, "through the host, a value is copied three times"
    assert losses == by_host[0] == losses[:1] * 4, "to the bit"
    for mine, theirs in zip(gradients, by_host[1]):
        assert torch.equal(mine, theirs)
    assert [device.faults for device in [*simulated, *others]] == [[]] * 6


def test_what_is_protected_is_on_the_host_and_goes_past_the_devices(simulated, three):
    driver = chained(three).driver
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    driver.run(4, *GIVEN)
    update(optimizer)
    wanted, copied = driver.state_dict(), [device.copied for device in simulated]
    driver.protect(optimizer=optimizer, step=1)
    assert [device.copied for device in simulated] == copied
    optimizer.step()
    assert driver.recover() == {"step": 1}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in driver.state_dict().items())


def test_outputs_leave_the_device_while_it_computes(monkeypatch, three):
    model, x = Chained(), torch.randn(8, 4)
    driver = PipelineDriver(pipeline(copy.deepcopy(model)), three, world_size=2)
    driver.run(4, x)  # the first step looks at an output twice
    with started_only(monkeypatch), torch.no_grad():
        torch.testing.assert_close(driver.run(4, x), model(x))


def test_a_recorded_step_notes_events_and_reads_them_at_its_end(monkeypatch, three):
    driver = chained(three).driver
    with started_only(monkeypatch), driver.record() as recording:
        driver.run(4, *GIVEN)
    (step,) = recording.steps
    for record in step.noted:
        assert record.began <= record.started <= record.ends[0]
        assert list(record.ends) == sorted(record.ends) and record.ends[-1] <= record.ended


def test_a_device_that_fails_ends_the_step_and_the_next_is_right(simulated):
    with thread_cluster(3, simulated) as cluster:
        both = chained(cluster)
        for failing in simulated[:2]:
            failing.fails = True
            with pytest.raises(StepError, match="DeviceFailed: an assertion in a kernel"):
                both.driver.run(4, *GIVEN)
            failing.fails = False
            both.zero_grad()
            both.step(4, *GIVEN)


def test_a_device_that_fails_after_the_last_instruction_ends_the_step(monkeypatch, simulated):
    """Its worker sends nothing, and would have answered that the step has succeeded."""
    inner, failing = Executor._go_through, simulated[0]
    with thread_cluster(1, simulated[:1]) as cluster:
        both = chained(cluster, schedule="interleaved_1f1b", world_size=1)

        def go_through(executor, *given):
            inner(executor, *given)
            failing.fails = True

        with monkeypatch.context() as patched:
            patched.setattr(Executor, "_go_through", go_through)
            with pytest.raises(StepError, match="DeviceFailed: an assertion in a kernel"):
                both.driver.run(4, *GIVEN)
        failing.fails = False
        both.step(1, *GIVEN)


class Second(Exception):
    pass


def test_what_a_failed_step_has_not_sent_is_not_sent(monkeypatch, simulated):
    """The copy fails when the worker has answered, and waits for its next command."""
    leaves, failing = simulated[0].copies_may_end, simulated[0]
    inner = DeviceTransport.send
    with thread_cluster(2, simulated[:2]) as cluster:
        both = chained(cluster)

        def send(transport, *given):
            inner(transport, *given)
            raise Second

        leaves.clear()
        with monkeypatch.context() as patched:
            patched.setattr(DeviceTransport, "send", send)
            with pytest.raises(StepError, match="Second"):
                both.driver.run(4, *GIVEN)
        failing.fails = True
        leaves.set()
        assert failing.has_failed.wait(10)
        failing.fails = False
        both.zero_grad()
        both.run(4, *GIVEN)


def test_what_a_driver_frees_is_given_back_to_other_workers_of_the_device(simulated, three):
    chained(three).driver.close()
    PipelineDriver(pipeline(Chained()), three)  # what is closed is dropped with the next command
    assert [device.freed_caches for device in simulated] == [1, 1, 0]


def test_names_and_arguments_are_those_of_torch_cuda(monkeypatch):
    """What can be seen without a GPU of what a GPU is asked for."""
    names = ("set_device", "Stream", "current_stream", "stream", "empty_cache", "ipc_collect")
    cuda = SimpleNamespace(**{name: create_autospec(getattr(torch.cuda, name)) for name in names}, Event=cuda_event())
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    second = torch.device("cuda:1")
    accelerator = Accelerator(second)
    accelerator.set_current()
    accelerator.free_cache()
    with accelerator.using(accelerator.new_stream()):
        accelerator.event(timed=True).record(accelerator.current_stream())
    cuda.set_device.assert_called_once_with(second)
    cuda.Stream.assert_called_once_with(second)
    cuda.current_stream.assert_called_once_with(second)
    cuda.Event.assert_called_once_with(enable_timing=True, blocking=True)
    assert [call[0] for call in (cuda.ipc_collect.call_args, cuda.empty_cache.call_args)] == [(), ()]
    here, host = torch.ones(2, device="meta"), torch.ones(2)
    assert [accelerator.is_on_host(each) for each in (here, host)] == [False, True]
    assert not accelerator.is_here(here) and not accelerator.is_here(host)


def cuda_event():
    """A stand-in for torch.cuda.Event, which takes what that takes."""
    takes = inspect.signature(torch.cuda.Event.__new__).bind_partial
    event = Mock(
        side_effect=lambda **given: (
            takes(torch.cuda.Event, **given) and create_autospec(torch.cuda.Event, instance=True)
        )
    )
    event.from_ipc_handle = create_autospec(torch.cuda.Event.from_ipc_handle)
    return event


def test_tensors_are_shared_as_torch_multiprocessing_does(monkeypatch):
    """What torch gives for one process is what it takes in the other: all but the device. The event is opened here."""
    current = Mock()
    cuda = SimpleNamespace(Event=cuda_event(), current_stream=lambda device: current)
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[6:] == [
        "storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad",
        "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip
    accelerator = Accelerator(torch.device("cuda:1"))
    what = (torch.Tensor, torch.Size([2]), (1,), 0, torch.storage.TypedStorage, torch.float32)
    given = (*what, 0, b"handle", 8, 512, False, b"counter", 3, b"event", True)
    monkeypatch.setattr(accelerator_module, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, given))
    rebuild = create_autospec(reductions.rebuild_cuda_tensor)
    monkeypatch.setattr(accelerator_module, "rebuild_cuda_tensor", rebuild)
    released = []
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *given: released.append(given))
    shared = pickle.loads(pickle.dumps(accelerator.share(torch.ones(2))))
    assert accelerator.open(shared) is rebuild.return_value
    rebuild.assert_called_once_with(*what, 1, *given[7:13], b"event", False)
    cuda.Event.from_ipc_handle.assert_called_once_with(torch.device("cuda:1"), b"event")
    current.wait_event.assert_called_once_with(cuda.Event.from_ipc_handle.return_value)
    accelerator.open(Shared((*given[:-1], False)))
    current.wait_event.assert_called_once()
    accelerator.let_go(shared)
    accelerator.let_go(Shared((*given[:7], None, *given[8:])))  # of a tensor without elements
    assert released == [(b"counter", 3)]
    rebuild.side_effect = RuntimeError("CUDA error: peer access is not supported\nwhat may help")
    with pytest.raises(NotShared, match=r"^CUDA error: peer access is not supported$"):
        accelerator.open(shared)


@pytest.mark.parametrize(("kind", "hip", "said"), [("xpu", None, "'xpu'"), ("cuda", "6.4", "AMD")])
def test_other_devices_share_nothing(monkeypatch, kind, hip, said):
    monkeypatch.setattr(torch, "get_device_module", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", hip)
    other = Accelerator(torch.device(f"{kind}:0"))
    with pytest.raises(NotShared, match=said):
        other.share(torch.ones(2))
