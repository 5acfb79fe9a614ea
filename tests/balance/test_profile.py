"""A profile finds what operations take, and leaves everything as it was."""

import copy
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pippy import pipeline
from pippy.balance.balancer import Balancer
from pippy.balance.policies import read_split
from pippy.balance.profile import OperationCost, Profile, profile
from pippy.balance.stopwatch import restoring_model
from pippy.balance.weighing import Weighing, figures_of
from pippy.ir.base.errors import BalanceError, InputError
from pippy.ir.base.names import named_state
from pippy.ir.base.trees import tensors
from pippy.ir.cut.uses import marks, operations
from pippy.ir.pipe import Pipe
from pippy.ir.trace.trace import trace
from tests.balance.test_cuts import trace_silently, unmarked
from tests.comparisons import assert_same, fresh_inputs
from tests.zoo import exhibits


def inputs_of(traced, *args):
    bound = traced.signature.bind(*args)
    bound.apply_defaults()
    placeholders = traced.graph.find_nodes(op="placeholder")
    return {node.name: bound.arguments[str(node.target).lstrip("*")] for node in placeholders}


class Everything(nn.Module):
    """Whatever a run may disturb."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False).eval()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))
        self.decayed = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x))).mean(2)
        self.count += 1
        with torch.no_grad():
            self.decayed.mul_(0.9)
        return self.frozen(self.spectral(x)) * self.decayed + torch.rand(4) + F.dropout(x, 0.5, self.training)


class Seeded(nn.Module):
    """A loss that draws from each generator and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(4)

    def forward(self, output, target):
        self.calls += 1
        random.random()
        torch.rand(3)
        return F.mse_loss(self.norm(output), target)


