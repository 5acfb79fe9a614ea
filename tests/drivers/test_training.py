"""Training on workers follows plain PyTorch: optimizers, clipping, accumulation, states, lists of layers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    LayerSpec,
    MultiUseParameterConfig,
    Pipe,
    SplitPoint,
    TiedLayerSpec,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from pippy.balance.balancer import Balancer
from pippy.drivers.base.errors import DriverError, OptimizerError, StepError
from pippy.drivers.driver.drivers import PipelineDriver1F1B, PipelineDriverFillDrain
from pippy.ir.base.errors import InitializationError, TracingError
from tests.comparisons import Beside, assert_loss, assert_same_training, assert_state, copies_of, update
from tests.drivers.models import Chain, TiedLanguage, TwoLayers, cross_entropy, tokens
from tests.drivers.test_kinds_of_models import Parted

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def tied(cluster, config=MultiUseParameterConfig.REPLICATE, **options):
    """A tied model on a driver, and the plain one beside it."""
    return Beside(cluster, TiedLanguage(), cross_entropy, pipe={"multi_use_param_spec": config}, **options)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
@pytest.mark.parametrize("workers", [2, 4])
def test_twenty_steps_of_adamw_follow_the_plain_loss_curve(cluster, config, workers):
    both = tied(cluster, config, world_size=workers)
    groups = [{"params": ...}, {"params": ["*.bias", "norm.*"], "weight_decay": 0.0}]
    mine = both.driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, param_groups=groups)
    bare = [p for name, p in both.plain.named_parameters() if name.endswith("bias") or name.startswith("norm.")]
    rest = [p for p in both.plain.parameters() if all(p is not other for other in bare)]
    theirs = torch.optim.AdamW([{"params": rest}, {"params": bare, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)
    both.optimizers = [mine, theirs]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=3e-2, total_steps=20) for each in both.optimizers]
    for _ in range(20):
        both.run(3, *tokens(), rtol=1e-9, atol=0)
        norm = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.5)
        torch.testing.assert_close(both.driver.clip_grad_norm_(0.5), norm, rtol=1e-9, atol=0)
        both.same_gradients()
        both.update()
        for each in schedules:
            each.step()
    assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    both.same_state()


def test_copies_of_a_replicated_parameter_stay_alike(cluster):
    driver = tied(cluster).driver
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        for _ in range(1 + step % 3):  # sometimes added up within the step, sometimes after it
            driver.run(2, *tokens())
        optimizer.step()
        first, second = copies_of(driver, "embedding.weight")
        assert torch.equal(first, second)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_a_driver_sends_the_parameters_that_the_model_has_now(threads, config):
    trained = tied(threads, config)
    x, target = tokens()
    optimizer = trained.driver.instantiate_optimizer(torch.optim.SGD, lr=0.5)
    trained.run(2, x, target)
    optimizer.step()
    trained.driver.copy_to(trained.pipe)
    trained.plain.load_state_dict(trained.driver.state_dict())
    trained.driver = PipelineDriver1F1B(trained.pipe, threads)
    trained.plain.zero_grad()
    trained.step(2, x, target)


@pytest.mark.parametrize("looks", [False, True])
def test_gradients_accumulate_over_several_runs(cluster, looks):
    """Looking at gradients in between adds up those of the copies early, which must not count them twice."""
    both = tied(cluster)
    for _ in range(2):
        both.zero_grad()
        for _ in range(3):
            both.run(2, *tokens())
            if looks:
                both.same_gradients()
        both.same_gradients()


def test_copies_are_added_up_once_per_update(threads, monkeypatch):
    from pippy.drivers.worker.gradients.gradient_sums import AddingUp

    sums = []
    inner = AddingUp.__init__
    monkeypatch.setattr(
        AddingUp, "__init__", lambda self, own, *args: sums.append(own.index) or inner(self, own, *args)
    )
    driver = tied(threads, world_size=2, check=False).driver
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    for runs in (1, 1, 3, 3, 3):
        sums.clear()
        for _ in range(runs):
            driver.run(2, *tokens())
        driver.clip_grad_norm_(1.0)
        update(optimizer)
        assert len(sums) <= 2 * (1 if runs == 1 else 2), "each of two workers, once; once more where the rhythm changed"
    assert len(sums) == 2


def test_a_plain_optimizers_state_can_be_loaded_and_given_back(cluster):
    both = tied(cluster)
    theirs = torch.optim.Adam(both.plain.parameters(), lr=1e-2)
    x, target = tokens()
    cross_entropy(both.plain(x), target).backward()
    update(theirs)
    mine = both.driver.instantiate_optimizer(torch.optim.Adam, lr=0.5)
    both.driver.load_state_dict(both.plain.state_dict())
    mine.load_state_dict(theirs.state_dict())
    named = mine.state_dict()
    for name, parameter in both.plain.named_parameters():
        assert torch.equal(named["state"][name]["exp_avg"], theirs.state[parameter]["exp_avg"])
    both.run(3, x, target)
    update(mine, theirs)
    assert mine.param_groups[0]["lr"] == 1e-2
    both.same_state()
    mine.load_state_dict(named)
    with pytest.raises(OptimizerError, match="groups of"):
        mine.load_state_dict({"state": {}, "param_groups": []})


def test_a_state_dict_loads_into_the_workers(cluster):
    both = tied(cluster)
    other = {name: torch.randn_like(tensor) for name, tensor in both.plain.state_dict().items()}
    both.driver.load_state_dict(other)
    both.plain.load_state_dict(other)
    both.same_state()
    both.run(2, *tokens())


def test_train_and_eval_reach_the_stages(cluster):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    driver = PipelineDriverFillDrain(Pipe.from_sequential(model), cluster)
    x = torch.randn(6, 8)
    for mode in (False, True, False):
        plain.train(mode)
        driver.train(mode)
        expected, mine = plain(x), driver.run(1, x)
        assert mode or torch.equal(mine, expected)
        assert not mode or (mine == 0).any() or not torch.equal(mine, expected)
        assert_state(driver, plain)


def test_without_gradients_only_the_loss_is_computed(cluster):
    both = tied(cluster)
    x, target = tokens()
    with torch.no_grad():
        loss = both.driver.run(3, x, target)
    torch.testing.assert_close(loss, cross_entropy(both.plain(x), target), rtol=1e-12, atol=0)
    assert all(gradient is None for gradient in both.driver.gradients().values())


def spread(output, target):
    """A loss that no weights can put together from parts."""
    return (output - target).std() + (output.mean() ** 2)


@pytest.mark.parametrize("chunks", [1, 3])
def test_one_loss_over_the_whole_mini_batch(cluster, chunks):
    both = Beside(cluster, Chain(3), spread, PipelineDriverFillDrain, single_loss=True)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    both.step(chunks, x, target)
    both.step(chunks, x, target)
    with torch.no_grad():
        expected = spread(both.plain(x), target)
        torch.testing.assert_close(both.driver.run(chunks, x, target), expected, rtol=1e-12, atol=0)


class Penalized(TwoLayers):
    """Returns a penalty on the weights of an early stage beside its values."""

    width = 4

    def forward(self, x):
        x, penalty = torch.tanh(self.first(x)), self.first.weight.square().sum()
        pipe_split()
        return self.last(x), penalty


@pytest.mark.parametrize("chunks", [1, 3])
def test_one_loss_of_a_term_without_rows(threads, chunks):
    def penalized(output, target):
        return F.mse_loss(output[0], target) + 0.1 * output[1]

    both = Beside(threads, Penalized(), penalized, PipelineDriverFillDrain, single_loss=True)
    both.step(chunks, torch.randn(8, 4), torch.randn(8, 4))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "looped_bfs", "list", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_any_schedule_by_name(cluster, schedule):
    tied(cluster, schedule=schedule, world_size=2 if "v" in schedule else 4).step(4, *tokens())


def test_steps_can_be_dispatched_ahead(cluster):
    both = tied(cluster)
    batches = [tokens() for _ in range(4)]
    running = [both.driver.run_async(2, x, target) for x, target in batches]
    for step, (x, target) in zip(running, batches):
        assert_loss(step.result(), cross_entropy(both.plain(x), target), rtol=1e-12, atol=0)
    both.same_gradients()


def test_several_drivers_and_changing_chunks(cluster):
    drivers = [Beside(cluster, Chain(stages)) for stages in (2, 3, 4)]
    for chunks in (5, 1, 7, 5):
        for both in drivers:
            both.zero_grad()
            both.step(chunks, torch.randn(7, 8), torch.randn(7, 8))
    for both in drivers:
        both.driver.close()


WRONG = {
    "number of micro-batches first": (lambda driver: driver.run(torch.ones(2)), DriverError),
    "detach": (lambda driver: driver.run(1, torch.ones(2, 8, requires_grad=True), torch.ones(2, 8)), DriverError),
    "Invalid learning rate": (lambda driver: driver.instantiate_optimizer(torch.optim.SGD, lr=-1.0), ValueError),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_refused_before_anything_is_sent(cluster, words):
    call, kind = WRONG[words]
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), cluster)
    before = list(cluster.session.counts)
    with pytest.raises(kind, match=words):
        call(driver)
    assert cluster.session.counts == before


def test_stages_can_be_put_on_chosen_workers(cluster):
    both = Beside(cluster, Chain(2), all_ranks=[3, 1])
    before = list(cluster.session.counts)
    both.run(2, torch.randn(4, 8), torch.randn(4, 8))
    assert [after - was > 0 for after, was in zip(cluster.session.counts, before)] == [False, True, False, True]


# Lists of layers, also such as workers make; and models that torch.compile and torch.jit were called on, whole.


def test_workers_run_functions_among_layers(threads):
    torch.manual_seed(0)
    x, linear, last = torch.randn(6, 4), nn.Linear(4, 5), nn.Linear(10, 1)
    layers = [linear, torch.relu, lambda x: torch.cat([x, 2 * x], 1), lambda x: x.flip(1), last]
    pipe = Pipe.from_sequential(tuple(layers), nn.MSELoss(), cut=Balancer([3, 2]))
    driver = PipelineDriver1F1B(pipe, threads)
    loss = driver.run(3, x, x[:, :1])
    hidden = torch.relu(linear(x))
    assert_loss(loss, nn.functional.mse_loss(last(torch.cat([hidden, 2 * hidden], 1).flip(1)), x[:, :1]))
    torch.testing.assert_close(driver.get_grad("0.weight"), linear.weight.grad)


class Rotated(nn.Module):
    """Its constructor computes a buffer that is not saved, and initializes in its own way."""

    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)
        nn.init.orthogonal_(self.lin.weight)
        self.scale = nn.Parameter(torch.full((width,), 2.0))
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        return torch.tanh(self.lin(x) * self.scale + self.table)


def logits(embedding, x):
    return x @ embedding.weight.T


def specs():
    embedding = "embedding", nn.Embedding, 16, 8
    return [
        TiedLayerSpec(*embedding),
        *(LayerSpec(Rotated, 8) for _ in range(4)),
        lambda x: x * 2,
        LayerSpec(nn.BatchNorm1d, 8),
        TiedLayerSpec(*embedding, forward_fn=logits),
    ]


def driver_of(cluster, counts):
    pipe = Pipe.from_sequential(specs(), nn.CrossEntropyLoss(), cut=Balancer(counts))
    return PipelineDriver1F1B(pipe, cluster)


def plain_of(driver):
    """The model with a worker's numbers, made as nn.Sequential and functions make it, with torch alone."""

    class Plain(nn.Sequential):
        def forward(self, ids):
            x = self[0](ids)
            for layer in list(self)[1:5]:
                x = layer(x)
            return self[6](x * 2) @ self[0].weight.T

    layers = [nn.Embedding(16, 8), *(Rotated(8) for _ in range(4)), nn.Identity(), nn.BatchNorm1d(8)]
    plain = Plain(*layers)
    state = driver.state_dict()
    plain.load_state_dict({name: value for name, value in state.items() if name != "7.layer.weight"})
    return plain, state


