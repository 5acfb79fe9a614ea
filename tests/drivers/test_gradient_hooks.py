"""Hooks on parameters act as in the plain model: once in a step, on the gradient of the whole mini-batch."""

import copy

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B
from tests.comparisons import assert_gradients, assert_loss, assert_state, update
from tests.drivers.models import TiedLanguage, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

TRAINED = torch.arange(13).unsqueeze(1) % 3 == 0  # rows of the embedding


def train_some_rows(model):
    mask = TRAINED.double()
    model.embedding.weight.register_hook(lambda gradient: gradient * mask)


def clamp(model):
    """A clamp of each micro-batch's gradient would be another number."""
    for name in ("embedding.weight", "middle.weight", "last.bias"):
        model.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def normalize(model):
    """As nothing but the whole gradient has this norm. Two hooks of one parameter are called in turn."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / gradient.norm())
    model.embedding.weight.register_hook(lambda gradient: gradient + 1.0)


def limit(parameter):
    parameter.grad.clamp_(-0.02, 0.02)


def after_accumulation(model):
    for name in ("embedding.weight", "first.weight"):
        model.get_parameter(name).register_post_accumulate_grad_hook(limit)

    def drop(parameter):
        parameter.grad = None

    model.last.weight.register_post_accumulate_grad_hook(drop)


def both(model):
    clamp(model)
    after_accumulation(model)


HOOKS = [train_some_rows, clamp, normalize, after_accumulation, both]
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


def models(hook, config=REPLICATE):
    """The plain model and the Pipe of its twin, both with hooks."""
    model = TiedLanguage()
    plain = copy.deepcopy(model)
    for each in (plain, model):
        hook(each)
    return plain, pipeline(model, cross_entropy, multi_use_param_spec=config)


def run(driver, plain, chunks, rows=6):
    x, target = tokens(rows)
    assert_loss(driver.run(chunks, x, target), cross_entropy(plain(x), target))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 3), ("fill_drain", 4), ("zb_h1", 2), ("interleaved_1f1b", 6)]
)
def test_a_hook_has_the_gradient_of_the_mini_batch(threads, hook, schedule, chunks):
    config = [TRANSMIT, REPLICATE][
        (HOOKS.index(hook) + chunks // 2) % 2
    ]  # each with every hook, and with every schedule
    plain, pipe = models(hook, config)
    driver = PipelineDriver(pipe, threads, schedule=schedule, world_size=2 if schedule == "interleaved_1f1b" else 4)
    for _ in range(2):  # gradients accumulate, and a hook has those of its own backward
        run(driver, plain, chunks, rows=7)
    assert_gradients(driver, plain)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])
def test_the_pipe_in_this_process_calls_it_once(hook, config):
    plain, pipe = models(hook, config)
    for _ in range(2):
        x, target = tokens(6)
        cross_entropy(plain(x), target).backward()
        pipe(x, target)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("divided", [False, True])
def test_replicas_call_it_once_with_the_sum(threads, hook, divided):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    for each in (model, plain):
        for parameter in each.parameters():
            if hook is after_accumulation:
                parameter.register_post_accumulate_grad_hook(limit)
            else:
                parameter.register_hook(lambda gradient: gradient / gradient.norm())
    pipe = Pipe.from_sequential(nn.Sequential(nn.Sequential(model[0], model[1]), model[2]), nn.MSELoss())
    driver = PipelineDriver1F1B(pipe, threads, replicas=2)
    mine = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1, divide_state=divided)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        mine.zero_grad()
        theirs.zero_grad()
        for _ in range(2):
            x, target = torch.randn(8, 4), torch.randn(8, 3)
            nn.functional.mse_loss(plain(x), target).backward()
            driver.run(4, x, target)
        mine.step()
        theirs.step()
    for one, other in zip(driver.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(one, other)


def test_workers_in_processes(cluster):
    plain, pipe = models(both)
    driver = PipelineDriver1F1B(pipe, cluster)
    mine = driver.instantiate_optimizer(torch.optim.SGD, lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        run(driver, plain, 3)
        assert_gradients(driver, plain)
        update(mine, theirs)


@pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])
def test_hooks_that_come_and_go_between_steps(threads, config):
    """They were dropped: a worker has the parameter as it was when the driver was made."""
    plain, pipe = models(lambda model: None, config)
    driver = PipelineDriver1F1B(pipe, threads)
    run(driver, plain, 3)
    run(driver, plain, 3)
    handles = [
        each.get_parameter("embedding.weight").register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        for each in (plain, pipe)
    ]
    run(driver, plain, 3)
    assert_gradients(driver, plain)
    run(driver, plain, 2)
    for handle in handles:
        handle.remove()
    run(driver, plain, 2)
    assert_gradients(driver, plain)


def test_what_a_hook_holds_may_change_in_the_script(threads):
    plain, pipe = models(lambda model: None)
    mask, factor = torch.ones(8), {"now": 1.0}
    for each in (plain, pipe):
        each.get_parameter("first.bias").register_hook(lambda gradient: gradient * mask * factor["now"])
    driver = PipelineDriver1F1B(pipe, threads)
    for value in (2.0, 3.0):
        run(driver, plain, 2)
        mask[1:3] = value
        run(driver, plain, 2)
        factor["now"] = value
    run(driver, plain, 2)
    assert_gradients(driver, plain)


class Masked(nn.Module):
    """A hook that is a method of the model, and so holds all of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0]))
        self.hook()

    def hook(self):
        self.first.bias.register_hook(self.masked)
        self.second.weight.register_hook(self.where_not_small)
        return self

    def masked(self, gradient):
        return gradient * self.mask

    def where_not_small(self, gradient):
        return gradient * (self.second.weight.abs() > 0.2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.mask)


