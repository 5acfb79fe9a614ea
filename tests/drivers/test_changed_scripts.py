"""What a script changes after `pipeline()` counts from the next step on, as in plain PyTorch, or is refused with advice."""

import copy

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import DriverError
from pippy.ir.base.errors import ModeError
from pippy.ir.base.names import named_state
from pippy.ir.trace.tracer import PipeTracer
from tests.drivers.changed_scripts import (
    FOLLOWED,
    LOSSES,
    REFUSED,
    Net,
    Whole,
    batch,
    plain_script,
    reset,
    trained,
)

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class KeepsWhole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Whole) or super().is_leaf_module(m, module_qualified_name)


class OnWorkers:
    """The script with a driver. It does once as a refusal advises."""

    def __init__(self, cluster, change, model, refused=None, **options):
        self.cluster, self.change, self.refused = cluster, change, refused
        self.model, self.loss, self.options = model, LOSSES[change.loss](), options
        self.told = None
        self.make_pipe()

    def make_pipe(self):
        self.pipe = pipeline(self.model, self.loss, tracer=KeepsWhole())
        self.make_driver()

    def make_driver(self):
        self.driver = PipelineDriver(self.pipe, self.cluster, schedule="1f1b", **self.options)
        self.optimizer = self.driver.instantiate_optimizer(self.change.optimizer, **self.change.options)
        self.gradients, self.zero_grad = self.driver.gradients, self.driver.zero_grad

    def step(self):
        x, target = batch()
        if self.refused is None or self.told is not None:
            return self.driver.run(3, x, target)
        try:
            return self.driver.run(3, x, target)
        except (ModeError, DriverError) as error:
            self.told = str(error)
        with pytest.raises((ModeError, DriverError), match=self.refused.match):  # it is refused again
            self.driver.run(3, x, target)
        getattr(self, f"follow_{self.refused.advice}")()
        return self.driver.run(3, x, target)

    def follow_load(self):
        name = self.told.partition("'")[2].partition("'")[0]
        tensor = dict(named_state(self.model))[name]
        get = "get_parameter" if isinstance(tensor, nn.Parameter) else "get_buffer"
        assert f"driver.load_state_dict({{'{name}': model.{get}('{name}')}}, strict=False)" in self.told
        self.driver.load_state_dict({name: tensor}, strict=False)

    def follow_driver(self):
        assert "make the driver again" in self.told
        self.go_on(self.make_driver)

    def follow_pipeline(self):
        assert "call pipeline() again, and make the driver of what it gives" in self.told
        self.go_on(self.make_pipe)

    def go_on(self, make):
        assert "driver.copy_to(model)" in self.told
        if self.refused.undo is None:
            self.driver.copy_to(self.model)
        else:  # "before a part is replaced"
            self.refused.undo(self)
            self.driver.copy_to(self.model)
            self.change.act(self)
        state = self.optimizer.state_dict()
        make()
        names = [name for name, _ in self.model.named_parameters()]
        replaced = {"first.weight"} if "'first.weight'" in self.told else set()
        kept = {name: each for name, each in state["state"].items() if name in names and name not in replaced}
        groups = [{**state["param_groups"][0], "params": names}]
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})


def numbers(model):
    return {name: each.detach() for name, each in model.named_parameters()}


def assert_as_plain(found, change, model):
    reset()
    plain = plain_script(change, model)
    losses, parameters = trained(plain, change, [], lambda: numbers(plain.model))
    torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=1e-12)
    for name, expected in parameters.items() if "average" not in plain.model._modules else ():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-10, atol=1e-12)


@pytest.fixture(autouse=True)
def as_at_first():
    reset()
    yield
    reset()


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED)
def test_a_change_is_followed(threads, change):
    """Each but the modes of parts, what is frozen, and what nothing reads was ignored without a word."""
    model = Net()
    before = copy.deepcopy(model)
    script = OnWorkers(threads, change, model, check=False)
    found = trained(script, change, [], lambda: script.driver.state_dict())
    assert not script.told
    assert_as_plain(found, change, before)


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_change_that_cannot_be_followed_is_refused_and_the_advice_works(threads, refused):
    """Each was ignored without a word."""
    model = Net()
    before = copy.deepcopy(model)
    script = OnWorkers(threads, refused.change, model, refused, check=False)
    found = trained(script, refused.change, [], lambda: script.driver.state_dict())
    assert script.told is not None
    assert_as_plain(found, refused.change, before)