def state_of(*modules):
    tensors = {f"{index}.{name}": tensor for index, each in enumerate(modules) for name, tensor in named_state(each)}
    return {
        "numbers": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "gradients": {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()},
        "gradient tensors": {name: id(tensor.grad) for name, tensor in tensors.items()},
        "flags": {
            f"{i}.{name}": part.training for i, each in enumerate(modules) for name, part in each.named_modules()
        },
        "attributes": {f"{i}.{n}": sorted(p.__dict__) for i, m in enumerate(modules) for n, p in m.named_modules()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


def assert_unchanged(before, after):
    for kind, values in before.items():
        if kind in ("numbers", "gradients"):
            assert list(values) == list(after[kind])
            for name, tensor in values.items():
                assert (tensor is None) == (after[kind][name] is None)
                assert tensor is None or torch.equal(tensor, after[kind][name]), (kind, name)
        elif kind == "torch":
            assert torch.equal(values, after[kind])
        else:
            assert values == after[kind], kind


@pytest.fixture
def trained(seeded):
    """A model and a loss in the middle of a training, and a batch."""
    model, loss_fn = Everything(), Seeded()
    x, target = torch.randn(6, 2, 5), torch.randn(6, 4)
    for _ in range(2):
        loss_fn(model(x), target).backward()
    return model, loss_fn, x, target


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_disturbed(trained, training):
    model, loss_fn, x, target = trained
    model.train(training)
    model.frozen.eval()
    x.requires_grad_()
    before, given, calls = state_of(model, loss_fn), x.detach().clone(), loss_fn.calls
    pipe = pipeline(model, loss_fn, split="time", num_stages=2, example_args=(x, target))
    assert_unchanged(before, state_of(model, loss_fn))
    assert (pipe.num_stages, loss_fn.calls, x.grad) == (2, calls, None)
    assert torch.equal(x, given)


class Fails(Seeded):
    """Raises, after it has changed whatever it can."""

    def __init__(self, in_backward):
        super().__init__()
        self.in_backward = in_backward

    def forward(self, output, target):
        loss = super().forward(output, target)
        if not self.in_backward:
            raise RuntimeError("no loss today")
        loss.register_hook(lambda gradient: 1 / 0)
        return loss * 1


@pytest.mark.parametrize(("in_backward", "words"), [(False, "no loss today"), (True, "division by zero")])
def test_nothing_is_disturbed_when_an_operation_raises(trained, in_backward, words):
    model, _, x, target = trained
    fails = Fails(in_backward)
    before = state_of(model, fails)
    with pytest.raises(BalanceError, match=rf"(?s){words}.*in the loss"):
        pipeline(model, fails, split="time", num_stages=2, example_args=(x, target))
    assert_unchanged(before, state_of(model, fails))
    assert fails.calls == 0


def test_the_check_of_this_test_sees_a_disturbance(trained):
    model, loss_fn, x, _ = trained
    before = state_of(model, loss_fn)
    model(x)
    with pytest.raises(AssertionError):
        assert_unchanged(before, state_of(model, loss_fn))


def test_an_error_names_the_line(seeded):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(5, 5)

        def forward(self, x):
            return self.b(self.a(x))

    with pytest.raises(InputError, match=r"(?s)return self\.b\(self\.a\(x\)\).*example_args"):
        pipeline(Narrow(), split="time", num_stages=2, example_args=(torch.randn(2, 4),))


@pytest.mark.parametrize("name", exhibits)
def test_a_profile_computes_what_the_model_computes(name):
    """The sizes of all values are those of a plain run, in-place changes and all; the model is as before."""
    torch.manual_seed(0)
    model = exhibits[name]()
    plain, args = copy.deepcopy(model), model.inputs()
    given = fresh_inputs(args)
    traced = unmarked(model)
    found = profile(traced, inputs_of(traced, *args), timed=False)
    assert_same(args, given, "inputs")
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    seen = Recorder(traced, *args).seen
    assert [found.sizes[node] for node in operations(traced)] == seen
    assert all(cost.forward == cost.backward == 0 for cost in found.costs)


class Recorder(torch.fx.Interpreter):
    """The bytes of each value, as torch's own interpreter finds them."""

    def __init__(self, traced, *args):
        self.seen = []
        self.traced = traced
        root = copy.deepcopy(traced.attributes)
        super().__init__(torch.fx.GraphModule(nn.Module(), torch.fx.Graph()), graph=traced.graph)
        self.root = root
        values = inputs_of(traced, *args)
        torch.manual_seed(0)
        self.run(*[values[node.name] for node in traced.graph.find_nodes(op="placeholder")])

    def placeholder(self, target, args, kwargs):
        return next(self.args_iter)  # torch's takes all that are left for *args

    def fetch_attr(self, target):
        return self.root[target]

    def call_module(self, target, args, kwargs):
        return self.root[target](*args, **kwargs)

    def run_node(self, node):
        value = super().run_node(node)
        if node in operations(self.traced):
            self.seen.append(sum(t.nbytes for t in tensors(value)))
        return value


class Tick(torch.autograd.Function):
    """Takes 3 units of a clock forward and 5 backward, times ``factor``."""

    clock = 0

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        Tick.clock += 3 * factor
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Tick.clock += 5 * ctx.factor
        return gradient, None


class Ticking(nn.Module):
    def __init__(self, *factors):
        super().__init__()
        self.factors = factors
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in factors)

    def forward(self, x):
        for layer, factor in zip(self.layers, self.factors):
            x = Tick.apply(layer(x), factor)
        return x


def ticks(model, clock=lambda: Tick.clock, **how):
    """What the forward and the backward of each operation take."""
    found = profile(trace(model), {"x": torch.randn(3, 2)}, clock=clock, **how)
    return [(cost.forward, cost.backward) for cost in found.costs]


def test_times_are_of_forward_and_backward_of_each_operation():
    assert ticks(Ticking(1, 4)) == [(0, 0), (3, 5), (0, 0), (12, 20)]
    assert ticks(Ticking(1, 4), trains=False) == [(0, 0), (3, 0), (0, 0), (12, 0)]


def test_what_needs_no_gradient_has_no_backward():
    model = Ticking(1, 1)
    model.layers[0].requires_grad_(False)
    assert ticks(model) == [(0, 0), (3, 0), (0, 0), (3, 5)]


class Checkpoints(Ticking):
    def __init__(self, reentrant):
        super().__init__(1, 4)
        self.reentrant = reentrant

    def forward(self, x):
        shift = self.layers[0](x)

        def part(x):
            return torch.sin(Tick.apply(torch.tanh(self.layers[1](x)), 4)) + shift

        return checkpoint(part, shift.sin(), use_reentrant=self.reentrant).cos()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_part_runs_forward_twice_and_keeps_its_inputs(reentrant, seeded):
    model, x = Checkpoints(reentrant), torch.randn(3, 2)
    found = profile(trace(model), {"x": x}, clock=lambda: Tick.clock)
    assert sum(cost.forward for cost in found.costs) == 12
    assert sum(cost.backward for cost in found.costs) == 20 + 12
    assert sum(all_saved(found).values()) == saved_bytes(model, x)
    assert figures_of(trace(Unweighted(reentrant))).layers == [0, 1, 1, 0]


class Unweighted(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=self.reentrant)


def test_what_looking_at_the_clock_takes_does_not_count():
    looks = 0

    def clock():
        nonlocal looks
        looks += 1
        return Tick.clock * 100 + looks

    assert ticks(Ticking(1, 4), clock) == [(0, 0), (300, 500), (0, 0), (1200, 2000)]


def test_the_loss_counts_where_the_last_stage_does():
    def loss_fn(output, target):
        return Tick.apply(output - target, 10).sum()

    x, target = torch.randn(3, 2), torch.zeros(3, 2)
    balancer = Balancer("time", 2, loss_fn=loss_fn, example_args=(x, target), clock=lambda: Tick.clock)
    balance = balancer(trace(Ticking(1, 1, 4)))
    assert [stage.cost for stage in balance.stages] == [8 * 2, 8 * (4 + 10)]


def test_without_gradients_only_the_forward_counts():
    x = torch.randn(3, 2)
    balancer = Balancer("time", 2, example_args=(x,), clock=lambda: Tick.clock)
    with torch.no_grad():
        assert [stage.cost for stage in balancer(trace(Ticking(1, 4))).stages] == [3, 12]
    assert [stage.cost for stage in balancer(trace(Ticking(1, 4))).stages] == [8, 32]
    balancer = Balancer("time", 2, example_args=(x,), output_loss_value_spec=False, clock=lambda: Tick.clock)
    assert [stage.cost for stage in balancer(trace(Ticking(1, 4))).stages] == [3, 12]


class FillsATensor(Ticking):
    def forward(self, x):
        filled = torch.zeros(3, 2)
        filled[:, 0] = self.layers[0](x)[:, 0]
        return Tick.apply(filled, 1)


def test_a_tensor_that_was_written_into_wants_the_gradients_of_what_was_written():
    assert ticks(FillsATensor(1))[-1] == (3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_work_is_waited_for_and_its_random_state_comes_back():
    model = nn.Sequential(nn.Linear(8, 2048), nn.Dropout(), nn.Linear(2048, 4096), nn.Linear(4096, 4096)).cuda()
    x = torch.randn(8192, 8, device="cuda")
    before = torch.cuda.get_rng_state()
    pipe = pipeline(model, split="time", num_stages=2, example_args=(x,))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [stage.first for stage in pipe.balance.stages] == ["0", "3"]
    assert pipe.balance.stages[1].cost > pipe.balance.stages[0].cost


def test_a_region_without_gradients_has_no_backward():
    class Frozen(Ticking):
        def forward(self, x):
            with torch.no_grad():
                x = Tick.apply(self.layers[0](x), 1)
            return Tick.apply(self.layers[1](x), 1)

    found = profile(trace(Frozen(1, 1)), {"x": torch.randn(3, 2)}, clock=lambda: Tick.clock)
    assert [(cost.forward, cost.backward) for cost in found.costs] == [(0, 0), (3, 0), (0, 0), (3, 5)]
    assert [bool(cost.saved) for cost in found.costs] == [False, False, True, False]


def test_arguments_that_the_model_changes_in_place_stay_as_they_were():
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x.clamp_(min=0)))

    x = torch.randn(3, 4)
    given = x.clone()
    pipeline(Clamps(), split="time", num_stages=2, example_args=(x,))
    assert torch.equal(x, given)


