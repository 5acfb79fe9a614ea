"""The bytes that are counted are those that are measured; what a driver says of them."""

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as users_checkpoint

from pippy import (
    MultiUseParameterConfig,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.plan.language.instructions import parse_instruction
from pippy.drivers.wire.worker_transport import in_process
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.drivers.worker.measure.recorder import Recorder
from pippy.ir.base.errors import InputError
from tests.comparisons import update

STAGES = 4


class InStages(nn.Module):
    """Modules of which each is a stage; ``last`` is in the last one."""

    def __init__(self, modules, last=None):
        super().__init__()
        self.parts, self.last = nn.ModuleList(modules), last or nn.Identity()

    def forward(self, x):
        for number, part in enumerate(self.parts):
            if number:
                pipe_split()
            x = part(x)
            x = x[0] if isinstance(part, nn.LSTM) else x
        return self.last(x)


def linear(dropout):
    parts = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 32)) for _ in range(STAGES)]
    return InStages(parts), torch.randn(16, 32), torch.randn(16, 32), F.mse_loss


def convolutions(dropout):
    channels = [3, 8, 8, 8, 8]
    parts = [
        nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(), nn.Dropout(dropout))
        for one, other in pairwise(channels)
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 4))
    return InStages(parts, head), torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,)), F.cross_entropy


def attention(dropout):
    parts = [nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(STAGES)]
    parts[0] = nn.Sequential(nn.Embedding(50, 16), parts[0])
    return InStages(parts), torch.randint(0, 50, (8, 12)), torch.randn(8, 12, 16), F.smooth_l1_loss


def recurrent(dropout):
    parts = [nn.LSTM(16, 16, batch_first=True) for _ in range(STAGES)]
    return InStages(parts), torch.randn(8, 6, 16), torch.randn(8, 6, 16), F.mse_loss


def errors(driver, chunks, *args, optimizer_class=torch.optim.AdamW, **kwargs):
    """By which share the counted peak of each worker is off, in a step after an optimizer's."""
    optimizer = driver.instantiate_optimizer(optimizer_class, lr=0.01)
    for _ in range(2):  # the first step looks at more than others do
        driver.run(chunks, *args, **kwargs)
        update(optimizer)
    with driver.record(memory=True) as recording:
        driver.run(chunks, *args, **kwargs)
    counted = driver.memory(chunks, *args, **kwargs)
    driver.close()
    measured = [max(each.held[0]) for each in recording.steps[-1].noted]
    return [one / other - 1 for one, other in zip(counted.peaks, measured, strict=True)]


@pytest.mark.parametrize(
    ("model", "schedule", "checkpoint"),
    [
        (linear, "zb_h1", "never"),
        (linear, "interleaved_1f1b", "always"),
        (convolutions, "1f1b", "never"),
        (convolutions, "fill_drain", {1: "always", 2: "except_last"}),
        (attention, "1f1b", "except_last"),
        (attention, "interleaved_1f1b", "never"),
        (recurrent, "1f1b", "always"),
        (recurrent, "fill_drain", "never"),
    ],
)
def test_counted_and_measured_peaks_agree(threads, model, schedule, checkpoint):
    """Workers that are threads share their random numbers, so there is no dropout where forwards are computed again."""
    torch.manual_seed(0)
    module, x, target, loss_fn = model(0.1 if checkpoint == "never" else 0.0)
    workers = 2 if schedule == "interleaved_1f1b" else STAGES
    driver = PipelineDriver(
        pipeline(module, loss_fn), threads, schedule=schedule, world_size=workers, checkpoint=checkpoint
    )
    assert max(map(abs, errors(driver, 4, x, target))) < 0.05


class Square(torch.autograd.Function):
    """Keeps a tensor in its context that autograd knows nothing of."""

    @staticmethod
    def forward(ctx, x):
        ctx.own = x.exp()
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.own


class WithFunction(nn.Linear):
    def forward(self, x):
        return Square.apply(super().forward(x))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return users_checkpoint(super().forward, x, use_reentrant=False)


