"""Flags that may change at any time: training of modules, requires_grad of parameters; stages that train nothing."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.driver.drivers import PipelineDriverFillDrain
from pippy.ir.base.errors import ModeError, StageError
from tests.comparisons import Beside, assert_loss, assert_same_gradients
from tests.drivers.models import Chain, TiedLanguage, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


# requires_grad


def freeze(name, *models, to=False):
    for model in models:
        for own, parameter in model.named_parameters():
            if own.startswith(name):
                parameter.requires_grad_(to)


def test_a_parameter_that_is_frozen_after_the_driver_was_made_does_not_move(threads):
    both = Beside(threads, Chain(3))
    both.optimize(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for frozen, to in (("layers.1", False), ("layers.0", False), ("layers.1.bias", True), ("layers", True)):
        freeze(frozen, both.model, both.plain, to=to)
        both.step(3, torch.randn(7, 8), torch.randn(7, 8))
        both.update(zero_grad=to)  # else what is frozen has a gradient from before, and moves once more, as in torch
        both.same_state()


@pytest.mark.parametrize("config", MultiUseParameterConfig)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "fill_drain"])
def test_parameters_that_freeze_and_thaw_in_any_order(threads, config, schedule):
    pipe = {"multi_use_param_spec": config}
    both = Beside(threads, TiedLanguage(), cross_entropy, pipe=pipe, schedule=schedule)
    both.optimize(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    names, choose = [name for name, _ in both.plain.named_parameters()], random.Random(schedule)
    for step in range(8):
        for name in choose.sample(names, 3):
            freeze(name, both.model, both.plain, to=choose.random() < 0.4 or name == "last.weight")
        both.step(3, *tokens())
        both.update(zero_grad=step % 3 > 0)
    both.same_state()


@pytest.mark.parametrize("single", [False, True])
def test_stages_that_train_nothing_any_more_and_train_again(threads, single):
    both = Beside(threads, Chain(4), kind=PipelineDriverFillDrain, single_loss=single)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    for trained in ("0123", "3", "01", "2", "0123"):
        for layer in range(4):
            freeze(f"layers.{layer}", both.model, both.plain, to=str(layer) in trained)
        both.zero_grad()
        both.step(2, x, target)
    freeze("layers", both.model)
    with pytest.raises(StepError, match=r"every parameter that it depends on is frozen(.|\n)*no_grad"):
        both.driver.run(2, x, target)
    with torch.no_grad():  # as the message advises
        expected = F.mse_loss(both.plain(x), target)
        torch.testing.assert_close(both.driver.run(2, x, target), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_the_reference_follows_requires_grad(config):
    model = TiedLanguage()
    plain, pipe = copy.deepcopy(model), pipeline(model, cross_entropy, multi_use_param_spec=config)
    for name, to in (("embedding", False), ("first", False), ("embedding", True), ("norm", False)):
        freeze(name, model, plain, to=to)
        x, target = tokens()
        assert_loss(pipe(x, target), cross_entropy(plain(x), target), rtol=1e-10, atol=0)
        assert_same_gradients(pipe, plain)
    freeze("", model)
    with pytest.raises(StageError, match="frozen"):
        pipe(x, target)


# training


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(x), 0.5, self.training)


class Dropping(nn.Module):
    """Reads flags in the forward of two modules, calls leaves, and calls one of them in two stages."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.norm = nn.Linear(8, 8), Inner(), nn.BatchNorm1d(8, affine=False, momentum=None)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x):
        x = F.dropout(self.inner(self.shared(self.first(x))), 0.25, self.training)
        pipe_split()
        return self.norm(self.shared(x))


SWITCHES = {
    "the model": lambda model, pipe: model,
    "the Pipe": lambda model, pipe: pipe,
    "a part of the model": lambda model, pipe: model.inner,
    "a part of the Pipe": lambda model, pipe: pipe.inner,
    "a leaf": lambda model, pipe: model.shared,
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SWITCHES, SWITCHES)))
def test_whoever_is_switched_all_that_stands_for_it_is(threads, first, second):
    model = Dropping()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    driver = PipelineDriverFillDrain(pipe, threads)
    x = torch.randn(6, 8)
    for mode, which in ((False, first), (True, second), (False, second), (True, first), (False, first)):
        SWITCHES[which](model, pipe).train(mode)
        SWITCHES[which](plain, plain).train(mode)
        mixed = plain.training != plain.inner.training  # their forwards read it: it is not known what they do together
        for run in (pipe, lambda x: driver.run(1, x)) if mixed else ():
            with pytest.raises(ModeError, match=r"in train mode \((.*)\) and some in eval mode \((.*)\)"):
                run(x)
        with torch.no_grad():
            torch.manual_seed(0)
            found = (pipeline(model) if mixed else pipe)(x)  # as the message advises
            torch.manual_seed(0)
            torch.testing.assert_close(found, plain(x), rtol=1e-12, atol=0)
            if not mixed:
                driver.load_state_dict(model.state_dict())  # the run in this process has changed statistics
                driver.run(1, x)
                assert driver.commands.flags == driver.placed.flags()
        names = dict(model.named_modules())
        assert {name: each.training for name, each in names.items()} == {
            name: each.training for name, each in plain.named_modules()
        }
        assert {name: each.training for name, each in pipe.named_modules()} == {
            name: each.training for name, each in plain.named_modules()
        }


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) if self.training else self.b(x).sin()