class Box:
    """Hides a tensor where no pipeline sees it."""

    def __init__(self, inside):
        self.inside = inside


def boxed(x):
    return Box(x)


def unboxed(box):
    return box.inside


torch.fx.wrap("boxed")
torch.fx.wrap("unboxed")


def test_what_cannot_travel_stays_with_its_users():
    class Boxing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            x = self.a(x)
            box = boxed(x)
            y = self.c(self.b(x))
            return self.d(y + unboxed(box))

    model, x = Boxing(), torch.randn(3, 4)
    pipe = pipeline(model, nn.MSELoss(), split="uniform", num_stages=2, example_args=(x, x))
    assert sorted(stage.layers for stage in pipe.balance.stages) == [1, 3]
    torch.testing.assert_close(pipe(x, x), nn.functional.mse_loss(model(x), x).detach())


def sleeps(x, seconds):
    time.sleep(seconds)
    return x


torch.fx.wrap("sleeps")


class Sleeping(nn.Module):
    def __init__(self, *seconds):
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in seconds)

    def forward(self, x):
        for layer, seconds in zip(self.layers, self.seconds):
            x = sleeps(layer(x), seconds)
        return x


def test_times_find_the_cuts_that_are_known_to_be_best():
    """The sums are 16, 16 and 18; the next best cuts have a stage of 20."""
    balancer = Balancer("time", 3, example_args=(torch.randn(3, 2),), clock=lambda: Tick.clock)
    balance = balancer(trace(Ticking(4, 4, 4, 4, 8, 8, 18)))
    assert [stage.cost for stage in balance.stages] == [8 * 16, 8 * 16, 8 * 18]