class Tied(nn.Module):
    """The first stage and the last use one weight, and views of one tensor go to two stages."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(100, 32), nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.linear(self.embedding(x)).chunk(3, -1)
        pipe_split()
        y = torch.tanh(q) * k.view(-1, 4, 8).transpose(1, 2).reshape(-1, 32)
        pipe_split()
        return F.linear(y + v, self.embedding.weight)


def kept_otherwise():
    parts = [WithFunction(32, 32), Checkpointed(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)), nn.Linear(32, 32)]
    return InStages(parts), torch.randn(16, 32), torch.randn(16, 32), F.mse_loss


def tied():
    return Tied(), torch.randint(0, 100, (16,)), torch.randint(0, 100, (16,)), F.cross_entropy


class Shared(nn.Module):
    """Every stage uses both weights."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        for stage in range(STAGES):
            if stage:
                pipe_split()
            x = self.other(torch.tanh(self.one(x)))
        return x


def shared():
    return Shared(), torch.randn(8, 64), torch.randn(8, 64), F.mse_loss


def deferring():
    """Layers that are so large that their weight gradients are put off."""
    parts = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)]
    return InStages(parts), torch.randn(256, 256), torch.randn(256, 256), F.mse_loss


@pytest.mark.parametrize(
    ("model", "schedule", "of_pipe", "options"),
    [
        (kept_otherwise, "1f1b", {}, {}),
        (tied, "1f1b", {"multi_use_param_spec": MultiUseParameterConfig.TRANSMIT}, {}),
        (tied, "fill_drain", {"multi_use_param_spec": MultiUseParameterConfig.REPLICATE}, {"checkpoint": "always"}),
        (tied, "1f1b", {}, {"world_size": 1}),
        (shared, "1f1b", {"multi_use_param_spec": MultiUseParameterConfig.REPLICATE}, {"checkpoint": "always"}),
        (shared, "interleaved_1f1b", {"multi_use_param_spec": MultiUseParameterConfig.REPLICATE}, {"world_size": 2}),
        (deferring, "zb_h1", {}, {}),
    ],
)
def test_what_stages_keep_in_other_ways_is_counted(threads, model, schedule, of_pipe, options):
    torch.manual_seed(0)
    module, x, target, loss_fn = model()
    driver = PipelineDriver(pipeline(module, loss_fn, **of_pipe), threads, schedule=schedule, **options)
    assert max(map(abs, errors(driver, 4, x, target))) < 0.05


def in_place(layers):
    """Stages of convolutions, each with an activation that overwrites its input."""
    sizes = [[3, *[16] * layers], *[[16] * (layers + 1)] * (STAGES - 1)]
    parts = [
        nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.ReLU(inplace=True))
                for one, other in pairwise(each)
            )
        )
        for each in sizes
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 256, 4))
    return InStages(parts, head), torch.randn(16, 3, 16, 16), torch.randint(0, 4, (16,)), F.cross_entropy


@pytest.mark.parametrize(("layers", "schedule"), [(1, "v_half"), (1, "v_min"), (2, "v_half"), (1, "zb_v")])
def test_what_waits_for_the_second_half_of_a_backward_counts_once(cluster, layers, schedule):
    """An input of a layer is the output of the stage before it, on the same worker: it counted twice, and was off by 10 %.

    The workers are processes: a thread that has sent a value may hold it for a while.
    """
    module, x, target, loss_fn = in_place(layers)
    driver = PipelineDriver(pipeline(module, loss_fn), cluster, schedule=schedule, world_size=2)
    assert max(map(abs, errors(driver, 4, x, target))) < 0.01


def test_outputs_that_were_sent_are_freed(cluster):
    """The first stage keeps its input, which is small. It kept its outputs, too: 512 KiB for each micro-batch."""
    parts = [nn.Linear(16, 1024), nn.Linear(1024, 16), nn.Tanh()]
    x, target = torch.randn(512, 16), torch.randn(512, 16)
    driver = PipelineDriver(pipeline(InStages(parts), nn.MSELoss()), cluster, schedule="fill_drain", world_size=3)
    assert driver.memory(4, x, target).peaks[0] < 3 * (512 << 10)
    assert max(map(abs, errors(driver, 4, x, target))) == 0


@pytest.mark.parametrize(
    ("model", "schedule", "options"),
    [
        (lambda: attention(0.1), "zb_h1", {}),
        (lambda: convolutions(0.0), "fill_drain", {"checkpoint": {1: "always", 2: "except_last"}}),
        (lambda: in_place(2), "zb_h1", {}),
        (lambda: recurrent(0.0), "1f1b", {}),
        (tied, "1f1b", {}),
    ],
)
def test_stages_as_graphs_hold_what_is_counted_to_the_byte(cluster, model, schedule, options):
    """Also those of which a stage runs eagerly: kernels of recurrent layers keep nothing where autograd is off."""
    torch.manual_seed(0)
    module, x, target, loss_fn = model()
    driver = PipelineDriver(pipeline(module, loss_fn), cluster, schedule=schedule, compile="graphs", **options)
    assert errors(driver, 4, x, target) == [0] * len(driver.program(4).orders)


