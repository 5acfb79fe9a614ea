"""Mixed precision: parameters of 16 bits with copies of 32, and scaled losses, are those of plain PyTorch."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B
from pippy.drivers.protocol.state import GiveState
from tests.comparisons import assert_bits, assert_state, copies_of, update
from tests.drivers.models import Chain, TiedLanguage, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("seeded")


class MasterByHand:
    """An optimizer over float32 copies of a model's parameters, as one writes it for plain PyTorch."""

    def __init__(self, model, kind, **options):
        self.parameters = dict(model.named_parameters())
        self.masters = {name: p.detach().clone().float() for name, p in self.parameters.items()}
        self.optimizer = kind(list(self.masters.values()), **options)

    def take_gradients(self):
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def step(self):
        self.optimizer.step()
        self.step_parameters()

    def step_parameters(self):
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])


def batch(dtype, rows=8):
    return torch.randn(rows, 8, dtype=dtype), torch.randn(rows, 8, dtype=dtype)


def accumulate(model, x, target, chunks):
    """The gradients of a mini-batch in micro-batches of one size."""
    for rows, its in zip(x.chunk(chunks), target.chunk(chunks)):
        F.mse_loss(model(rows), its).backward(torch.tensor(1 / chunks, dtype=x.dtype))


@pytest.mark.parametrize(
    ("schedule", "dtype"), [("fill_drain", torch.bfloat16), ("1f1b", torch.float16), ("zb_h1", torch.bfloat16)]
)
def test_copies_in_float32_are_those_of_plain_pytorch_to_the_bit(threads, schedule, dtype):
    plain = Chain(4).to(dtype)
    driver = PipelineDriver(pipeline(copy.deepcopy(plain), F.mse_loss), threads, schedule=schedule)
    mine = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, master_dtype=torch.float32)
    theirs = MasterByHand(plain, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    for _ in range(4):
        x, target = batch(dtype)
        mine.zero_grad()
        driver.run(4, x, target)
        accumulate(plain, x, target, 4)
        theirs.take_gradients()
        norm = nn.utils.clip_grad_norm_(theirs.masters.values(), 0.01)
        assert torch.equal(driver.clip_grad_norm_(0.01), norm)
        assert all(torch.equal(driver.get_grad(name), its.grad) for name, its in theirs.masters.items())
        mine.step(), theirs.step()
        assert_bits(driver.state_dict(), plain.state_dict())
    for name, state in mine.state_dict()["state"].items():
        assert torch.equal(state["master_parameter"], theirs.masters[name])
        assert torch.equal(state["exp_avg"], theirs.optimizer.state[theirs.masters[name]]["exp_avg"])


def saved(state):
    """A state as it is after it was saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def steps(driver, optimizer, batches):
    for x, target in batches:
        driver.run(1, x, target)
        update(optimizer)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_goes_on_from_saved_states_to_the_bit(threads, model_first):
    """In either order; copies of a replicated parameter stay alike; and a float32 norm has no copy."""
    model = TiedLanguage().to(torch.bfloat16)
    model.norm.float()
    model.norm.register_forward_pre_hook(lambda module, args: args[0].float())
    model.norm.register_forward_hook(lambda module, args, output: output.bfloat16())
    batches = [tokens(4) for _ in range(6)]

    def begin():
        pipe = pipeline(copy.deepcopy(model), cross_entropy, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
        driver = PipelineDriver(pipe, threads)
        return driver, driver.instantiate_optimizer(torch.optim.Adam, lr=1e-3, master_dtype=torch.float32)

    driver, optimizer = begin()
    steps(driver, optimizer, batches[:3])
    states = [(driver, saved(driver.state_dict())), (optimizer, saved(optimizer.state_dict()))]
    assert "master_parameter" not in states[1][1]["state"]["norm.weight"]
    again = dict(zip((driver, optimizer), begin()))
    for old, state in states if model_first else reversed(states):
        again[old].load_state_dict(state)
    steps(driver, optimizer, batches[3:])
    steps(*again.values(), batches[3:])
    assert_bits(driver.state_dict(), again[driver].state_dict())
    one, other = (
        state_on(driver, optimizer, worker, place) for worker, place in driver.placed.locations("embedding.weight")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    for each in again:
        if each is not optimizer:
            each.close()


def state_on(driver, optimizer, worker, place):
    answer = driver.commands.call({worker: GiveState((), {optimizer.number: (place,)})})[worker]
    return answer.optimizers[optimizer.number].get(place)


def test_copies_follow_parameters_that_are_loaded(threads):
    """A state of another model, or one of the model and none of the optimizer: the copies would undo it at the next step."""
    model = Chain(2).to(torch.bfloat16)
    driver = PipelineDriver(pipeline(model, F.mse_loss), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=1e-4, master_dtype=torch.float32)
    steps(driver, optimizer, [batch(torch.bfloat16)])
    plain = Chain(2).to(torch.bfloat16)
    driver.load_state_dict(plain.state_dict())
    theirs = MasterByHand(plain, torch.optim.SGD, lr=1e-4)
    x, target = batch(torch.bfloat16)
    steps(driver, optimizer, [(x, target)])
    accumulate(plain, x, target, 1)
    theirs.take_gradients(), theirs.step()
    assert_bits(driver.state_dict(), plain.state_dict())
    for name, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["master_parameter"], theirs.masters[name])


def test_what_is_wrong_with_copies_is_said_before_anything_is_sent(threads):
    driver = PipelineDriver(pipeline(Chain(2).to(torch.bfloat16), F.mse_loss), threads)
    before = list(threads.session.counts)
    for wrong in (torch.int32, "float32", torch.float16):
        with pytest.raises(OptimizerError, match="master_dtype="):
            driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, master_dtype=wrong)
    assert threads.session.counts == before
    with_copies = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, master_dtype=torch.float32)
    without = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(OptimizerError, match=r"master_dtype=torch\.float32"):
        without.load_state_dict(with_copies.state_dict())


# A scaled loss on workers follows `torch.amp.GradScaler`: the numbers, the steps that are skipped, the scale, the states.


def sized_batch(size=1.0, rows=8):
    return torch.randn(rows, 8), torch.randn(rows, 8) * size


def accumulate_scaled(model, scaler, x, target, chunks):
    """The gradients of a mini-batch in micro-batches of one size, of a loss that is scaled."""
    for rows, its in zip(x.chunk(chunks), target.chunk(chunks)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(rows), its)
        scaler.scale(loss / chunks).backward()


SIZES = [1.0, 1e5, 1.0, 1.0, 1e5, 1.0]  # those of 1e5 overflow in float16


@pytest.mark.parametrize(
    ("schedule", "options"), [("fill_drain", {}), ("fill_drain", {"single_loss": True}), ("1f1b", {}), ("zb_h1", {})]
)
def test_autocast_to_float16_follows_the_scaler_of_torch(threads, schedule, options):
    plain = Chain(4)
    driver = PipelineDriver(pipeline(copy.deepcopy(plain), F.mse_loss), threads, schedule=schedule, **options)
    mine = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scaler = driver.instantiate_grad_scaler(init_scale=2.0**10, growth_interval=2)
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for number, size in enumerate(SIZES):
        x, target = sized_batch(size)
        with torch.autocast("cpu", dtype=torch.float16):
            driver.run(4, x, target)
        accumulate_scaled(plain, torchs, x, target, 4)
        if number % 2:
            scaler.unscale_(mine), torchs.unscale_(theirs)
            if size == 1.0:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                torch.testing.assert_close(driver.clip_grad_norm_(0.1), norm)
        scaler.step(mine), torchs.step(theirs)
        scaler.update(), torchs.update()
        mine.zero_grad(), theirs.zero_grad()
        scales.append(scaler.get_scale())
        assert scales[-1] == torchs.get_scale()
        assert_state(driver, plain, rtol=1e-6, atol=1e-7)
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0]
    assert scaler.state_dict() == torchs.state_dict()


def test_float16_parameters_with_copies_in_float32_to_the_bit(threads):
    plain = Chain(2).half()
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(plain), F.mse_loss), threads)
    mine = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, master_dtype=torch.float32)
    theirs = MasterByHand(plain, torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler, torchs = driver.instantiate_grad_scaler(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    skipped = 0
    for size in (1.0, 1.0, 1.0, 1e-4, 1e-4, 1e-4, 1e-4):
        x, target = (each.half() * size for each in sized_batch())
        driver.run(2, x, target)
        for rows, its in zip(x.chunk(2), target.chunk(2)):  # the loss in float16 has a gradient of at most 65504
            F.mse_loss(plain(rows), its).backward(torch.tensor(0.5 * torchs.get_scale()).half())
        theirs.take_gradients()
        torchs.scale(torch.ones(()))  # or torch's does not begin
        torchs.unscale_(theirs.optimizer)
        found = any(not each.grad.isfinite().all() for each in theirs.masters.values())
        scaler.unscale_(mine)
        for name, its in theirs.masters.items():
            gradient = driver.get_grad(name)
            assert gradient.dtype is torch.float32 and torch.equal(gradient.nan_to_num(), its.grad.nan_to_num())
        norm = nn.utils.clip_grad_norm_(theirs.masters.values(), 0.3)
        torch.testing.assert_close(driver.clip_grad_norm_(0.3), norm, rtol=0, atol=0, equal_nan=True)
        scaler.step(mine)
        torchs.step(theirs.optimizer)
        if not found:
            theirs.step_parameters()
        scaler.update(), torchs.update()
        mine.zero_grad()
        skipped += found
        assert scaler.get_scale() == torchs.get_scale()
        assert_bits(driver.state_dict(), plain.state_dict())
    assert 0 < skipped < 7


class WithGain(nn.Module):
    """A parameter in the first stage whose gradient is 1e30 times that of the output: the only one that overflows."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        extra = self.gain * 1e30
        x = torch.tanh(self.first(x))
        pipe_split()
        return self.last(x) + extra


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_optimizers_skip_by_themselves_and_a_step_is_two_messages(threads, asynchronous):
    """One if it is skipped: then nobody needs to be told."""
    plain = WithGain()
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(plain), F.mse_loss), threads)
    groups = [["gain"], ["first.*", "last.*"]]
    mine = [driver.instantiate_optimizer(torch.optim.SGD, lr=1e-3, param_groups=[{"params": own}]) for own in groups]
    rest = [parameter for name, parameter in plain.named_parameters() if name != "gain"]
    theirs = [torch.optim.SGD(own, lr=1e-3) for own in ([plain.gain], rest)]
    options = {"init_scale": 2.0**38, "backoff_factor": 2.0**-30}
    scaler, torchs = driver.instantiate_grad_scaler(**options), torch.amp.GradScaler("cpu", **options)
    for expected in (2, 3, 3):  # a run, and the steps that are not skipped
        x, target = sized_batch()
        if asynchronous:
            running = driver.run_async(2, x, target)
        else:
            driver.run(2, x, target)
        before = threads.session.counts[0] - 1
        torchs.scale(F.mse_loss(plain(x), target)).backward()
        for optimizers, its in ((mine, scaler), (theirs, torchs)):
            for optimizer in optimizers:
                its.step(optimizer)
            its.update()
        assert threads.session.counts[0] - before == expected
        if asynchronous:
            running.result()
        for optimizer in (*mine, *theirs):
            optimizer.zero_grad()
        assert scaler.get_scale() == torchs.get_scale()
        plain.gain.data.zero_()
        driver.load_state_dict({"gain": torch.zeros(8)}, strict=False)
        assert_state(driver, plain, rtol=1e-6, atol=1e-7)