def test_layers_are_made_where_they_are_used(threads):
    states = []
    for counts in ([8], [3, 5], [4, 4], [2, 2, 2, 2]):
        driver = driver_of(threads, counts)
        driver.initialize(seed=1)
        states.append(driver.state_dict())
    for state in states[1:]:
        assert [name for name in state if not torch.equal(state[name], states[0][name])] == []
    first, second = states[0]["1.lin.weight"], states[0]["2.lin.weight"]
    torch.testing.assert_close(first @ first.T, torch.eye(8), atol=1e-5, rtol=0)
    assert not torch.equal(first, second)
    assert torch.equal(states[0]["1.scale"], torch.full((8,), 2.0))
    assert torch.equal(states[0]["7.layer.weight"], states[0]["0.weight"])
    assert states[0]["0.weight"].std() > 0.8


@pytest.mark.parametrize("counts", [[8], [2, 2, 2, 2]])
def test_they_train_as_the_plain_model(threads, counts):
    driver = driver_of(threads, counts)
    driver.initialize(seed=1)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.05)
    plain, _ = plain_of(driver)
    ours = torch.optim.Adam(plain.parameters(), lr=0.05)
    driver.eval()
    plain.eval()
    ids, target = torch.arange(12) % 16, (torch.arange(12) * 7) % 16
    assert_same_training(driver, optimizer, plain, ours, 3, ids, target)