def test_real_time_is_measured():
    """However busy the machine, one pause is shorter than two."""
    model, x = Sleeping(0.02, 0.02), torch.randn(3, 2)
    pipe = pipeline(model, num_stages=2, example_args=(x,))
    assert [len(stage.graph.find_nodes(op="call_function", target=sleeps)) for _, stage in pipe.stages()] == [1, 1]
    assert pipe.balance.policy == "time (auto)"
    assert all(stage.cost >= 20_000_000 for stage in pipe.balance.stages)
    assert torch.equal(pipe(x), model(x))


def equal_blocks(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU()) for _ in range(count)))


@pytest.mark.parametrize("seed", range(3))
def test_equal_operations_take_equal_times_whatever_else_the_machine_does(seed):
    dice, now, looks = random.Random(seed), 0, 0

    def clock():
        nonlocal now, looks
        now, looks = now + dice.randrange(1000, 2000) + (dice.random() < 0.1) * 100_000, looks + 1
        return now

    balancer = Balancer("time", 4, example_args=(torch.randn(3, 2),), clock=clock)
    _, *others = balancer(trace(equal_blocks(40))).stages
    assert [stage.first for stage in others] == ["10.0", "20.0", "30.0"]
    assert len({stage.cost for stage in others}) == 1
    assert looks < 1000  # for 120 operations of three kinds


def test_where_times_cannot_tell_cuts_lie_between_blocks():
    """A cut inside of the second block is better by 6 %: that counts unless the times may be wrong by more."""
    traced = trace(nn.Sequential(*equal_blocks(2), nn.Tanh()))
    costs = [OperationCost(each) for each in (100, 100, 100, 20, 100, 100, 120)]
    policy = read_split("time", 2, with_examples=True)
    for uncertain, cut in ((0.0, 4), (0.1, 3)):
        found = Profile(costs, uncertain=uncertain)
        assert Weighing(traced, figures_of(traced), found, policy, None).best_cuts() == [cut]


