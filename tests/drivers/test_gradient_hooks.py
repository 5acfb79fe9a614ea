"""Hooks on parameters act as in the plain model: once in a step, on the gradient of the whole mini-batch."""

import copy

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from tests.comparisons import Beside, assert_loss, update
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


def all_of_them(model):
    clamp(model)
    after_accumulation(model)


HOOKS = [train_some_rows, clamp, normalize, after_accumulation, all_of_them]
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE
BOTH_WAYS = pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])


def no_hook(model):
    pass


def models(hook, config=REPLICATE):
    """The plain model and its twin, both with hooks, and the options of `pipeline()`."""
    model = TiedLanguage()
    plain = copy.deepcopy(model)
    hook(plain)
    hook(model)
    return {"model": model, "plain": plain, "loss": cross_entropy, "pipe": {"multi_use_param_spec": config}}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 3), ("fill_drain", 4), ("zb_h1", 2), ("interleaved_1f1b", 6)]
)
def test_a_hook_has_the_gradient_of_the_mini_batch(threads, hook, schedule, chunks):
    config = [TRANSMIT, REPLICATE][
        (HOOKS.index(hook) + chunks // 2) % 2
    ]  # each with every hook, and with every schedule
    workers = 2 if schedule == "interleaved_1f1b" else 4
    both = Beside(threads, **models(hook, config), schedule=schedule, world_size=workers)
    for _ in range(2):  # gradients accumulate, and a hook has those of its own backward
        both.run(chunks, *tokens(7))
    both.same_gradients()


@pytest.mark.parametrize("hook", HOOKS)
@BOTH_WAYS
def test_the_pipe_in_this_process_calls_it_once(hook, config):
    made = models(hook, config)
    plain, pipe = made["plain"], pipeline(made["model"], cross_entropy, **made["pipe"])
    for _ in range(2):
        x, target = tokens(6)
        assert_loss(pipe(x, target), cross_entropy(plain(x), target))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("divided", [False, True])
def test_replicas_call_it_once_with_the_sum(threads, hook, divided):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    for parameter in (*model.parameters(), *plain.parameters()):
        if hook is after_accumulation:
            parameter.register_post_accumulate_grad_hook(limit)
        else:
            parameter.register_hook(lambda gradient: gradient / gradient.norm())
    both = Beside(threads, model, plain=plain, pipe={"split": ["2"]}, replicas=2)
    mine = both.driver.instantiate_optimizer(torch.optim.Adam, lr=0.1, divide_state=divided)
    both.optimizers = [mine, torch.optim.Adam(plain.parameters(), lr=0.1)]
    for _ in range(3):
        for _ in range(2):
            both.run(4, torch.randn(8, 4), torch.randn(8, 3))
        both.update()
    both.same_state()


def test_workers_in_processes(cluster):
    both = Beside(cluster, **models(all_of_them))
    both.optimize(torch.optim.SGD, lr=0.5)
    for _ in range(3):
        both.step(3, *tokens(6))
        both.update()


@BOTH_WAYS
def test_hooks_that_come_and_go_between_steps(threads, config):
    """They were dropped: a worker has the parameter as it was when the driver was made."""
    both = Beside(threads, **models(no_hook, config))
    both.run(3, *tokens(6))
    both.run(3, *tokens(6))
    handles = [
        each.get_parameter("embedding.weight").register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        for each in (both.plain, both.pipe)
    ]
    both.step(3, *tokens(6))
    both.run(2, *tokens(6))
    for handle in handles:
        handle.remove()
    both.step(2, *tokens(6))


def test_what_a_hook_holds_may_change_in_the_script(threads):
    both = Beside(threads, **models(no_hook))
    mask, factor = torch.ones(8), {"now": 1.0}
    for each in (both.plain, both.pipe):
        each.get_parameter("first.bias").register_hook(lambda gradient: gradient * mask * factor["now"])
    for value in (2.0, 3.0):
        both.run(2, *tokens(6))
        mask[1:3] = value
        both.run(2, *tokens(6))
        factor["now"] = value
    both.step(2, *tokens(6))


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
    both = Beside(threads, model, plain=plain, pipe={"num_stages": 2, "split": "parameters"})
    both.optimize(torch.optim.SGD, lr=0.5)
    for _ in range(3):
        both.step(3, torch.randn(6, 4), torch.randn(6, 4))
        both.update()


@pytest.mark.parametrize("hook", HOOKS)
@BOTH_WAYS
def test_with_a_scaled_loss_a_hook_has_the_scaled_gradient(threads, hook, config):
    """A clamp of the gradient of the loss times 1024 clamps nearly all of it."""
    both = Beside(threads, **models(hook, config))
    both.optimize(torch.optim.SGD, lr=0.5)
    scalers = [both.driver.instantiate_grad_scaler(init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)]
    for _ in range(2):
        for _ in range(2):
            x, target = tokens(6)
            both.driver.run(3, x, target)
            scalers[1].scale(cross_entropy(both.plain(x), target)).backward()
        for scaler, optimizer in zip(scalers, both.optimizers):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    both.same_state()


@pytest.mark.parametrize("cured", [False, True])
@BOTH_WAYS
def test_a_scaler_sees_what_a_hook_leaves(threads, config, cured):
    def poison(model):
        model.embedding.weight.register_hook(lambda gradient: gradient * torch.inf)
        if cured:
            model.embedding.weight.register_hook(lambda gradient: gradient.nan_to_num(1.0, 1.0, 1.0))

    driver = Beside(threads, **models(poison, config)).driver
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
    both = Beside(threads, **models(after_accumulation))
    x, target = tokens(6)
    for _ in range(2):
        with pytest.raises(StepError):
            both.driver.run(2, x, target + 100)
        both.run(2, *tokens(6))
    both.same_gradients()


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
    both = Beside(threads, **models(no_hook))
    hook(both.pipe.get_parameter("first.weight"), [])
    number = both.driver.session.log.number
    with pytest.raises(DriverError, match=f"'first.weight': a gradient hook runs on .*{said}"):
        both.driver.run(2, *tokens(6))
    assert both.driver.session.log.number == number


def note(parameter, seen):
    parameter.register_hook(lambda gradient: seen.append(gradient.norm()))


def write(parameter, seen):
    parameter.register_hook(lambda gradient: gradient + parameter.add_(1.0))


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
    both = Beside(threads, **models(no_hook))
    both.run(2, *tokens(6))
    hook, said = WRONG[what]
    hook(both.pipe.get_parameter("first.weight"), [])
    before = both.driver.state_dict()
    with pytest.raises(StepError, match=said):
        both.driver.run(2, *tokens(6))
    for name, tensor in both.driver.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    both.same_gradients()


def test_a_hook_that_computes_with_a_parameter_of_another_worker_is_refused(threads):
    pipe = pipeline(TiedLanguage(), cross_entropy, multi_use_param_spec=REPLICATE)
    other = pipe.get_parameter("last.weight")
    pipe.get_parameter("first.weight").register_hook(lambda gradient: other * 2)
    with pytest.raises(
        DriverError, match=r"<closure .other.>, defined at .* is .last.weight., which submod_0 does not hold"
    ):
        PipelineDriver1F1B(pipe, threads).run(2, *tokens(6))
