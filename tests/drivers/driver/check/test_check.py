"""`driver.check` compares a step with the plain model's, leaves all as it was, and says where a difference begins."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    IndexLoader,
    MultiUseParameterConfig,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    convert_deferred_batch_norm,
    errors,
    pipe_split,
    pipeline,
)
from pippy.drivers.driver.check.differences import Comparison
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.stage_call import StageCall
from pippy.ir.base.names import named_state
from pippy.ir.base.trees import leaves
from tests.drivers.driver.check.faults import Acts, Net
from tests.drivers.simulated_device import SimulatedDevice
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def rows(count=6):
    return torch.randn(count, 4), torch.randint(0, 3, (count,))


def pipe_of(model, loss_fn=None, **options):
    return pipeline(model, nn.CrossEntropyLoss() if loss_fn is None else loss_fn, **options)


def state_of(driver, optimizer):
    """All that a check must leave alone on the workers, and what the controller knows."""
    return copy.deepcopy(
        [driver.state_dict(), driver.gradients(), optimizer.state_dict(), driver.random_state, torch.get_rng_state()]
    )


def same(one, other):
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_all_is_afterwards_as_it_was_and_the_training_goes_on_to_the_bit(threads):
    model, (x, y), others = Net(), rows(), rows()
    pipes = [pipe_of(copy.deepcopy(model), multi_use_param_spec=MultiUseParameterConfig.REPLICATE) for _ in "ab"]
    drivers = [PipelineDriver1F1B(pipe, threads, keyed_random=7) for pipe in pipes]
    optimizers = [driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1) for driver in drivers]
    checked, before = drivers[0], copy.deepcopy(list(named_state(pipes[0])))
    for step in range(4):
        for driver, optimizer in zip(drivers, optimizers):
            driver.run(2, x, y)  # gradients of a step before, which are not applied yet
            if step % 2:
                optimizer.step()
                driver.zero_grad()
        held = [state_of(driver, optimizer) for driver, optimizer in zip(drivers, optimizers)]
        assert same(*held), "to the bit"
        assert checked.check(3, *others)
        assert same(state_of(checked, optimizers[0]), held[0])
    assert same(list(named_state(pipes[0])), before), "the model here"
    assert all(each.grad is None for each in pipes[0].parameters())


def test_all_is_as_it_was_after_a_check_that_fails(threads, monkeypatch):
    def raising(*args):
        raise ValueError("this worker fails")

    driver = PipelineDriver1F1B(pipe_of(Net()), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    x, y = rows()
    driver.run(2, x, y)
    held = state_of(driver, optimizer)
    with pytest.raises(IndexError):  # no such class: the plain model raises, and nothing was sent
        driver.check(2, x, torch.full((6,), 7))
    for owner, name in ((StageCall, "run"), (WorkerOptimizer, "step")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, raising)
            with pytest.raises(errors.PippyError, match="this worker fails"):
                driver.check(2, x, y)
        assert same(state_of(driver, optimizer), held)
    assert driver.check(2, *rows())


MIXES = [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x / x.abs().max(), lambda x: x @ x.T @ x]


@pytest.mark.parametrize("mix", MIXES)
def test_stage_that_mixes_rows_is_named(threads, mix):
    report = PipelineDriver1F1B(pipe_of(Acts(mix=mix)), threads).check(3, *rows())
    assert not report and report.begins.stage == "submod_1" and "mixes rows" in str(report)


class Clamped(torch.autograd.Function):
    """A gradient that is cut off: of the sum over rows in the plain model, of each micro-batch's here."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


def test_stage_whose_backward_mixes_rows_is_named(threads):
    class Straight(Acts):
        def forward(self, x):
            x = torch.tanh(self.first(x))
            pipe_split()
            x = torch.tanh(F.linear(x, Clamped.apply(self.second.weight)))
            pipe_split()
            return self.last(x)

    report = PipelineDriver1F1B(pipe_of(Straight()), threads).check(3, *rows())
    assert {each.name for each in report.differences} == {"second.weight"}
    assert report.begins.stage == "submod_1" and "gradient differs, that of second.weight" in report.begins.what


class WithPenalty(nn.Module):
    """A model that returns its loss, a part of which an early stage makes."""

    def __init__(self, summed):
        super().__init__()
        self.a, self.b, self.summed = nn.Linear(4, 5), nn.Linear(5, 3), summed

    def forward(self, x, y):
        x = torch.tanh(self.a(x))
        penalty = x.pow(2).sum() if self.summed else x.pow(2).mean()
        pipe_split()
        logits = self.b(x)
        return {"loss": F.cross_entropy(logits, y) + 0.01 * penalty, "logits": logits}