def test_an_infinity_is_dropped_with_its_gradients(threads):
    """All of them, those of one optimizer, and those of a step that still runs."""
    driver = PipelineDriver1F1B(pipeline(WithGain(), F.mse_loss), threads)
    gain = driver.instantiate_optimizer(torch.optim.SGD, lr=1e-38, param_groups=[{"params": ["gain"]}])
    scaler = driver.instantiate_grad_scaler(init_scale=2.0**38)
    nothing = torch.zeros(2, 8)
    for drop in (driver.zero_grad, gain.zero_grad):
        running = driver.run_async(1, *sized_batch(rows=2))
        drop()
        with pytest.raises(OptimizerError, match=r"call driver\.run first"):
            scaler.step(gain)
        running.result()
        scaler.update(1.0)
        driver.run(1, *sized_batch(rows=2))
        scaler.step(gain)
        assert driver.state_dict()["gain"].any(), "it was skipped"
        scaler.update(2.0**38)
        driver.run(1, nothing, nothing)  # adds to gradients that are finite
        before = driver.state_dict()["gain"]
        scaler.step(gain)
        assert torch.equal(driver.state_dict()["gain"], before)
        scaler.update(2.0**38)
        driver.load_state_dict({"gain": torch.zeros(8)}, strict=False)


class SharedGain(WithGain):
    """Both stages have the gain, and its gradient overflows in the last one."""

    def forward(self, x):
        x = torch.tanh(self.first(x + self.gain))
        pipe_split()
        return self.last(x) + self.gain * 1e30


