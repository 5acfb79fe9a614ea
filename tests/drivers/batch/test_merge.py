"""Merging: what the model returns for the whole mini-batch, or an error that says what differs."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.merge import merge_outputs
from pippy.drivers.batch.specs import ChunkSpec, Max, Mean, Min, Replicate, Sum, TensorChunkSpec

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
