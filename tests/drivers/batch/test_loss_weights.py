"""The weighted losses and gradients of the micro-batches add up to those of the mini-batch, in float64."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.loss_weights import loss_weights, reduction_of
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.loss.loss_function import FunctionLoss

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
COUNTING = {
    "plain": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(CLASS_WEIGHTS),
    "ignore": nn.CrossEntropyLoss(ignore_index=1),
    "smooth": nn.CrossEntropyLoss(CLASS_WEIGHTS + 0.5, ignore_index=3, label_smoothing=0.2),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "nll": nn.NLLLoss(CLASS_WEIGHTS, ignore_index=0),
    "function": FunctionLoss(F.cross_entropy),
    "nll function": F.nll_loss,
    "partial": functools.partial(F.cross_entropy, ignore_index=2, weight=CLASS_WEIGHTS),
    "partial sum": functools.partial(F.cross_entropy, reduction="sum"),
}
ROWS = {
    "mse": nn.MSELoss(),
    "mse sum": nn.MSELoss(reduction="sum"),
    "l1": F.l1_loss,
    "bce": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0, dtype=torch.float64)),
    "kl": nn.KLDivLoss(reduction="batchmean"),
    "probabilities": nn.CrossEntropyLoss(CLASS_WEIGHTS),
    "function": lambda output, target: ((output - target) ** 2).mean(),
}


def check(loss, output, target, chunks, given=None, how=None, named="target"):
    division = divide({"output": output, named: given if given is not None else target}, chunks)
    weights = loss_weights(loss, division, named, how)
    whole = loss(output, target)
    total, gradient = 0.0, torch.zeros_like(output)
    for index, weight in enumerate(weights):
        if weight == 0:
            continue
        piece = division.take("output", index).requires_grad_()
        part = loss(piece, division.take(named, index)) * weight
        total = total + part.detach()
        start = sum(division.sizes[:index])
        gradient[start : start + len(piece)] = torch.autograd.grad(part, piece)[0]
    leaf = output.clone().requires_grad_()
    torch.testing.assert_close(torch.as_tensor(total, dtype=whole.dtype), whole, equal_nan=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(leaf, target), leaf)[0], equal_nan=True)


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 9))
    spatial = draw(st.sampled_from([(), (2,)]))
    count = rows * (spatial[0] if spatial else 1)
    labels = draw(st.lists(st.sampled_from([0, 1, 2, 3, -100]), min_size=count, max_size=count))
    return rows, spatial, torch.tensor(labels).reshape(rows, *spatial), draw(st.integers(1, rows))


@pytest.mark.parametrize("name", COUNTING)
@given(batch=batches(), cut=st.booleans())
def test_losses_that_count_targets(name, batch, cut):
    rows, spatial, target, chunks = batch
    loss = COUNTING[name]
    if getattr(loss, "ignore_index", -100) != -100 or getattr(loss, "keywords", {}).get("ignore_index"):
        target = target.clamp(min=0)
    output = torch.randn(rows, 4, *spatial, dtype=torch.float64)
    check(loss, output, target, chunks, MicroBatches(target.tensor_split(chunks)) if cut else None)


@pytest.mark.parametrize("name", ROWS)
@given(rows=st.integers(1, 9), data=st.data())
def test_losses_that_average_over_rows(name, rows, data):
    output = torch.randn(rows, 4, dtype=torch.float64)
    target = torch.rand(rows, 4, dtype=torch.float64)
    check(ROWS[name], output, target, data.draw(st.integers(1, rows)))


@given(batch=batches())
def test_a_count_of_ones_own(batch):
    rows, spatial, target, chunks = batch
    loss = lambda output, target: F.cross_entropy(output, target, ignore_index=-100)  # noqa: E731
    output = torch.randn(rows, 4, *spatial, dtype=torch.float64)
    check(loss, output, target, chunks, how=lambda labels: (labels != -100).sum(), named="labels")
    check(loss, output, target, chunks, how=lambda anything: (anything != -100).sum())


@given(rows=st.integers(1, 300), chunks=st.integers(1, 300))
def test_equal_sizes_give_exactly_one_part(rows, chunks):
    division = divide({"x": torch.zeros(rows * chunks)}, chunks)
    assert loss_weights(nn.MSELoss(), division) == (1 / chunks,) * chunks


def test_a_micro_batch_without_targets_weighs_nothing():
    division = divide({"target": torch.tensor([-100, -100, 1, 2])}, 2)
    assert loss_weights(nn.CrossEntropyLoss(), division, "target") == (0.0, 1.0)


def test_under_a_mask_only_own_rows_count():
    target = torch.tensor([0, -100, 1, 2, 2])
    masked, cut = divide({"target": target}, 2, mask=True), divide({"target": target}, 2)
    for how in (None, lambda target: (target != -100).sum()):
        weights = [loss_weights(nn.CrossEntropyLoss(), each, "target", how) for each in (masked, cut)]
        assert weights[0] == weights[1] == (0.5, 0.5)


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_its_base():
    class Own(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(input, target) + 1

    assert not reduction_of(Own()).counts and reduction_of(nn.CrossEntropyLoss()).counts


@pytest.mark.parametrize("how", [lambda x: -1, lambda x: x, lambda x: float("nan"), lambda x: None, lambda x: "3"])
def test_what_is_no_count_is_refused(how):
    with pytest.raises(MicrobatchError, match="a number of 0 or more"):
        loss_weights(None, divide({"x": torch.ones(4)}, 2), None, how)


def test_what_is_not_known_is_refused():
    division = divide({"x": torch.ones(4)}, 2)
    with pytest.raises(MicrobatchError, match="'tokens'"):
        loss_weights(None, division, None, "tokens")
    with pytest.raises(MicrobatchError, match=r"the names of inputs \(x\), or"):
        loss_weights(None, division, None, lambda y: 1)
    with pytest.raises(MicrobatchError, match="nothing in the mini-batch has rows"):
        loss_weights(nn.MSELoss(), divide({"x": 1}, 2))


def test_a_smoothed_loss_that_would_be_infinite_is_refused():
    loss = nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2)
    with pytest.raises(MicrobatchError, match="micro-batch 1 is infinite: the class weight of all its targets is 0"):
        loss_weights(loss, divide({"target": torch.tensor([0, 2])}, 2), "target")
    assert loss_weights(loss, divide({"target": torch.tensor([0, -100])}, 2), "target") == (1.0, 0.0)
