"""Outputs put together, micro-batches weighed, and what messages about both say to write."""

import copy
import functools
import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.loss_weights import loss_weights, reduction_of
from pippy.drivers.batch.merge import merge_outputs
from pippy.drivers.batch.specs import ChunkSpec, Max, Mean, MicroBatches, Min, Replicate, Sum, TensorChunkSpec
from pippy.ir.loss.loss_function import FunctionLoss
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

Pair = namedtuple("Pair", "y state")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@given(rows=st.integers(1, 12), chunks=st.integers(1, 12), mask=st.booleans())
def test_the_whole_comes_back(rows, chunks, mask):
    x = torch.randn(rows, 3, dtype=torch.float64)
    chunks = min(rows, chunks)
    division = divide({"x": x}, chunks, mask=mask)

    def model(x, own):
        return {"out": Output(x * 2, own.mean()), "pair": Pair([x.t()], torch.eye(5)), "name": "net", "none": None}

    outputs = [model(piece, division.own_rows(piece, index)) for index, piece in enumerate(division.microbatches("x"))]
    spec = {"out": {"loss": Mean()}, "pair": {"y": 1, "state": Replicate()}}
    merged, expected = merge_outputs(outputs, division.sizes, spec, mask=mask), model(x, x)
    assert isinstance(merged["out"], Output) and isinstance(merged["pair"], Pair)
    assert torch.equal(merged["out"].logits, expected["out"].logits)
    torch.testing.assert_close(merged["out"].loss, expected["out"].loss)
    assert torch.equal(merged["pair"].y[0], x.t()) and torch.equal(merged["pair"].state, torch.eye(5))
    assert merged["name"] == "net" and merged["none"] is None


class Longest(ChunkSpec):
    def merge(self, values):
        return max(values, key=len)


@pytest.mark.parametrize(
    ("outputs", "spec", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(4.0)], Mean(), torch.tensor(2.0)),
        ([torch.tensor(1.0), torch.tensor(4.0)], Max(), torch.tensor(4.0)),
        ([torch.tensor([1, 5]), torch.tensor([4, 2])], Min(), torch.tensor([1, 2])),
        ([3, 2], Max(), 3),
        ([torch.tensor(1.0), torch.tensor(4.0)], Sum(), torch.tensor(5.0)),
        ([torch.tensor(float("nan")), torch.tensor(4.0)], Sum((0.0, 0.5)), torch.tensor(2.0)),
        ([torch.ones(3), torch.zeros(3)], Mean(), torch.full((3,), 2 / 3)),
        ([torch.ones(3), torch.zeros(3)], torch.stack, torch.tensor([[1.0] * 3, [0.0] * 3])),
        ([5, 5], Replicate(), 5),
        ([5, 6], Sum(), 11),
        (["ab", "abc"], Longest(), "abc"),
        ([torch.full((3,), float("nan"))] * 2, Replicate(), torch.full((3,), float("nan"))),
        ([torch.zeros(1, 2), torch.zeros(1, 1)], TensorChunkSpec(-1), torch.zeros(1, 3)),
        ([[1, 2], [3]], lambda values: values[0] + values[1], [1, 2, 3]),
    ],
)
def test_specs(outputs, spec, expected):
    merged = merge_outputs(outputs, (2, 1), spec)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(merged, expected, equal_nan=True)
    else:
        assert merged == expected


@pytest.mark.parametrize(
    ("outputs", "spec", "words"),
    [
        (
            [{"w": torch.eye(4)}, {"w": torch.zeros(4, 4)}],
            None,
            r"output\['w'\]: the first dimension is not the rows \(2, 1\).*output_spec={'w': Sum\(\)}",
        ),
        ([torch.tensor(3), torch.tensor(3)], None, r"Micro-batch 0 returned int64\[\].*output_spec=Sum\(\)"),
        (
            [(torch.ones(()), 4), (torch.ones(()), 4)],
            None,
            r"output\[0\], output\[1\].*output_spec=\[Sum\(\), Sum\(\)\]",
        ),
        (["a", "b"], None, "micro-batch 0 gave 'a', micro-batch 1 gave 'b'"),
        (["a", "b"], Replicate(), "Replicate.*'a'.*'b'"),
        ([1, 1], "cat", "the spec for output is 'cat'"),
        ([1, 1], 0, "cannot be concatenated"),
        (
            [torch.zeros(2, 3), torch.zeros(1, 4)],
            None,
            r"concatenated along dimension 0.*float32\[2, 3\], float32\[1, 4\]",
        ),
        ([[1], [1, 2]], None, "a different structure"),
        ([{"a": 1}] * 2, {"b": Sum()}, r"names \['b'\]"),
        ([1, 1], ChunkSpec(), "it has no merge"),
        ([torch.zeros(())], None, "1 outputs, and sizes of 2"),
        ([1, 2], Sum((1.0,)), "1 weights"),
    ],
)
def test_what_cannot_be_merged_is_refused(outputs, spec, words):
    with pytest.raises(MicrobatchError, match=words):
        merge_outputs(outputs, (2, 1), spec)