def test_an_infinity_of_one_copy_is_known_to_all(threads):
    """No worker steps, and the copies stay alike."""
    pipe = pipeline(SharedGain(), F.mse_loss, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    driver = PipelineDriver1F1B(pipe, threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=1e-30)
    scaler = driver.instantiate_grad_scaler(init_scale=2.0**38, backoff_factor=2.0**-30)
    for skips in (True, False):
        before = driver.state_dict()
        driver.run(2, *sized_batch())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(driver.state_dict()["gain"], before["gain"]) == skips
    assert torch.equal(*copies_of(driver, "gain"))


def test_states_are_those_of_torch(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2), F.mse_loss), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    scaler, torchs = driver.instantiate_grad_scaler(init_scale=8.0, growth_interval=2), torch.amp.GradScaler("cpu")
    driver.run(2, *sized_batch())
    scaler.step(optimizer)
    scaler.update()
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.state_dict()["_growth_tracker"] == 1
    again = driver.instantiate_grad_scaler()
    again.load_state_dict(torchs.state_dict())
    driver.run(2, *sized_batch())
    again.step(optimizer)
    again.update()
    assert again.get_scale() == 16.0
    off = driver.instantiate_grad_scaler(enabled=False)
    before = driver.state_dict()
    driver.run(2, *sized_batch())
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert not torch.equal(before["layers.0.weight"], driver.state_dict()["layers.0.weight"])