def test_a_value_that_two_stages_of_a_worker_keep_is_freed_later_than_counted(cluster):
    """A half I whose stage is alone frees its output on the way: here the stage behind it still holds that. It is 1 %."""
    module, x, target, loss_fn = in_place(2)
    pipe = pipeline(module, loss_fn)
    driver = PipelineDriver(pipe, cluster, schedule="v_half", world_size=2, compile="graphs")
    assert max(map(abs, errors(driver, 4, x, target))) < 0.01


def test_what_autocast_casts_is_counted(threads):
    module, x, target, loss_fn = deferring()
    with torch.autocast("cpu", torch.bfloat16):
        driver = PipelineDriver(pipeline(module, loss_fn), threads, schedule="1f1b")
        assert max(map(abs, errors(driver, 2, x, target, optimizer_class=torch.optim.SGD))) < 0.05


def test_copies_that_wait_for_their_receiver_are_the_transports():
    """How long they live depends on when the other worker takes them: the gradients of replicated parameters, too."""
    here, _ = in_process(2)
    order = [parse_instruction(f"{text} 1") for text in ("send gradients of w to", "receive gradients of w from")]
    recorder = Recorder(order, range(2), here, torch.device("cpu"))
    gradient, other, key, found = torch.ones(100), torch.ones(100), (0, 0, 0), []
    step = SimpleNamespace(transport=here)

    def take(step):
        received = step.transport.receive(key, 1)
        found.append(live.bytes)
        found.append(received.add_(gradient))

    with recorder.counting([gradient]):
        live = recorder.held.live
        (send, _), (receive, _) = recorder.watching(
            [(lambda step: step.transport.send(1, key, gradient), ()), (take, ())]
        )
        send(step)
        assert live.bytes == 400
        here.deliver(key, other)
        receive(step)
        assert (found[0], live.bytes) == (400, 800) and step.transport is here


# `driver.memory`: what it takes, what it says, and what it refuses.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        return self.last(x)


def test_nothing_is_computed_and_nothing_changes(threads):
    model = Net()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    calls = []
    model.first.register_forward_hook(lambda *given: calls.append(given[1][0]))
    state = torch.random.get_rng_state()
    x = torch.zeros(16, 8)
    counted = driver.memory(4, x, x)
    assert all(type(each) is not torch.Tensor for each in calls), "with fake tensors only"
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.first.weight.grad is None and driver.get_grad("first.weight") is None
    assert counted.sizes.stages[0].parameters == (8 * 16 + 16) * 4
    assert [row.split()[0] for row in str(counted).splitlines()] == [
        "worker",
        str(counted).splitlines()[1],
        "0",
        "1",
        "no",
        "the",
    ]


def test_the_example_of_the_pipe_is_the_mini_batch_or_tensors_without_numbers(threads):
    x = torch.zeros(16, 8)
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss(), example_args=(x, x)), threads)
    empty = torch.empty(16, 8, device="meta")
    assert driver.memory(4).peaks == driver.memory(4, x, x).peaks == driver.memory(4, empty, target=empty).peaks
    with pytest.raises(DriverError, match="is on the meta device and holds no numbers; only memory"):
        driver.run(4, empty, empty)
    driver.close()
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    with pytest.raises(InputError, match=r"made without an example.*torch.empty\(32, 8, device='meta'\)"):
        driver.memory(4)
    with pytest.raises(OptimizerError, match="optimizer='adam': give a class"):
        driver.memory(4, x, x, optimizer="adam")


def test_the_state_of_optimizers(threads):
    x = torch.zeros(16, 8)
    driver = PipelineDriver1F1B(pipeline(Net().to(torch.bfloat16), nn.MSELoss()), threads)
    x = x.to(torch.bfloat16)
    assert "no optimizer yet" in str(driver.memory(2, x, x))
    numbers = [8 * 16 + 16, 16 * 8 + 8]
    found = driver.memory(2, x, x, optimizer=torch.optim.AdamW)
    assert [each.optimizer for each in found.sizes.stages] == [2 * 2 * count + 2 * 4 for count in numbers]
    driver.instantiate_optimizer(
        torch.optim.SGD, lr=0.1, momentum=0.9, master_dtype=torch.float32, param_groups=[{"params": "first.*"}]
    )
    found = driver.memory(2, x, x)
    assert [each.optimizer for each in found.sizes.stages] == [2 * 4 * numbers[0], 0]
    assert "no optimizer yet" not in str(found)


