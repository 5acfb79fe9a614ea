"""What belongs to plain training in one process, used beside a driver: each says what to do, and the advice works."""

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pippy import TrivialLossWrapper, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, OptimizerError, StepError
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.ir.base.errors import PippyWarning
from tests.drivers.models import Chain, TiedLanguage, tokens

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.fixture
def model():
    return Chain(2)


@pytest.fixture
def driver(model, threads):
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    yield driver
    driver.close()


def batch():
    return torch.randn(4, 8), torch.randn(4, 8)


def test_an_optimizer_of_this_process_that_updates_nothing_says_so(model, driver):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # nobody has trained yet
    x, target = batch()
    driver.run(2, x, target)
    with pytest.raises(OptimizerError, match=r"update nothing.*driver.instantiate_optimizer\(torch.optim.SGD"):
        optimizer.step()
    first = driver.run(2, x, target)
    advised = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    advised.step()
    assert driver.run(2, x, target) < first


def test_an_optimizer_of_this_process_with_gradients_of_its_own_is_left_alone(model, driver):
    x, target = batch()
    driver.run(2, x, target)
    before = model.layers[0].weight.clone()
    F.mse_loss(model(x), target).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.layers[0].weight, before)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # another model's


ASKS = {
    "clip_grad_norm_": (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda driver: driver.clip_grad_norm_(1.0),
    ),
    "clip_grad_value_": (
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda driver: driver.clip_grad_value_(1.0),
    ),
    "zero_grad": (lambda model: model.zero_grad(), lambda driver: driver.zero_grad()),
    "zero_grad of an optimizer": (
        lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
        lambda driver: driver.zero_grad(),
    ),
    "a read": (
        lambda model: [each.grad for each in model.parameters()],
        lambda driver: driver.gradients(),
    ),
    "a written one": (
        lambda model: setattr(model.layers[0].weight, "grad", None),
        lambda driver: driver.get_grad("layers.0.weight"),
    ),
}


@pytest.mark.parametrize("asks, instead", ASKS.values(), ids=ASKS)
def test_who_asks_for_gradients_in_this_process_is_told_what_to_call(model, driver, asks, instead):
    of_none = (
        asks if asks is not ASKS["clip_grad_value_"][0] else torch.is_tensor
    )  # torch cannot clip the values of none
    of_none(model)  # nobody has trained yet
    driver.run(2, *batch())
    with pytest.raises(
        DriverError, match=r"\.grad of 'layers\.0\.weight' in this process.*call driver\.\w+\("
    ) as raised:
        asks(model)
    assert re.search(r"call driver\.(\w+)\(", str(raised.value))[1] in instead.__code__.co_names + ("gradients",)
    assert instead(driver) is None or driver.get_grad("layers.0.weight") is not None
    of_none(copy.deepcopy(model))
    driver.zero_grad()
    of_none(model)


def test_gradients_of_a_step_that_failed_are_not_there(model, driver):
    with pytest.raises(StepError):
        driver.run(2, torch.randn(4, 3), torch.randn(4, 8))
    model.zero_grad()


def test_gradients_that_some_optimizer_dropped_are_not_there(model, driver):
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, param_groups=[{"params": "layers.0.*"}], lr=0.1)
    driver.run(2, *batch())
    optimizer.zero_grad()
    assert model.layers[0].weight.grad is None
    with pytest.raises(DriverError, match=r"'layers\.1\.weight'"):
        print(model.layers[1].weight.grad)


def test_torchs_own_questions_are_answered(model, driver):
    driver.run(2, *batch())
    stream = io.BytesIO()
    torch.save(model, stream)
    model.to("cpu").double().requires_grad_()
    with FakeTensorMode() as fake:
        assert fake.from_tensor(model.layers[0].weight).shape == (8, 8)
    PipelineDriver1F1B(pipeline(model, nn.MSELoss()), driver.cluster)


def test_parameters_are_as_ever_once_no_driver_is_there(model, threads):
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    driver.run(2, *batch())
    assert "grad" in vars(nn.Parameter)
    driver.close()
    del driver
    gc.collect()
    assert "grad" not in vars(nn.Parameter)
    model.zero_grad()


def test_the_backward_of_a_loss_says_that_the_gradients_are_there(driver):
    x, target = batch()
    loss = driver.run(2, x, target)
    with pytest.raises(DriverError, match=r"is not needed after driver.run.*step\(\)"):
        loss.backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        driver.run(2, x, target).backward()


def test_in_all_else_the_loss_is_a_tensor_like_others(driver):
    loss = driver.run(2, *batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(loss) == loss.item() == loss.numpy() == copy.deepcopy(loss).item()
    assert not loss.requires_grad and type(loss) is torch.Tensor
    stream = io.BytesIO()
    torch.save({"loss": loss}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)["loss"]
    assert torch.equal(loaded, loss) and not vars(loaded)


class ReturnsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, target):
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        return F.mse_loss(x, target), x


