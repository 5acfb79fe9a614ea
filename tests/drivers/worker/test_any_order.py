"""Any order of the calls of a training script gives what plain PyTorch gives."""

import copy

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from pippy import MultiUseParameterConfig, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from tests.drivers.test_hunted import Tied, loss_fn
from tests.drivers.thread_cluster import thread_cluster


class Training(RuleBasedStateMachine):
    """The driver and the plain model take the same calls, and are looked at now and then."""

    @initialize(config=st.sampled_from(MultiUseParameterConfig), workers=st.integers(2, 3), momentum=st.booleans())
    def begin(self, config, workers, momentum):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        self.opened = thread_cluster(workers)
        model = Tied().eval()
        self.plain = copy.deepcopy(model)
        pipe = pipeline(model, loss_fn, multi_use_param_spec=config)
        self.driver = PipelineDriver1F1B(pipe, self.opened.__enter__())
        options = {"lr": 0.05, "momentum": 0.9 if momentum else 0.0}
        self.mine = self.driver.instantiate_optimizer(torch.optim.SGD, **options)
        self.theirs = torch.optim.SGD(self.plain.parameters(), **options)
        self.x, self.target = torch.randn(5, 8), torch.randn(5, 8)
        self.running = []

    def teardown(self):
        if hasattr(self, "opened"):
            self.opened.__exit__(None, None, None)
        torch.set_default_dtype(torch.float32)  # only now: a step may be under way in this process

    def plain_run(self):
        loss = loss_fn(self.plain(self.x), self.target)
        loss.backward()
        return loss.detach()

    def close(self, mine, theirs):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)

    @rule(chunks=st.integers(1, 3))
    def run(self, chunks):
        self.close(self.driver.run(chunks, self.x, self.target), self.plain_run())

    @rule(chunks=st.integers(1, 3))
    def dispatch(self, chunks):
        self.running.append((self.driver.run_async(chunks, self.x, self.target), self.plain_run()))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def take(self, data):
        running, loss = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.close(running.result(), loss)

    @rule()
    def fail(self):
        """A run that fails; those before it are waited for first, as it would take them with it."""
        while self.running:
            running, loss = self.running.pop()
            self.close(running.result(), loss)
        try:
            self.driver.run(2, self.x + 100, self.target)
        except StepError:
            return
        raise AssertionError("it should have failed")

    @rule()
    def evaluate(self):
        with torch.no_grad():
            self.close(self.driver.run(2, self.x, self.target), loss_fn(self.plain(self.x), self.target))

    @rule()
    def step(self):
        self.mine.step()
        self.theirs.step()

    @rule(by_driver=st.booleans())
    def zero_grad(self, by_driver):
        (self.driver if by_driver else self.mine).zero_grad()
        self.theirs.zero_grad()

    @rule()
    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.3)
        self.close(self.driver.clip_grad_norm_(0.3), norm.to(torch.float64))

    @rule(name=st.sampled_from(["weight", "layer.weight", "layer.bias"]))
    def look(self, name):
        mine, theirs = self.driver.get_grad(name), self.plain.get_parameter(name).grad
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            self.close(mine, theirs)

    @rule(rate=st.sampled_from([0.01, 0.1]))
    def change_rate(self, rate):
        for each in (self.mine, self.theirs):
            each.param_groups[0]["lr"] = rate

    @rule()
    def compare(self):
        for name, tensor in self.driver.state_dict().items():
            self.close(tensor, self.plain.state_dict()[name])

    @rule()
    def load(self):
        state = {name: torch.randn_like(tensor) for name, tensor in self.plain.state_dict().items()}
        self.driver.load_state_dict(state)
        self.plain.load_state_dict(state)

    @rule()
    def save_and_load_the_optimizer(self):
        self.mine.load_state_dict(self.mine.state_dict())
        self.theirs.load_state_dict(self.theirs.state_dict())


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=12, stateful_step_count=20, deadline=None, derandomize=True)