@pytest.mark.parametrize("summed", [False, True])
def test_part_of_the_loss_of_an_early_stage(threads, summed):
    x, y = rows()
    pipe = pipeline(WithPenalty(summed), output_loss_value_spec="loss", example_args=(x, y))
    report = PipelineDriver1F1B(pipe, threads, loss_reduction="mean").check(3, x, y)
    assert bool(report) is not summed
    assert not summed or report.begins.stage == "submod_0", report


def test_buffer_that_changes_with_each_microbatch(threads):
    class Counting(Acts):
        def __init__(self):
            super().__init__(mix=self.counted)
            self.register_buffer("steps", torch.zeros(()))

        def counted(self, x):
            self.steps.add_(1)
            return x

    model = Counting()
    assert PipelineDriver1F1B(pipe_of(copy.deepcopy(model)), threads).check(3, *rows()).equal  # it counts steps
    report = PipelineDriver1F1B(pipe_of(model), threads, buffers="per_microbatch").check(3, *rows())
    assert [(each.kind, each.name) for each in report.differences] == [("buffer", "steps")]
    assert report.begins.stage == "submod_1"


# What drivers and models may be: each is compared, and the same.


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def frozen():
    model = Net()
    model.first.requires_grad_(False)
    return model


DRIVERS = {
    "zb_h1": (Net, {"schedule": "zb_h1"}),
    "auto": (Net, {"schedule": "auto"}),
    "interleaved": (Net, {"schedule": "interleaved_1f1b", "world_size": 1}),
    "recompute": (Net, {"checkpoint": "always"}),
    "out of order": (Net, {"out_of_order": True}),
    "without keys": (Net, {"keyed_random": False}),
    "masked": (lambda: Acts(mix=torch.tanh), {"schedule": "1f1b", "_debug_mask_minibatches": True}),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_drivers_of_many_kinds(threads, name):
    make, options = DRIVERS[name]
    driver = PipelineDriver(pipe_of(make()), threads, **options)
    driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(2):
        assert driver.check(3, *rows()), driver.check(3, *rows())
        driver.run(3, *rows())


def test_replicas(threads):
    pipe = pipe_of(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), num_stages=2, split="parameters")
    for divided in (False, True):
        driver = PipelineDriver1F1B(pipe, threads, replicas=2)
        optimizer = driver.instantiate_optimizer(torch.optim.Adam, divide_state=divided)
        driver.run(4, *rows(8))
        optimizer.step()
        report = driver.check(4, *rows(8))
        assert report and report.compared["parameter"] == 4


def test_single_loss(threads):
    def contrastive(output, target):
        return F.cross_entropy(output @ output.T, target.argsort())

    driver = PipelineDriverFillDrain(pipe_of(Net(), contrastive), threads, single_loss=True)
    assert driver.check(2, *rows())
    report = PipelineDriverFillDrain(pipe_of(Net(), contrastive), threads, loss_reduction="mean").check(2, *rows())
    assert not report


def test_batch_norms_are_compared_with_their_running_statistics(threads):
    for convert in (lambda model: model, convert_deferred_batch_norm):
        model = convert(with_batch_norm())
        driver = PipelineDriver1F1B(pipe_of(model, num_stages=2, split="parameters"), threads)
        report = driver.check(3, *rows())
        assert report and "batch norm" in str(report)
        model.eval()
        report = driver.check(3, *rows())
        assert report and "batch norm" not in str(report) and report.compared["buffer"] == 3


def test_frozen_parts_and_several_optimizers(threads):
    driver = PipelineDriver1F1B(pipe_of(frozen()), threads)
    assert "no optimizer" in str(driver.check(2, *rows()))
    driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=[{"params": "second.*", "lr": 0.2}])
    driver.instantiate_optimizer(torch.optim.Adam, param_groups=[{"params": ["last.*", "shared"]}])
    report = driver.check(2, *rows())
    assert report and report.compared["parameter"] == 5


def test_scaled_loss_and_autocast(threads):
    driver = PipelineDriver1F1B(pipe_of(Net().float()), threads)
    optimizer, scaler = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), driver.instantiate_grad_scaler()
    x, y = rows()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert driver.check(2, x.float(), y)
            driver.run(2, x.float(), y)
        assert driver.check(2, x.float(), y)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0


