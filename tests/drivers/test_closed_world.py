"""Whatever code reaches of the model by plain references has the plain model's gradients on workers, or is refused by name.

The truth is plain PyTorch, in float64.
"""

import re

import pytest
import torch
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, PipelineDriver, PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.ir.base.errors import LossError, SharedParameterError
from tests.drivers import closed_world
from tests.drivers.closed_world import Net, decay_of, gradients, made, plain

pytestmark = pytest.mark.usefixtures("in_float64")

FOLLOWED = closed_world.FOLLOWED
SPECS = list(MultiUseParameterConfig)


@pytest.fixture(autouse=True)
def another_model_in_the_module():
    """A worker that imports the module anew has a model there whose parameters are others."""
    yield
    closed_world.HELD.model = None


def assert_same(found, expected):
    loss, gradients = found
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        mine = gradients[name]
        assert (mine is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(mine, gradient, rtol=1e-9, atol=1e-12, msg=name)


def step(pipe, workers, x, target, chunks=3, **options):
    driver = PipelineDriver(pipe, workers, **options)
    try:
        loss = driver.run(chunks, x, target)
        return loss, driver.gradients()
    finally:
        driver.close()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("row", FOLLOWED, ids=lambda row: row.__name__)
def test_what_code_reaches_has_its_gradients(cluster, row, spec):
    expected = plain(row)
    model, loss_fn, x, target = made(row)
    pipe = pipeline(model, loss_fn, multi_use_param_spec=spec, example_args=(x, target))
    assert_same((pipe(x, target), gradients(model)), expected)
    model, loss_fn, x, target = made(row)
    pipe = pipeline(model, loss_fn, multi_use_param_spec=spec, example_args=(x, target))
    assert_same(step(pipe, cluster, x, target, schedule="1f1b", check=False), expected)


@pytest.mark.parametrize("row", FOLLOWED, ids=lambda row: row.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved_1f1b", "world_size": 2},  # a worker has an owner and a copy
        {"schedule": "interleaved_1f1b", "replicas": 2},
        {"schedule": "zb_h1"},
        {"schedule": "fill_drain", "single_loss": True},
    ],
    ids=str,
)
def test_wherever_stages_are(threads, row, options):
    if "replicas" in options and row is closed_world.decayed_with_statistics:
        pytest.skip("a module changes a buffer, which replicas refuse")
    expected = plain(row)
    model, loss_fn, x, target = made(row)
    pipe = pipeline(model, loss_fn, example_args=(x, target))
    assert_same(step(pipe, threads, x, target, **options), expected)


@pytest.mark.parametrize("row", [closed_world.decayed, closed_world.forward_hook, closed_world.part_of_a_parent])
def test_copies_follow_an_optimizer(cluster, row):
    model, loss_fn, x, target = made(row)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        optimizer.step()
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    model, loss_fn, x, target = made(row)
    driver = PipelineDriver1F1B(pipeline(model, loss_fn), cluster)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        driver.run(3, x, target)
        optimizer.step()
    state = driver.state_dict()
    assert [*state] == [*expected]
    torch.testing.assert_close({name: state[name] for name in expected}, expected, rtol=1e-8, atol=1e-10)


