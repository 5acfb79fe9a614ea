"""Parameters of 16 bits with copies of 32 in the optimizer: what plain PyTorch computes when it is written out."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, pipeline
from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.driver.drivers import PipelineDriver
from tests.drivers.models import Chain, TiedLanguage

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


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(dtype, rows=8):
    return torch.randn(rows, 8, dtype=dtype), torch.randn(rows, 8, dtype=dtype)


def accumulate(model, x, target, chunks):
    """The gradients of a mini-batch in micro-batches of one size."""
    for rows, its in zip(x.chunk(chunks), target.chunk(chunks)):
        F.mse_loss(model(rows), its).backward(torch.tensor(1 / chunks, dtype=x.dtype))


def assert_same(driver, plain):
    state = plain.state_dict()
    for name, tensor in driver.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name


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
        assert_same(driver, plain)
    for name, state in mine.state_dict()["state"].items():
        assert torch.equal(state["master_parameter"], theirs.masters[name])
        assert torch.equal(state["exp_avg"], theirs.optimizer.state[theirs.masters[name]]["exp_avg"])
    driver.close()


def saved(state):
    """A state as it is after it was saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def steps(driver, optimizer, batches):
    for x, target in batches:
        driver.run(1, x, target)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_goes_on_from_saved_states_to_the_bit(threads, model_first):
    """In either order; copies of a replicated parameter stay alike; and a float32 norm has no copy."""
    model = TiedLanguage().to(torch.bfloat16)
    model.norm.float()
    model.norm.register_forward_pre_hook(lambda module, args: args[0].float())
    model.norm.register_forward_hook(lambda module, args, output: output.bfloat16())
    batches = [(torch.randint(13, (4, 5)), torch.randint(13, (4, 5))) for _ in range(6)]

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
    for name, tensor in driver.state_dict().items():
        assert torch.equal(tensor, again[driver].state_dict()[name])
    one, other = (
        state_on(driver, optimizer, worker, place) for worker, place in driver.placed.locations("embedding.weight")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    for each in again:
        if each is not optimizer:
            each.close()


def state_on(driver, optimizer, worker, place):
    from pippy.drivers.protocol.state import GiveState

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
    assert_same(driver, plain)
    for name, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["master_parameter"], theirs.masters[name])
    driver.close()


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
    driver.close()