def test_a_hook_has_the_parameters_as_they_are_on_its_worker(threads):
    model = Masked()
    plain = copy.deepcopy(model).hook()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss(), num_stages=2, split="parameters"), threads)
    mine = driver.instantiate_optimizer(torch.optim.SGD, lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        x, target = torch.randn(6, 4), torch.randn(6, 4)
        driver.run(3, x, target)
        nn.functional.mse_loss(plain(x), target).backward()
        assert_gradients(driver, plain)
        update(mine, theirs)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])
def test_with_a_scaled_loss_a_hook_has_the_scaled_gradient(threads, hook, config):
    """A clamp of the gradient of the loss times 1024 clamps nearly all of it."""
    plain, pipe = models(hook, config)
    driver = PipelineDriver1F1B(pipe, threads)
    mine, theirs = driver.instantiate_optimizer(torch.optim.SGD, lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5)
    my_scaler = driver.instantiate_grad_scaler(init_scale=1024.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        for _ in range(2):
            x, target = tokens(6)
            driver.run(3, x, target)
            scaler.scale(cross_entropy(plain(x), target)).backward()
        my_scaler.step(mine)
        my_scaler.update()
        scaler.step(theirs)
        scaler.update()
        mine.zero_grad()
        theirs.zero_grad()
    assert_state(driver, plain)


@pytest.mark.parametrize("cured", [False, True])
@pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])
def test_a_scaler_sees_what_a_hook_leaves(threads, config, cured):
    def poison(model):
        model.embedding.weight.register_hook(lambda gradient: gradient * torch.inf)
        if cured:
            model.embedding.weight.register_hook(lambda gradient: gradient.nan_to_num(1.0, 1.0, 1.0))

    plain, pipe = models(poison, config)
    driver = PipelineDriver1F1B(pipe, threads)
    optimizer, scaler = driver.instantiate_optimizer(torch.optim.SGD, lr=0.5), driver.instantiate_grad_scaler()
    driver.run(2, *tokens(6))
    before = driver.state_dict()["middle.weight"]
    scaler.step(optimizer)
    assert torch.equal(driver.state_dict()["middle.weight"], before) == (not cured)