def test_only_what_code_names_is_copied():
    """A whole model on the loss's worker would be the end of a pipeline."""
    places = [
        (closed_world.harmless_method, []),
        (closed_world.bound_method, ["a.weight"]),
        (closed_world.settings_of_the_model, []),
        (closed_world.decayed, ["scale", "a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]),
    ]
    for row, copied in places:
        model, loss_fn, *_ = made(row)
        groups = pipeline(model, loss_fn).replicated_params
        assert [next(iter(each.values())) for each in groups if "_loss" in each] == copied, row.__name__


REFUSED = {
    "leaf_tensor": r"loss_fn.<closure 'alpha'>, defined at .*closed_world.py:\d+ requires a gradient, and would be a copy",
    "unregistered_parameter": "loss_fn.<closure 'alpha'>, .* requires a gradient",
    "view": "loss_fn.<closure 'weight'>, .* shares memory with the parameter 'a.weight'",
    "data": "loss_fn.<closure 'weight'>, .* shares memory with the parameter 'a.weight'",
    "teacher": "loss_fn.<closure 'teacher'>.weight, .* requires a gradient",
    "buffer_that_changes": "loss_fn.<closure 'counting'>.running_mean, .* changes in each micro-batch",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_copy_is_refused_by_the_way_to_it(name):
    model, loss_fn, *_ = made(getattr(closed_world, name))
    with pytest.raises(LossError, match=REFUSED[name]):
        pipeline(model, loss_fn)


@pytest.mark.parametrize(
    "row",
    [closed_world.leaf_tensor_registered, closed_world.view_of_the_parameter, closed_world.frozen_teacher],
    ids=lambda row: row.__name__,
)
def test_the_advice_works(threads, row):
    expected = plain(row)
    model, loss_fn, x, target = made(row)
    loss, found = step(pipeline(model, loss_fn), threads, x, target, schedule="1f1b")
    assert_same((loss, {**found, "alpha": found.get("_loss.alpha")}), expected)


class Foreign(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.alpha = kind, torch.tensor(0.5, requires_grad=True)
        self.register_buffer("buffer", torch.tensor(0.5).requires_grad_())

    def forward(self, x):
        return super().forward(x * (ALPHA if self.kind == "global" else getattr(self, self.kind)))


ALPHA = torch.tensor(0.5, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "name"), [("alpha", "alpha"), ("buffer", "buffer"), ("global", "_tensor_from_outside0")]
)
def test_a_tensor_that_forward_reads_and_nobody_registered(kind, name):
    with pytest.raises(SharedParameterError, match=rf"^{name} \(.*requires a gradient"):
        pipeline(Foreign(kind), F.mse_loss)


def test_a_buffer_that_a_stage_changes(threads):
    model = Net(middle=closed_world.Counting())
    pipe = pipeline(model, lambda output, target: F.mse_loss(output, target) * model.b.count)
    with pytest.raises(StepError, match=r"changed 'b.count' in place, which other stages hold too"):
        step(pipe, threads, torch.rand(7, 4), torch.rand(7, 3), schedule="1f1b", check=False)


def test_hooks_that_come_later_are_refused_before_anything_is_sent(threads):
    model = Net()
    pipe = pipeline(model, F.mse_loss)
    handle = model.b.register_forward_hook(lambda module, args, output: output * model.a.weight.mean())
    expected = re.escape("submod_1.b.<hook>.<closure 'model'>.a.weight, defined at")
    with pytest.raises(
        DriverError, match=expected + r".*is 'a.weight', which submod_1 does not hold.*call pipeline\(\) again"
    ):
        PipelineDriver1F1B(pipe, threads)
    assert PipelineDriver1F1B(pipeline(model, F.mse_loss), threads).run(2, torch.rand(4, 4), torch.rand(4, 3)) > 0
    handle.remove()
    PipelineDriver1F1B(pipe, threads)


def test_what_pipeline_cannot_see_cannot_be_read(cluster):
    model, x, target = Net(), torch.rand(7, 4), torch.rand(7, 3)
    layer = "a"

    def by_name(output, target):
        return F.mse_loss(output, target) + decay_of([getattr(model, layer).weight, model.scale])

    def advised(output, target):
        return F.mse_loss(output, target) + decay_of([model.a.weight, model.scale])

    with pytest.raises(StepError, match=r"code on this worker reads 'a.weight', which is not here.*Name the attribute"):
        step(pipeline(model, by_name), cluster, x, target, schedule="1f1b", check=False)
    (F.mse_loss(model(x), target) + decay_of([model.a.weight, model.scale])).backward()
    _, found = step(pipeline(model, advised), cluster, x, target, schedule="1f1b")
    torch.testing.assert_close(found["a.weight"], model.a.weight.grad)
