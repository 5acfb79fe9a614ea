"""Sequences cut into slices: what each micro-batch gets, wherever its rows are held, and what is joined of it again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.division import Division, SlicedTensor, for_each_slice
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.batch.slices import count_next_labels, joined_slices
from pippy.drivers.plan.language.edges import shares
from pippy.errors import MicrobatchError


def sliced_division(rows, chunks, slices, length):
    whole = divide({"x": torch.arange(rows * length).reshape(rows, length)}, chunks)
    tensors = {
        name: SlicedTensor(whole.arguments["x"].value, 0, grows=grows) for name, grows in (("x", False), ("mask", True))
    }
    sizes, starts = (for_each_slice(each, slices) for each in (whole.sizes, whole.starts))
    return Division(chunks * slices, sizes, tensors, {}, starts=starts, slices=slices)


@given(st.data())
@settings(max_examples=40)
def test_each_micro_batch_has_its_rows_and_its_tokens(data):
    chunks, slices = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    rows, size = data.draw(st.integers(chunks, 8)), data.draw(st.integers(1, 3))
    division = sliced_division(rows, chunks, slices, length=size * slices)
    x = division.arguments["x"].value
    assert (division.rows, division.row_chunks) == (rows, chunks)
    replicas = data.draw(st.integers(1, chunks))
    parts = [(division.part(share), share) for share in shares(division.chunks, replicas, slices)]
    for held, share in [(division, range(division.chunks)), *parts]:
        for microbatch in share:
            at, number = divmod(microbatch, slices)
            mine = x.tensor_split(chunks)[at]
            assert held.take("x", microbatch).equal(mine[:, number * size : (number + 1) * size])
            assert held.take("mask", microbatch).equal(mine[:, : (number + 1) * size])
            of_rows = "" if rows == 1 else f" of {rows}, slice {number} of {slices}"
            assert division.rows_shown(microbatch).endswith(of_rows)
    joined = joined_slices([division.take("x", microbatch) for microbatch in range(division.chunks)], division)
    assert torch.cat(joined).equal(x)


def test_slices_count_for_the_labels_in_them():
    labels = torch.tensor([[1, 2, -100, -100], [1, -100, -100, 4]])
    division = sliced_division(rows=2, chunks=1, slices=2, length=4)
    division.arguments["shift_labels"] = SlicedTensor(labels, 0)
    division.names["shift_labels"] = "shift_labels"
    assert loss_weights(None, division, how=count_next_labels) == (3 / 4, 1 / 4)
    assert loss_weights(torch.nn.CrossEntropyLoss(), division, "shift_labels") == (3 / 4, 1 / 4)


def test_what_is_not_along_the_sequence_cannot_be_joined():
    division = sliced_division(rows=2, chunks=1, slices=2, length=4)
    with pytest.raises(
        MicrobatchError, match=r"returns float32\[2, 3\] for a slice of 2 tokens of 2 rows.* outputs=False"
    ):
        joined_slices([{"pooled": torch.zeros(2, 3)}] * 2, division)