def test_steps_without_gradients_and_the_largest_micro_batch(threads):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    x = torch.zeros(10, 8)
    with torch.no_grad():
        found = driver.memory(4, x, x)
    assert all(each.peak.gradients == each.peak.kept == 0 for each in found.workers)
    assert driver.memory(4, x, x).sizes.values["tanh"] == 3 * 16 * 4, "10 rows are 3, 3, 2 and 2"


class DependsOnNumbers(nn.Module):
    def forward(self, x):
        return x[x > 0].sum() * x


def test_a_model_that_fake_tensors_cannot_run_is_refused_and_a_step_can_be_measured(threads):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(8, 8), DependsOnNumbers()

        def forward(self, x):
            x = self.first(x)
            pipe_split()
            return self.odd(x)

    driver = PipelineDriver1F1B(pipeline(Model(), nn.MSELoss()), threads, check=False)
    x = torch.ones(8, 8)
    with pytest.raises(
        DriverError, match=r"(?s)cannot run with them:.*submod_1.*x\[x > 0\].*driver.record\(memory=True\)"
    ):
        driver.memory(2, x, x)
    with driver.record(memory=True) as recording:
        driver.run(2, x, x)
    assert all(max(each.held[0]) > 256 for each in recording.steps[0].noted)
    driver.close()
    single = PipelineDriverFillDrain(pipeline(Net(), nn.MSELoss()), threads, single_loss=True)
    with pytest.raises(DriverError, match=r"cannot count a step with single_loss=True.*record\(memory=True\)"):
        single.memory(2, x, x)


def test_a_batch_norm_that_averages_all_it_has_seen_is_counted_like_another(threads):
    """It asks for the number in `num_batches_tracked`, which fake tensors do not have."""
    found = []
    for momentum in (None, 0.1):
        norm = nn.BatchNorm1d(16, momentum=momentum)
        pipe = pipeline(nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 8)), nn.MSELoss(), split=[1, 2])
        driver, x = PipelineDriver1F1B(pipe, threads), torch.zeros(16, 8)
        found.append(driver.memory(4, x, x).peaks)
        driver.close()
        assert norm.momentum == momentum
    assert found[0] == found[1]


def test_over_time(threads):
    driver = PipelineDriver(pipeline(Net(), nn.MSELoss()), threads, schedule="fill_drain", checkpoint="always")
    x = torch.zeros(16, 8)
    for series, held in zip(driver.memory(4, x, x).series, driver.memory(4, x, x).workers):
        assert max(most for _, most, _ in series) == held.peak.total
        assert series[-1][0] == "end" and "R" in {name[0] for name, _, _ in series}


def test_the_report_draws_what_was_counted_beside_what_was_measured(threads, tmp_path):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    x = torch.zeros(16, 8)
    counted = driver.memory(4, x, x)
    with driver.record(memory=True) as recording:
        driver.run(4, x, x)
    recording.report(tmp_path / "report.html", memory=counted)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 4
    assert (
        len(re.findall(r"at its peak measured [\d.]+ KiB, counted [\d.]+ KiB \((the same|[+-][\d.]+ %)\)", page)) == 2
    )
    with pytest.raises(DriverError, match=r"memory= was counted for <Program .* chunks=2.* this step ran .* chunks=4"):
        recording.report(tmp_path / "report.html", memory=driver.memory(2, x, x))
    with driver.record() as recording:
        driver.run(4, x, x)
    recording.report(tmp_path / "report.html", memory=counted)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == len(re.findall("<figcaption>.*?: at its peak counted", page)) == 2


def test_a_storage_at_an_address_that_was_used_before_is_a_new_one():
    """Values seemed to be a part of something that was there, now and then, and did not count."""
    addresses, again = set(), 0
    with LiveStorages() as live:
        for _ in range(20):
            seen = live.seen
            made = torch.ones(8)
            assert live.newest_of([made]) > seen
            again += made.untyped_storage()._cdata in addresses
            addresses.add(made.untyped_storage()._cdata)
            assert live.newest_of([made]) == live.seen
            del made
    assert again