def test_the_backward_of_a_loss_beside_outputs(threads):
    driver = PipelineDriver1F1B(pipeline(ReturnsLoss(), output_loss_value_spec=(True, False)), threads)
    with pytest.raises(DriverError, match=r"is not needed after driver\.run"):
        driver.run(2, *batch())[0].backward()


def test_copy_to_gives_the_model_what_was_trained(threads):
    model = TiedLanguage()
    model.register_buffer("fixed", torch.ones(3), persistent=False)
    driver = PipelineDriver1F1B(pipeline(model, lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    driver.run(2, *tokens())
    optimizer.step()
    before, trained = copy.deepcopy(dict(model.named_parameters())), driver.state_dict()
    assert not torch.equal(before["first.weight"], trained["first.weight"])
    other = TiedLanguage()
    other.register_buffer("fixed", torch.ones(3), persistent=False)
    for each in (model, other):
        driver.copy_to(each)
        for name, tensor in each.state_dict().items():
            assert torch.equal(tensor, trained[name])
    with pytest.raises(DriverError, match="nothing was copied; they differ in"):
        driver.copy_to(TiedLanguage(width=4))


def train(driver, optimizer):
    driver.run(2, *batch())
    optimizer.step()


@contextmanager
def said_once(what):
    with pytest.warns(PippyWarning, match=what) as caught:
        yield
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("part", ["model", "pipe", "a layer"])
def test_a_state_dict_that_is_not_what_was_trained_says_so_once_for_each_update(part, model, driver):
    read = {"model": model, "pipe": driver.pipe, "a layer": model.layers[1]}[part]
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    driver.run(2, *batch())
    read.state_dict()
    for _ in range(2):
        train(driver, optimizer)
        with said_once(r"does not use the trained parameters.*driver.copy_to\(model\).*driver.state_dict\(\)"):
            read.state_dict()
        read.state_dict()
    train(driver, optimizer)
    trained = driver.state_dict()
    driver.copy_to(model)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    read.state_dict()
    train(driver, optimizer)
    driver.load_state_dict(trained)
    read.state_dict()
    train(driver, optimizer)
    driver.pipe.load_state_dict(trained)  # it reads the names of the state, and loads nothing on workers
    driver.copy_to(Chain(2))
    with said_once("does not use the trained parameters"):
        read.state_dict()


@pytest.mark.parametrize("called", ["model", "pipe"])
def test_a_call_of_a_model_that_is_not_what_was_trained_says_so_once_for_each_update(called, model, driver):
    x, target = batch()
    call = {"model": lambda: model(x), "pipe": lambda: driver.pipe(x, target)}[called]
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    expected, hooks = call(), len(model._forward_pre_hooks)
    for _ in range(2):
        train(driver, optimizer)
        with said_once(
            r"this call of the model does not use the trained parameters.*driver.copy_to\(model\).*driver.run"
        ):
            assert torch.equal(call(), expected)
        call()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    train(driver, optimizer)
    assert all(torch.equal(each(x), copies[0](x)) for each in copies) and len(model._forward_pre_hooks) == hooks
    trained = driver.state_dict()
    before = set(model.__dict__)
    model.load_state_dict(trained)
    assert not torch.equal(call(), expected)
    driver.copy_to(model)
    assert not torch.equal(call(), expected) and before - set(model.__dict__) == {"_compiled_call_impl"}


def test_a_model_inside_of_a_loss_wrapper_says_so_too(model, threads):
    driver = PipelineDriver1F1B(pipeline(TrivialLossWrapper(model, nn.MSELoss())), threads)
    x, target = batch()
    optimizer, expected = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), model(x)
    train(driver, optimizer)
    with said_once(r"this call of the model does not use the trained parameters.*driver.copy_to\(model\)"):
        assert torch.equal(model(x), expected)
    driver.copy_to(model)
    assert torch.equal(model.layers[0].weight, driver.state_dict()["module.layers.0.weight"])
    assert not torch.equal(model(x), expected)


def test_a_closed_or_forgotten_driver_says_nothing_of_a_state_dict(model, threads):
    for close in (True, False):
        driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        train(driver, optimizer)
        reference = weakref.ref(driver)
        assert model._state_dict_pre_hooks
        if close:
            driver.close()
            assert not model._state_dict_pre_hooks
        del driver, optimizer
        gc.collect()
        assert reference() is None and not model._state_dict_pre_hooks
        model.state_dict()
        model(batch()[0])


def test_a_model_that_was_trained_on_workers_can_be_copied_and_pickled(model, driver):
    train(driver, driver.instantiate_optimizer(torch.optim.SGD, lr=0.1))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(driver.pipe)):
        assert other.state_dict().keys() == dict(model.named_parameters()).keys()
    assert b"stale" not in pickle.dumps(model), "the file can be read where pippy is not"