def test_a_model_that_is_bound_to_its_mode_refuses_the_other_whoever_is_switched(threads):
    model, x = Auxiliary(), torch.randn(2, 4)
    pipe = pipeline(model)
    driver = PipelineDriverFillDrain(pipe, threads)
    for run in (pipe, lambda x: driver.run(1, x)):
        model.eval()
        before = list(threads.session.counts)
        with pytest.raises(ModeError, match=r"not traced in eval mode(.|\n)*pipe.train\(\)"):
            run(x)
        assert threads.session.counts == before
        pipe.train()  # as the message advises
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_of_a_pipe_follows_its_own_parts_only(way):
    model, x = Dropping(), torch.randn(6, 8)
    pipe = pipeline(model)
    other = way(pipe)
    other.inner.eval(), other.eval()
    assert model.training and pipe.training and model.inner.training
    assert torch.equal(other(x), other(x))
    model.eval()
    other.train()
    assert not torch.equal(other(x), other(x))


def test_a_pipe_outlives_its_model():
    model, x = Dropping(), torch.randn(6, 8)
    pipe = pipeline(model)
    model.eval()
    expected = model(x)
    assert torch.equal(pipe(x), expected)
    del model
    pipe.train()(x)
    pipe.norm.eval(), pipe.eval()
    assert pipe(x).shape == expected.shape


# Stages that train nothing: where no gradient is needed none is computed or sent.


class Adapted(nn.Module):
    """A frozen layer beside two small ones that are trained, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


KINDS = {
    "t": lambda: nn.Linear(4, 4),
    "f": lambda: nn.Linear(4, 4).requires_grad_(False),
    "L": Adapted,
    "n": nn.Tanh,
}


class Stages(nn.Module):
    """A stage for each letter: trained, frozen, with adapters, or with no parameters. The last uses what the first makes."""

    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for kind in kinds)

    def forward(self, x):
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            pipe_split()
            x = torch.tanh(layer(x))
        pipe_split()
        return self.layers[-1](x + first)


def sent(cluster):
    """How many bytes the workers have sent to each other."""
    transports = [worker.context.transport for worker in cluster.engine.workers]
    return sum(to.bytes for each in transports for to in each.sent.values())


@pytest.mark.parametrize(
    ("kinds", "gradients"), [("tttt", 4), ("fttt", 2), ("fnLf", 1), ("ffft", 0), ("tfft", 4), ("LfnL", 4), ("nfLL", 1)]
)
def test_no_gradient_is_sent_where_none_is_needed(threads, kinds, gradients):
    model = Stages(kinds)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for schedule in ("1f1b", "zb_h1", "fill_drain"):
        both = Beside(threads, copy.deepcopy(model), schedule=schedule, out_of_order=schedule == "zb_h1")
        groups = [{"params": trained}]
        mine = both.driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1, param_groups=groups)
        both.optimizers = [mine, torch.optim.AdamW([both.plain.get_parameter(name) for name in trained], lr=0.1)]
        for _ in range(2):
            both.step(3, torch.randn(7, 4), torch.randn(7, 4))
            norm = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.1)
            torch.testing.assert_close(both.driver.clip_grad_norm_(0.1), norm, check_stride=False)
            both.update()
        both.same_state()
        before = sent(threads)
        both.driver.run(3, torch.randn(7, 4), torch.randn(7, 4))
        assert sent(threads) - before == (4 + gradients) * 7 * 4 * 8, "a message without a gradient has no bytes"
        both.driver.close()


def test_a_stage_that_freezes_and_thaws(threads):
    both = Beside(threads, Stages("tttt"), check=False)
    for frozen, gradients in (((), 4), ((0,), 2), ((0, 1), 1), ((0,), 2), ((), 4)):
        for model in (both.model, both.plain):
            for number, layer in enumerate(model.layers):
                layer.requires_grad_(number not in frozen)
        both.zero_grad()
        before = sent(threads)
        both.run(3, torch.randn(7, 4), torch.randn(7, 4))
        assert sent(threads) - before == (4 + gradients) * 7 * 4 * 8
        both.same_gradients()


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_a_frozen_parameter_that_several_stages_use(threads, config):
    model = TiedLanguage()
    model.embedding.requires_grad_(False)
    model.first.requires_grad_(False)
    both = Beside(threads, model, cross_entropy, pipe={"multi_use_param_spec": config}, check=False)
    both.step(3, *tokens(6))