def test_what_is_wrong_says_what_to_do(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2), F.mse_loss), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    torchs, other = torch.amp.GradScaler("cpu"), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    loss = driver.run(2, *sized_batch())
    torchs.scale(loss)
    old, scaler = driver.instantiate_grad_scaler(), driver.instantiate_grad_scaler()

    def refused(words, call, *given, kind=OptimizerError):
        with pytest.raises(kind, match=words):
            call(*given)

    refused(r"driver\.instantiate_grad_scaler", torchs.step, optimizer)
    refused(r"call driver\.run first", scaler.step, optimizer)
    loss = driver.run(2, *sized_batch())
    refused(r"leave scaler\.scale\(loss\)\.backward\(\) out", scaler.scale, loss, kind=DriverError)
    refused(r"without scaler\.step\(optimizer\) before it", scaler.update)
    refused("replaced by a later one", old.step, optimizer)
    refused("use that driver's scaler", scaler.step, other)
    refused(r"scaler\.state_dict", pickle.dumps, scaler, kind=TypeError)
    scaler.unscale_(optimizer)
    refused(r"after scaler\.unscale_", scaler.unscale_, optimizer)
    scaler.step(optimizer)
    refused(r"scaler\.update\(\) when all", scaler.step, optimizer)
    refused(r"after scaler\.step", scaler.unscale_, optimizer)
    driver.close()
    driver = PipelineDriver1F1B(pipeline(Chain(2).half(), F.mse_loss), threads)
    optimizer, scaler = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), driver.instantiate_grad_scaler()
    refused(r"'layers\.0\.weight' is float16.*master_dtype", scaler.step, optimizer)
    driver.close()
    driver = PipelineDriver1F1B(pipeline(Chain(2)), threads)
    refused("loss_fn", driver.instantiate_grad_scaler, kind=DriverError)
