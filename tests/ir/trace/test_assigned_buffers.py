"""Buffers that forward assigns anew: a Pipe has the numbers of the plain model, in the buffers, the loss and the gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pippy import pipe_split, pipeline
from pippy.errors import ModeError, PippyError, SharedParameterError, TracingError
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state, assert_same_step, run_plain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Assigns(nn.Module):
    """Two layers with a mark between them. What is done to the buffers is given."""

    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 1), act
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("other", torch.full((4,), 2.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.act(self, self.first(x))
        pipe_split()
        return self.second(x)


def counts(module, x):
    module.count = module.count + 1
    return x * module.count


def reads_before_and_after(module, x):
    y = x * module.mean  # autograd keeps the buffer for the backward
    module.mean = 0.9 * module.mean + 0.1
    return y * module.mean + y


def without_gradients(module, x):
    with torch.no_grad():
        module.mean = 0.5 * module.mean + 0.5 * module.other
    return x * module.mean


def with_gradients(module, x):
    module.mean = module.mean.detach() * module.first.bias
    return x * module.mean


def swaps(module, x):
    module.mean, module.other = module.other, module.mean
    return x * module.mean + module.other


def twice(module, x):
    module.mean = module.mean * 2
    y = x * module.mean
    module.mean = module.mean * 2
    return y + module.mean


def in_place_before(module, x):
    module.mean.mul_(3)
    module.mean = module.mean + 1
    return x * module.mean


def in_place_afterwards(module, x):
    old = module.mean
    module.mean = old + 1
    module.mean.mul_(3)
    old.add_(5)
    return x + module.mean * old


def a_view(module, x):
    module.mean = module.other[:].flip(0)
    return x * module.mean


def increments(module, x):
    module.count += 1
    module.count += 1
    return x * module.count


ACTS = [
    counts,
    reads_before_and_after,
    without_gradients,
    with_gradients,
    swaps,
    twice,
    in_place_before,
    in_place_afterwards,
    a_view,
    increments,
]


def batch(rows=4):
    return torch.randn(rows, 4), torch.randn(rows, 1)


def compare_two_steps(pipe, plain):
    for _ in range(2):
        x, target = batch()
        expected = run_plain(plain, nn.MSELoss(), None, (x,), target)
        with torch.no_grad():  # the plain model keeps the graph of the step before in such a buffer
            for name, buffer in plain.named_buffers():
                plain._buffers[name] = buffer.detach()
        assert_same(pipe(x, target), expected, "loss")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_two_steps_are_those_of_the_plain_model(act, with_example):
    model = Assigns(act)
    plain = copy.deepcopy(model)
    buffers = dict(model.named_buffers())
    pipe = pipeline(model, nn.MSELoss(), example_args=batch() if with_example else None)
    assert pipe.num_stages == 2
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    compare_two_steps(pipe, plain)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


def test_a_part_that_assigns_can_be_cut():
    """Without a mark it would be kept whole, if it were not known what shape the buffer gets."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
                self.count = self.count + 1
            return x

    model = nn.Sequential(Body(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    pipe = pipeline(model, nn.MSELoss(), num_stages=2, split="parameters", example_args=batch())
    assert (pipe.num_stages, list(pipe.kept_whole)) == (2, [])
    x, target = batch()
    assert_same_step(pipe, plain, nn.MSELoss(), (x,), target)


def to_none(module, x):
    module.other = None
    return x


def to_a_constant(module, x):
    module.mean = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return x * module.mean


def to_another_dtype(module, x):
    module.count = module.count + 0.5
    return x


def to_another_shape(module, x):
    module.mean = module.mean.mean()
    return x


def in_a_checkpointed_part(module, x):
    def part(x):
        module.mean = module.mean + 1
        return x * module.mean

    return checkpoint(part, x, use_reentrant=False)


def across_the_mark(module, x):
    x = x * module.mean
    pipe_split()
    module.mean = module.mean + x.detach().mean(0)
    return x


REFUSED = [
    (to_none, TracingError, "'other'.* is None"),
    (to_a_constant, TracingError, "'mean'.* no traced value"),
    (to_another_dtype, TracingError, r"'count'.* is float64\[\]; the buffer is int64\[\]"),
    (to_another_shape, TracingError, r"'mean'.* is float64\[\]; the buffer is float64\[4\]"),
    (in_a_checkpointed_part, TracingError, "'mean'.* checkpointed"),
    (across_the_mark, SharedParameterError, "'mean' is changed in place in submod_1 and used in submod_0"),
]


@pytest.mark.parametrize("act, error, words", REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_line(act, error, words):
    with pytest.raises(error, match=words) as caught:
        pipeline(Assigns(act), nn.MSELoss(), example_args=batch())
    where = {to_none: "", to_a_constant: "", in_a_checkpointed_part: "in part"}.get(act, f"in {act.__name__}")
    assert where in str(caught.value)


@pytest.mark.parametrize("act", [to_another_dtype, to_another_shape])
def test_without_an_example_the_call_is_refused_before_the_buffer_changes(act):
    model = Assigns(act)
    pipe = pipeline(model, nn.MSELoss())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PippyError, match=r"forward assigns the buffer '(count|mean)'.* is float64\[\]; the buffer is"):
        pipe(*batch())
    assert_same(model.state_dict(), before, "state")


class Inside(nn.Module):
    """What `Assigns` does, in a module without a mark inside."""

    def __init__(self, act):
        super().__init__()
        self.inner, self.head = nn.Sequential(Unmarked(act)), nn.Linear(4, 1)

    def forward(self, x):
        x = self.inner(x)
        pipe_split()
        return self.head(x)


class Unmarked(Assigns):
    def forward(self, x):
        return self.act(self, self.first(x))


def the_last_rows(module, x):
    module.mean = x.detach()[:, 0]
    return x + module.mean[:, None]


@pytest.mark.parametrize(
    "act, rows, whole",
    [
        (counts, 4, False),
        (the_last_rows, 4, True),
        (the_last_rows, 3, True),
        (to_another_dtype, 4, True),
        (to_a_constant, 4, True),
    ],
)
def test_a_part_without_a_mark_is_kept_whole_where_that_is_needed(act, rows, whole):
    """The advice of the refusals. With four rows the example has as many as the buffer has numbers; another call has not."""
    model = Inside(act)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, nn.MSELoss(), example_args=batch(rows))
    assert list(pipe.kept_whole) == (["inner.0"] if whole else [])
    for count in (rows, 5):
        x, target = batch(count)
        assert_same(pipe(x, target), run_plain(plain, nn.MSELoss(), None, (x,), target), "loss")


def shared(module, x):
    module.mean = module.mean + 1
    return x * module.mean


def test_a_buffer_with_two_names_is_refused_as_plain_torch_parts_them():
    model = Assigns(shared)
    model.other = model.mean
    with pytest.raises(TracingError, match=r"'mean'.* memory that is also that of 'other'"):
        pipeline(model, nn.MSELoss())


def of_a_leaf(module, x):
    x = module.norm(x)
    module.norm.running_mean = module.norm.running_mean * 0.5
    return x


def test_a_buffer_of_a_module_that_stages_call_is_refused():
    model = Assigns(of_a_leaf)
    model.norm = nn.BatchNorm1d(4)
    with pytest.raises(TracingError, match=r"'norm\.running_mean'.*'norm', which stages call as a whole"):
        pipeline(model, nn.MSELoss())


def only_in_training(module, x):
    if module.training:
        module.mean = 0.9 * module.mean + 0.1
    return x * module.mean


def test_a_mode_in_which_nothing_is_assigned_is_refused():
    model = Assigns(only_in_training)
    pipe = pipeline(model, nn.MSELoss())
    compare_two_steps(pipe, copy.deepcopy(model))
    pipe.eval()
    with pytest.raises(ModeError, match="not traced in eval mode"):
        pipe(*batch())


def test_an_argument_with_the_name_of_the_buffer_is_no_buffer():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("x", torch.zeros(3))

        def forward(self, x):
            self.x = x * 1
            self.x = x
            y = torch.relu(x)
            pipe_split()
            return y * 2

    model = Named()
    pipe = pipeline(model)
    x = torch.randn(3)
    pipe(x)
    assert torch.equal(model.x, x)