def test_a_hook_of_a_parameter_of_the_loss(threads):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))

        def forward(self, output, target):
            return self.weight * nn.functional.mse_loss(output, target)

    loss_fn = Weighted()
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss_fn)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
    driver.run(2, torch.ones(4, 2), torch.ones(4, 2) * 9)
    from pippy.drivers.protocol.state import FetchGradients, TensorLocation

    (found,) = driver.commands.call({1: FetchGradients((TensorLocation("_loss", "weight"),))})[1]
    torch.testing.assert_close(found, torch.tensor(0.1))


def test_a_step_that_fails_leaves_the_gradient_and_sends_hooks_again(threads):
    plain, pipe = models(after_accumulation)
    driver = PipelineDriver1F1B(pipe, threads)
    x, target = tokens(6)
    with pytest.raises(StepError):
        driver.run(2, x, target + 100)
    run(driver, plain, 2)
    with pytest.raises(StepError):
        driver.run(2, x, target + 100)
    run(driver, plain, 2)
    assert_gradients(driver, plain)


def hold_an_optimizer(parameter, seen):
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(parameter):
        update(optimizer)

    parameter.register_post_accumulate_grad_hook(step)


def hold_a_lock(parameter, seen):
    import threading

    lock = threading.Lock()
    parameter.register_hook(lambda gradient: None if lock.locked() else gradient)


@pytest.mark.parametrize(
    ("hook", "said"),
    [(hold_an_optimizer, "driver.instantiate_optimizer"), (hold_a_lock, "cannot pickle '_thread.lock'")],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(threads, hook, said):
    _, pipe = models(lambda model: None)
    driver = PipelineDriver1F1B(pipe, threads)
    hook(pipe.get_parameter("first.weight"), [])
    number = driver.session.log.number
    with pytest.raises(DriverError, match=f"'first.weight': a gradient hook runs on .*{said}"):
        driver.run(2, *tokens(6))
    assert driver.session.log.number == number


def note(parameter, seen):
    parameter.register_hook(lambda gradient: seen.append(gradient.norm()))


def write(parameter, seen):
    parameter.register_hook(lambda gradient: gradient + parameter.add_(1.0))


def elsewhere(parameter, seen, pipe):
    other = pipe.get_parameter("last.weight")
    parameter.register_hook(lambda gradient: other * 2)


WRONG = {
    "notes": (note, r"gradient hook of 'first.weight' changes an object that it refers to.*driver.gradients\(\)"),
    "writes": (write, "gradient hook of 'first.weight' changes the parameter"),
    "fails": (
        lambda p, seen: p.register_hook(lambda g: 1 / 0),
        "gradient hook of 'first.weight' failed: ZeroDivisionError",
    ),
    "another shape": (lambda p, seen: p.register_hook(lambda g: g[0]), "gradient hook of 'first.weight' failed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_hooks_that_are_refused_by_name_when_they_run(threads, what):
    plain, pipe = models(lambda model: None)
    driver = PipelineDriver1F1B(pipe, threads)
    run(driver, plain, 2)
    hook, said = WRONG[what]
    hook(pipe.get_parameter("first.weight"), [])
    before = driver.state_dict()
    with pytest.raises(StepError, match=said):
        driver.run(2, *tokens(6))
    for name, tensor in driver.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert_gradients(driver, plain)


def test_a_hook_that_computes_with_a_parameter_of_another_worker_is_refused(threads):
    _, pipe = models(lambda model: None)
    elsewhere(pipe.get_parameter("first.weight"), [], pipe)
    with pytest.raises(
        DriverError, match=r"<closure .other.>, defined at .* is .last.weight., which submod_0 does not hold"
    ):
        PipelineDriver1F1B(pipe, threads).run(2, *tokens(6))