def test_without_rows_only_equal_values_merge_by_themselves():
    assert merge_outputs([torch.ones(()), torch.ones(())], None, Replicate()) == 1
    assert merge_outputs([torch.ones(()), torch.ones(())], None, shared=True) == 1
    assert merge_outputs([("a", None)] * 2, None) == ("a", None)
    with pytest.raises(MicrobatchError, match="nothing in the mini-batch has rows"):
        merge_outputs([torch.ones(()), torch.zeros(())], None, Mean())
    with pytest.raises(MicrobatchError, match="does not know how to merge"):
        merge_outputs([torch.ones(2), torch.zeros(2)], None)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_outputs(layout):
    parts = [torch.eye(4)[:3].to_sparse(layout=layout), torch.eye(4)[3:].to_sparse(layout=layout)]
    merged = merge_outputs(parts, (3, 1))
    assert merged.layout == layout and torch.equal(merged.to_dense(), torch.eye(4))
    same = [torch.eye(4).to_sparse(layout=layout) * number for number in (1, 1, 2)]
    assert merge_outputs(same[:2], (3, 1), Replicate()) is same[0]
    with pytest.raises(MicrobatchError, match="differs between micro-batches"):
        merge_outputs(same[1:], (3, 1), Replicate())
    assert torch.equal(merge_outputs(same, (1, 1, 1), Sum()).to_dense(), 4 * torch.eye(4))
    with pytest.raises(MicrobatchError, match=r"Max\(\).* is sparse_.*to_dense"):
        merge_outputs(same, (1, 1, 1), Max())
    largest = merge_outputs(same, (1, 1, 1), lambda values: torch.stack([v.to_dense() for v in values]).amax(0))
    assert torch.equal(largest, 2 * torch.eye(4))


# The weighted losses and gradients of the micro-batches add up to those of the mini-batch, in float64.


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


# What a message says to write works when it is written: the step runs, with the plain model's numbers.


EYE = torch.eye(4, dtype=torch.float64)


class Net(nn.Module):
    """Takes a mask, or anything that holds some."""

    def __init__(self, mask=lambda given: given):
        super().__init__()
        self.a, self.b, self.mask = nn.Linear(4, 6), nn.Linear(6, 4), mask

    def forward(self, x, mask=None):
        x = torch.relu(self.a(x))
        pipe_split()
        x = self.b(x)
        return x if mask is None else x @ self.mask(mask)


def advised(error, name):
    """The value that a message gives to an argument of the driver, as it is written there."""
    (found,) = re.findall(rf"{name}=(.*?)(?:; if not|; or |$|\n)", str(error.value))
    return {name: eval(found, globals())}


@pytest.mark.parametrize(
    ("mask", "get"),
    [
        (EYE, lambda mask: mask),
        ({"m": EYE, "scale": 2}, lambda mask: mask["m"]),
        ([torch.ones(7, 1), EYE], lambda mask: mask[1]),
        ((EYE, {"n": EYE}), lambda mask: mask[0] @ mask[1]["n"]),
    ],
)
def test_different_numbers_of_rows(threads, mask, get):
    model, x, target = Net(get), torch.randn(7, 4), torch.randn(7, 4)
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss())
    with pytest.raises(MicrobatchError, match="different numbers of rows") as error:
        PipelineDriver1F1B(pipe, threads).run(3, x, mask, target)
    driver = PipelineDriver1F1B(pipe, threads, **advised(error, "chunk_spec"))
    torch.testing.assert_close(driver.run(3, x, mask, target), F.mse_loss(model(x, mask), target))


def test_the_first_of_two_numbers_of_rows_is_the_batch_s(threads):
    model, x = Net(), torch.randn(2, 4)
    with pytest.raises(MicrobatchError, match="different numbers of rows") as error:
        PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads).run(2, x, torch.eye(4))
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads, **advised(error, "chunk_spec"))
    with torch.no_grad():
        torch.testing.assert_close(driver.run(2, x, torch.eye(4)), model(x, torch.eye(4)))


def test_names_in_messages_are_arguments_of_the_driver(threads):
    pipe, x = pipeline(Chain(2, 4), F.cross_entropy), (torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))
    for options, words in [
        ({"chunk_spec": {"y": 0}}, "chunk_spec names"),
        ({"batch_dims": {"y": 1}}, "batch_dims names"),
        ({"loss_reduction": "tokens"}, "loss_reduction=lambda target"),
        ({"loss_reduction": lambda target: -1}, "loss_reduction returned"),
        ({"loss_reduction": lambda wrong, two: 1}, r"loss_reduction\(wrong, two\)"),
    ]:
        with pytest.raises(MicrobatchError, match=words):
            PipelineDriver1F1B(pipe, threads, **options).run(2, *x)


def test_an_unknown_reduction(threads):
    model, x, target = Chain(2, 4), torch.randn(5, 4), torch.tensor([0, -100, -100, 1, 2])
    pipe = pipeline(copy.deepcopy(model), F.cross_entropy)
    with pytest.raises(MicrobatchError, match="'tokens'") as error:
        PipelineDriver1F1B(pipe, threads, loss_reduction="tokens").run(2, x, target)
    driver = PipelineDriver1F1B(pipe, threads, **advised(error, "loss_reduction"))
    torch.testing.assert_close(driver.run(2, x, target), F.cross_entropy(model(x), target))


def test_too_few_rows(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2, 4)), threads)
    with pytest.raises(MicrobatchError, match="chunks=3 or less"):
        driver.run(4, torch.randn(3, 4))
    with torch.no_grad():
        assert driver.run(3, torch.randn(3, 4)).shape == (3, 4)


def test_one_loss_over_the_whole_mini_batch(threads):
    with pytest.raises(DriverError, match="PipelineDriverFillDrain"):
        PipelineDriver1F1B(pipeline(Chain(2, 4), nn.MSELoss()), threads, single_loss=True)
    driver = PipelineDriverFillDrain(pipeline(Chain(2, 4), nn.MSELoss()), threads, single_loss=True)
    driver.run(2, torch.randn(4, 4), torch.randn(4, 4))
