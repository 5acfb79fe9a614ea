"""What forward changes in place: buffers, parameters, inputs of stages."""

import copy
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from pippy import Pipe, PipeTracer, PippyWarning, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B
from pippy.ir.base.errors import SharedParameterError, SplitError, StageError
from tests.comparisons import Beside, assert_same_gradients
from tests.ir.trace.test_assigned_buffers import Assigns, batch, counts, reads_before_and_after, swaps

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Leaf(nn.Module):
    """Counts in a buffer, and hands it out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(4))
        self.also = torch.ones(4)

    def forward(self, x):
        self.seen.add_(x.detach().mean(0))
        self.also += 1
        return self.give(x)

    def give(self, x):
        return self.seen, [self.also[:]]


class Uses(Leaf):
    """Keeps the buffer for the backward."""

    def give(self, x):
        return x * self.seen, [0]


class UsesACopy(Leaf):
    def give(self, x):
        return x * self.seen.clone(), [0]


class KeepsLeaf(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Leaf) or super().is_leaf_module(m, module_qualified_name)


class Counting(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.leaf, self.b = nn.Linear(4, 4), kind(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        seen, also = self.leaf(x)
        pipe_split()
        return self.b(x * seen * also[0])


class Traced(Counting):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x):
        x = self.a(x)
        self.count += 1
        x = x * self.count
        pipe_split()
        return self.b(x)


class TracedWithACopy(Traced):
    def forward(self, x):
        x = self.a(x)
        self.count += 1
        x = x * self.count.clone()
        pipe_split()
        return self.b(x)


def driver_of(model, threads):
    pipe = pipeline(model, nn.MSELoss(), tracer=KeepsLeaf)
    return PipelineDriver(pipe, threads, schedule="looped_bfs", stages_per_worker=2, world_size=1, check=False)


def train(plain, x, target):
    """Give a plain model the micro-batches one after the other. It has their gradients then; this gives their loss."""
    total = 0.0
    for mine, its in zip(x.chunk(4), target.chunk(4)):
        part = F.mse_loss(plain(mine), its) / 4
        part.backward()
        total += part.item()
    return total


def test_a_buffer_that_a_leaf_hands_out_is_as_it_was_then(threads):
    """Two stages on one worker shared its memory: the second saw what the first had counted of later micro-batches."""
    model, x, target = Counting(Leaf), torch.randn(8, 4), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    driver = driver_of(model, threads)
    assert driver.run(4, x, target).item() == pytest.approx(train(plain, x, target), rel=1e-12)
    torch.testing.assert_close(driver.get_grad("a.weight"), plain.a.weight.grad)


ADVISED = [
    (lambda: Counting(Uses), r"'leaf.seen' \(of Uses\)", lambda: Counting(UsesACopy)),
    (lambda: Traced(Leaf), "'count'", lambda: TracedWithACopy(Leaf)),
]


@pytest.mark.parametrize(("model", "name", "advised"), ADVISED)
def test_a_buffer_that_the_backward_needs_is_named_and_the_advice_works(model, name, advised, threads):
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(StepError, match=rf"{name}.*later micro-batch(.|\n)*\.clone\(\)"):
        driver_of(model(), threads).run(4, x, target)
    assert driver_of(model(), threads).run(1, x, target).isfinite()
    made = advised()
    plain, driver = copy.deepcopy(made), driver_of(made, threads)
    assert driver.run(4, x, target).item() == pytest.approx(train(plain, x, target), rel=1e-12)
    torch.testing.assert_close(driver.get_grad("a.weight"), plain.a.weight.grad)


# Buffers that forward assigns anew, in steps of a driver: they are those of the plain model.


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("act", [counts, reads_before_and_after, swaps])
def test_a_driver_changes_them_once_in_a_step(act, checkpoint, chunks, threads):
    both = Beside(threads, Assigns(act), checkpoint=checkpoint)
    for _ in range(2):
        both.zero_grad()
        both.step(chunks, *batch())
    both.same_state()


# A parameter that forward changes, as the averaged teacher of MoCo and BYOL: as in the plain model, or refused by name.


def by_data(teacher, student):
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)


@torch.no_grad()
def in_place(teacher, student):
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.mul_(0.9).add_(its, alpha=0.1)


@torch.no_grad()
def of_lists(teacher, student):
    torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 0.1)


UPDATES = {"data": by_data, "in place": in_place, "of lists": of_lists, "none": lambda teacher, student: None}


BETWEEN_STEPS = r"driver.copy_to\(model\), the change, driver.load_state_dict\(model.state"


class Averaged(nn.Module):
    def __init__(self, update, late=False):
        super().__init__()
        self.update, self.late = update, late
        self.student, self.head, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        UPDATES[self.update](self.teacher, self.student)
        y, z = self.student(x), None if self.late else self.teacher(x)
        pipe_split()
        z = self.teacher(x) if self.late else z
        return (self.head(y.relu()) - z).square().mean()


@pytest.mark.parametrize("update", ["data", "in place", "of lists"])
def test_an_averaged_teacher(update, threads):
    model, x = Averaged(update), torch.randn(8, 4)
    before = copy.deepcopy(model.state_dict())
    both = Beside(threads, model, None, pipe={"output_loss_value_spec": True, "example_args": (x[:2],)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        both.zero_grad()
        both.step(1, x)
    both.same_state()
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(DriverError, match=r"(?s)'teacher.weight', 'teacher.bias'.*chunks=1.*" + BETWEEN_STEPS),
        ):
            both.driver.run(2, x)
    both.same_state()


def test_the_change_may_be_made_between_steps(threads):
    """As the errors say, those of several micro-batches and of a teacher in another stage than its student."""
    with pytest.raises(SharedParameterError, match=r"(?s)'teacher.weight' is changed in place.*driver.load_state_dict"):
        pipeline(Averaged("in place", late=True), output_loss_value_spec=True)
    model, plain, x = Averaged("none", late=True), Averaged("in place", late=True), torch.randn(8, 4)
    plain.load_state_dict(model.state_dict())
    both = Beside(threads, model, None, plain=plain, pipe={"output_loss_value_spec": True})
    both.optimize(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        both.driver.copy_to(model)
        in_place(model.teacher, model.student)
        both.driver.load_state_dict(model.state_dict())
        both.run(2, x)
        both.update()
    both.same_state()


# A stage that changes what it was given, where tracing cannot see it: a module of the user's own that is not traced.


class Clamp(nn.Module):
    """Changes its input in place, as a regularizer of activations may."""

    def forward(self, x):
        with torch.no_grad():
            x.clamp_(-0.1, 0.1)
        return x * 2


class Opaque(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Clamp) or super().is_leaf_module(module, name)


class Clamped(nn.Module):
    """``act`` is its forward."""

    def __init__(self, act):
        super().__init__()
        self.first, self.last, self.weight = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.clamp, self.act = Clamp(), act

    def forward(self, x):
        return self.act(self, x)


def changed_by(change, view=lambda value: value):
    """The last stage uses a value, or a view of it, that the second one has changed in place."""

    def act(self, x):
        value = self.first(x)
        other = view(value)
        pipe_split()
        y = change(self, value)
        pipe_split()
        return y + other

    return Clamped(act)


def clamped(self, value):
    return self.clamp(value)


def from_input(self, x):
    y = self.clamp(x)
    pipe_split()
    return self.last(y)


def of_weight(self, x):
    """A weight that travels to the stage which changes it."""
    y = x @ self.weight
    pipe_split()
    return y @ self.clamp(self.weight)


def alone(self, x):
    """Nobody but the second stage uses what it changes."""
    y = self.first(x)
    pipe_split()
    y = self.clamp(y)
    pipe_split()
    return self.last(y)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


MODELS = {
    "a value used later": lambda: changed_by(clamped),
    "a view of it used later": lambda: changed_by(clamped, lambda value: value.view(-1, 4)),
    "an input of the model": lambda: Clamped(from_input),
    "a parameter": lambda: Clamped(of_weight),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("loss", [None, loss_fn], ids=["inference", "training"])
def test_the_reference_names_the_stage_the_input_and_the_line(model, loss):
    pipe = pipeline(model(), loss, tracer=Opaque)
    given = (torch.randn(3, 4), torch.randn(3, 4))[: 1 if loss is None else 2]
    with pytest.raises(StageError, match=r"(?s)submod_\d changed its input '\w+' in place.*self\.clamp\(.*clone\(\)"):
        pipe(*given)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_driver_refuses_it_too(threads, model):
    driver = PipelineDriver1F1B(pipeline(model(), loss_fn, tracer=Opaque), threads)
    with pytest.raises(StepError, match=r"(?s)submod_\d changed its input '\w+' in place.*self\.clamp\("):
        driver.run(2, torch.randn(4, 4), torch.randn(4, 4))


def test_what_nobody_else_uses_may_be_changed(threads):
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    both = Beside(threads, Clamped(alone), loss_fn, pipe={"tracer": Opaque})
    both.step(2, x, target)
    torch.testing.assert_close(both.pipe(x, target), loss_fn(both.plain(x), target).detach())
    assert_same_gradients(both.pipe, both.plain)


def test_the_advice(threads):
    model, x = changed_by(lambda model, value: model.clamp(value.clone())), torch.randn(4, 4)
    torch.testing.assert_close(pipeline(model, tracer=Opaque)(x), model(x))


def test_a_loss_that_changes_its_target():
    def loss_of(output, target):
        target[target < 0] = 0
        return ((output - target) ** 2).mean()

    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss_of)
    with pytest.raises(StageError, match="_loss changed its input 'target' in place"):
        pipe(torch.randn(3, 4), torch.randn(3, 4))


@fx.wrap
def halve(value):
    with torch.no_grad():
        value.mul_(0.5)
    return value + 1


def test_a_function_that_was_not_traced():
    with pytest.raises(StageError, match=r"(?s)changed its input 'first' in place.*halve\(value\)"):
        pipeline(changed_by(lambda model, value: halve(value)))(torch.randn(3, 4))


def test_an_autograd_function_that_marks_its_input_dirty():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.mark_dirty(value)
            return value.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    with torch.no_grad(), pytest.raises(StageError, match="changed its input 'first' in place"):
        pipeline(changed_by(lambda model, value: Double.apply(value)))(torch.randn(3, 4))


def test_inference_mode_has_no_versions():
    model = Clamped(alone)
    with torch.inference_mode():
        x = torch.randn(3, 4)
        torch.testing.assert_close(pipeline(model, tracer=Opaque)(x), model(x))


class PassOn(nn.Module):
    """Returns its input, which no schema says."""

    def forward(self, x):
        return x


class OpaquePassOn(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, PassOn) or super().is_leaf_module(module, name)


def test_a_module_of_the_users_own_may_return_a_view():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pass_on = PassOn()

        def forward(self, x):
            value = torch.sin(x)
            view = self.pass_on(value)
            pipe_split()
            value.add_(1)
            pipe_split()
            return view * 2

    with pytest.raises(SplitError, match="in place, which another stage made"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        pipeline(Model(), tracer=OpaquePassOn)