def test_a_tied_layer_is_one_storage_on_a_worker(threads):
    driver = driver_of(threads, [8])
    driver.initialize()
    (held,) = threads.engine.workers[0].drivers.values()
    stage = held.modules["submod_0"]
    assert stage.get_parameter("7.layer.weight") is stage.get_parameter("0.weight")


def test_a_layer_that_is_another_on_a_worker_is_refused(threads):
    def other():
        return nn.Linear(4, 4 if torch.empty(0).is_meta else 5)

    driver = PipelineDriver1F1B(Pipe.from_sequential([LayerSpec(other), nn.ReLU()]), threads)
    with pytest.raises(StepError, match=r"has 'weight' of shape \[4, 4\].*makes one of shape \[5, 4\] on a worker"):
        driver.initialize()
    with pytest.raises(InitializationError, match="function='no' is called with each module"):
        driver.initialize("no")


def test_a_function_is_called_with_the_layers_that_were_made(threads):
    def function(module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    driver = driver_of(threads, [4, 4])
    driver.initialize(function, seed=1)
    state = driver.state_dict()
    assert torch.equal(state["2.lin.bias"], torch.zeros(8))
    torch.testing.assert_close(state["2.lin.weight"] @ state["2.lin.weight"].T, torch.eye(8), atol=1e-5, rtol=0)


X, TARGET = torch.randn(6, 4).double(), torch.randn(6, 2).double()


def test_names_are_those_of_the_model_inside(threads):
    torch.manual_seed(0)
    compiled = torch.compile(Parted(), backend="eager")
    annotate_split_points(compiled, {"last": SplitPoint.BEGINNING})
    both = Beside(
        threads, compiled, torch.compile(nn.MSELoss(), backend="eager"), plain=copy.deepcopy(compiled._orig_mod)
    )
    both.optimize(torch.optim.SGD, lr=0.1)
    both.loss = nn.MSELoss()
    both.run(2, X, TARGET)
    both.update()
    both.driver.copy_to(compiled)
    both.same_state()
    torch.testing.assert_close(compiled._orig_mod.state_dict(), both.plain.state_dict())


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_a_model_that_is_scripted_whole_is_refused(script):
    with pytest.raises(TracingError, match="give the module that it was made from"):
        pipeline(script(Parted()), example_args=(X,))