def test_parameters_of_16_bits_with_wider_copies(threads):
    driver = PipelineDriver1F1B(pipe_of(Net().bfloat16()), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3, master_dtype=torch.float32)
    x, y = rows()
    for _ in range(2):
        assert driver.check(2, x.bfloat16(), y)
        driver.run(2, x.bfloat16(), y)
        optimizer.step()


def test_outputs_that_need_a_spec_are_left_out(threads):
    class Counting(Net):
        def forward(self, x):
            return super().forward(x), x.sum()

    pipe = pipe_of(Counting(), lambda output, target: F.cross_entropy(output[0], target))
    report = PipelineDriver1F1B(pipe, threads, loss_reduction="mean").check(2, *rows())
    assert report and "not compared: outputs" in str(report) and "output" not in report.compared


def test_model_without_a_loss_and_without_gradients(threads):
    driver = PipelineDriver1F1B(pipeline(Net()), threads)
    report = driver.check(2, rows()[0])
    assert report and report.compared == {"output": 1, "buffer": 1}
    driver = PipelineDriver1F1B(pipe_of(Net()), threads)
    with torch.no_grad():
        assert driver.check(2, *rows()).compared == {"loss": 1, "output": 1, "buffer": 1}


class Noisy(torch.utils.data.Dataset):
    """Rows with random numbers, which are keyed by the mini-batch."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        row = torch.linspace(-1, 1, 4) * (index + torch.rand(()))
        return row, torch.tensor(-100 if index % 3 == 1 else index % 3)


def test_rows_that_workers_load_are_loaded_here_too(threads):
    driver = PipelineDriver1F1B(pipe_of(Net()), threads)
    driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    for x, y in IndexLoader(Noisy(), batch_size=6, shuffle=True):
        before = torch.get_rng_state()
        assert driver.check(2, x, y)
        assert driver.check(3, x, y)
        assert torch.equal(torch.get_rng_state(), before)
        driver.run(2, x, y)


def test_number_of_microbatches_may_be_left_out(threads):
    driver, (x, y) = PipelineDriver1F1B(pipe_of(Net()), threads), rows()
    assert driver.check(x, y).chunks == 3 and driver.check(x, target=y).chunks == 3


def test_other_model_is_compared_by_the_numbers_of_the_workers(threads):
    model, other = Net(), Net()
    driver = PipelineDriver1F1B(pipe_of(model), threads)
    held = copy.deepcopy(other.state_dict())
    assert driver.check(2, *rows(), model=other)
    assert same(other.state_dict(), held)
    other.second.register_forward_hook(lambda *given: given[-1] * 2)
    report = driver.check(2, *rows(), model=other)
    assert not report and report.begins.stage


def test_hooks_of_parameters_are_those_of_the_plain_model(threads):
    model = Net()
    driver = PipelineDriver1F1B(pipe_of(model), threads)
    model.second.weight.register_hook(lambda gradient: gradient * 0)
    report = driver.check(2, *rows())
    assert report or {each.name for each in report.differences} == {"second.weight"}


def test_models_that_are_refused(threads):
    """A copy of a Pipe knows no model."""
    driver = PipelineDriver1F1B(copy.deepcopy(pipe_of(Net())), threads)
    other = nn.Linear(1, 1)
    for given, said in ((None, "model=model"), ("plain", "give the plain model"), (other, "are not those of the Pipe")):
        with pytest.raises(errors.DriverError, match=said):
            driver.check(2, *rows(), model=given)
    assert driver.check(2, *rows(), model=Net())


def test_workers_with_devices():
    with thread_cluster(3, [SimulatedDevice() for _ in range(3)]) as cluster:
        driver = PipelineDriver1F1B(pipe_of(Net()), cluster)
        driver.instantiate_optimizer(torch.optim.AdamW)
        assert driver.check(3, *rows())
        report = PipelineDriver1F1B(pipe_of(Acts(mix=MIXES[0])), cluster).check(3, *rows())
        assert report.begins.stage == "submod_1"


def test_a_gradient_that_there_is_not_differs_however_small_the_right_one_is():
    """Beside a large gradient a small one that was lost counted as rounding."""
    small, large = ("gradient", "small"), ("gradient", "large")
    right = Comparison({small: torch.full((2,), 1e-12), large: torch.ones(2)}, {}, floor=1e-6)
    assert [each.name for each in right.differences({large: torch.ones(2), small: None})] == ["small"]
    assert not right.differences({large: torch.ones(2), small: torch.zeros(2)})
    assert not Comparison({small: torch.zeros(2)}, {}, floor=1e-6).differences({small: None})