def test_activations_are_what_autograd_saves_each_once(seeded):
    """Compared with what a plain run of the whole model saves."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x, traced = torch.randn(16, 4), trace(model)
    found = profile(traced, inputs_of(traced, x), timed=False)
    assert sum(all_saved(found).values()) == saved_bytes(model, x)


def all_saved(found):
    return {storage: size for cost in found.costs for storage, size in cost.saved.items()}


def saved_bytes(model, x):
    """What autograd saves in a plain run."""
    memories: dict[int, torch.UntypedStorage] = {}

    def save(tensor):
        memories[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad
    return sum(memory.nbytes() for key, memory in memories.items() if key not in own)


def test_gradients_that_a_part_makes_by_itself_reach_nobody(seeded):
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    before = gradient.clone()
    with restoring_model(layer):
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_a_module_that_is_seen_to_change_a_buffer_keeps_its_calls_together():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    counter = Counter()
    net = nn.Sequential(nn.Linear(2, 2), counter, nn.Linear(2, 2), counter, nn.Linear(2, 2))
    x = torch.ones(3, 2)
    pipe = Pipe.from_sequential(net, cut=Balancer("uniform", 2, example_args=(x,)))
    expected = copy.deepcopy(net)(x)
    assert [stage.layers for stage in pipe.balance.stages] == [4, 1]
    torch.testing.assert_close(pipe(x), expected)


def test_marks_are_not_there_to_be_run():
    assert marks(trace_silently(Ticking(1, 2))) == []


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_measured(layout):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("graph", torch.eye(4).to_sparse(layout=layout))

        def forward(self, x):
            y = torch.relu(self.lin(x)).to_sparse(layout=layout)
            return self.lin(torch.sparse.mm(self.graph, torch.sparse.mm(y, self.lin.weight).t()).t())

    pipe = pipeline(
        Graph(), nn.MSELoss(), split="time", num_stages=2, example_args=(torch.randn(8, 4), torch.randn(8, 4))
    )
    assert pipe.num_stages == 2


class Routed(nn.Module):
    """Chooses experts: numbers and indices come in one result, and the numbers are changed in place."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        weights, indices = self.gate(x).topk(2)
        weights /= weights.sum(-1, keepdim=True)
        return self.out(x) * weights.sum() + indices.reshape(-1).sum()


def test_whole_numbers_beside_a_tensor_that_is_changed_want_no_gradient():
    profile(trace(Routed()), {"x": torch.randn(3, 4, requires_grad=True)}, timed=False)


class Penalty(nn.Module):
    """A critic with a penalty on its gradients, as in WGAN-GP: `autograd.grad` takes what several operations have made."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real, fake):
        difference = self.critic(fake).mean() - self.critic(real).mean()
        mixed = (0.25 * real + 0.75 * fake).requires_grad_()
        score = self.critic(mixed)
        (gradient,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        return difference + 10 * (gradient.norm(2, 1) - 1).square().mean()


class SameObject(nn.Module):
    """Asks whether two values are one object, as they are not where each operation is run alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x, y):
        x = self.norm(self.first(x))
        same = x.to(torch.float64)
        x = self.last(x) if same is x else self.last(-x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("kind", [Penalty, SameObject])
def test_what_cannot_run_alone_runs_after_all_before_it(kind, in_float64, seeded):
    model, args = kind(), (torch.randn(5, 3), torch.randn(5, 3))
    plain = copy.deepcopy(model)
    pipe = pipeline(model, num_stages=2, split="parameters", example_args=args, output_loss_value_spec=True)
    assert pipe.num_stages == 2
    assert_same(model.state_dict(), plain.state_dict(), "state")
    assert all(each.grad is None for each in model.parameters())
    loss = plain(*args)
    loss.backward()
    torch.testing.assert_close(pipe(*args), loss.detach())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
