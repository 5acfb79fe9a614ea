"""Dividing: the pieces are the rows of the whole, items of data are arguments, and what would be cut wrong is refused."""

import pickle
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.batch.division import Division, SlicedTensor, for_each_slice
from pippy.drivers.batch.items import call_of_items
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.batch.slices import count_next_labels, joined_slices
from pippy.drivers.batch.specs import ChunkSpec, MicroBatches, Replicate, TensorChunkSpec
from pippy.drivers.plan.language.edges import shares
from pippy.ir.base.errors import InputError
from pippy.ir.base.trees import cat

Pair = namedtuple("Pair", "left right")


@given(rows=st.integers(1, 20), chunks=st.integers(1, 20), dim=st.integers(-3, 2), strided=st.booleans())
def test_pieces_are_those_of_tensor_split(rows, chunks, dim, strided):
    shape = [2, 3, 4]
    shape[dim] = rows
    whole = torch.arange(rows * 24 // [2, 3, 4][dim]).reshape(shape[::-1] if strided else shape)
    whole = whole.permute(2, 1, 0) if strided else whole
    if rows < chunks:
        with pytest.raises(MicrobatchError, match=f"x has {rows} row.*chunks={rows}\\b"):
            divide({"x": whole}, chunks, {"x": dim})
        return
    division = divide({"x": whole}, chunks, {"x": dim})
    expected = whole.contiguous().tensor_split(chunks, dim)
    here, there = division.microbatches("x"), pickle.loads(pickle.dumps(division)).microbatches("x")
    assert division.sizes == tuple(piece.shape[dim] for piece in expected)
    for piece, travelled, right in zip(here, there, expected, strict=True):
        assert torch.equal(piece, right) and torch.equal(travelled, right)
        assert piece.stride() == travelled.stride() == right.stride()


def test_pieces_are_views_and_replicas_the_same_object():
    x, extra = torch.randn(6, 2), object()
    division = divide({"x": x, "extra": extra, "scale": torch.tensor(2.0)}, 3)
    assert all(
        piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in division.microbatches("x")
    )
    assert all(value is extra for value in division.microbatches("extra"))
    assert division.take("scale", 0) is division.take("scale", 2)


def test_the_plan_does_not_grow_with_the_number_of_micro_batches():
    x = torch.randn(400, 3)
    few, many = (len(pickle.dumps(divide({"x": x}, chunks))) for chunks in (4, 400))
    assert many - few < 400 * 6  # two small numbers each


def test_containers_are_cut_leaf_by_leaf():
    value = {"a": Pair(torch.arange(4), 7), "b": [torch.arange(8).reshape(2, 4)], "none": None, "empty": {}}
    division = divide({"x": value}, 2, {"x": {"b": 1, "a": {"left": TensorChunkSpec(0)}}})
    taken = division.take("x", 1)
    assert isinstance(taken["a"], Pair) and taken["a"].left.tolist() == [2, 3] and taken["a"].right == 7
    assert taken["b"][0].tolist() == [[2, 3], [6, 7]] and taken["none"] is None and taken["empty"] == {}


def test_one_spec_for_a_container_skips_what_has_no_dimensions():
    taken = divide({"x": (torch.zeros(2, 4), torch.tensor(1), "s")}, 4, {"x": 1}).take("x", 0)
    assert taken[0].shape == (2, 1) and taken[1:] == (torch.tensor(1), "s")


def test_requires_grad_is_kept_and_the_graph_is_not():
    x = torch.ones(4, requires_grad=True) * 2
    for value in (divide({"x": x}, 2), divide({"x": x}, 1), divide({"x": x}, 2, {"x": Replicate()})):
        taken = pickle.loads(pickle.dumps(value)).take("x", 0)
        assert taken.requires_grad and taken.is_leaf


class EveryOther(ChunkSpec):
    def split(self, value, chunks):
        return [value[index::chunks] for index in range(chunks)]


def test_a_spec_of_ones_own():
    division = divide({"x": torch.arange(5), "y": torch.zeros(4)}, 2, {"x": EveryOther()})
    assert [piece.tolist() for piece in division.microbatches("x")] == [[0, 2, 4], [1, 3]]
    assert division.sizes == (2, 2)


def test_what_is_given_cut_says_how_the_rest_is_cut():
    given = MicroBatches([torch.zeros(1, 2), torch.ones(4, 2)])
    division = divide({"x": [given, 3], "y": torch.arange(5)}, 2)
    assert division.sizes == (1, 4)
    assert division.take("y", 1).tolist() == [1, 2, 3, 4] and division.take("x", 1)[0].shape == (4, 2)
    masks = MicroBatches([torch.zeros(9, 9), torch.zeros(9, 9)], dim=None)
    assert divide({"mask": masks, "y": torch.arange(5)}, 2).sizes == (3, 2)


def test_a_mask_leaves_a_micro_batchs_own_rows():
    x = torch.arange(1, 13).reshape(3, 4)
    division = divide({"x": x, "b": torch.ones(4, dtype=torch.bool)}, 3, {"x": 1}, mask=True)
    assert division.take("x", 0).tolist() == [[1, 2, 0, 0], [5, 6, 0, 0], [9, 10, 0, 0]]
    assert division.take("b", 2).tolist() == [False, False, False, True]
    assert torch.equal(sum(division.microbatches("x")), x)
    assert division.own_rows(division.take("x", 1), 1, dim=1).tolist() == [[3], [7], [11]]


def test_a_worker_gets_its_part_only():
    part = divide({"x": torch.zeros(4), "y": torch.zeros(4)}, 2).only(["y"])
    assert list(part.arguments) == ["y"] and part.sizes == (2, 2) and part.take("y", 1).shape == (2,)


@pytest.mark.parametrize(
    ("values", "specs", "words"),
    [
        ({"x": torch.zeros(8, 2), "mask": torch.zeros(3, 3)}, {}, r"x: 8 rows.*mask: 3 rows.*'mask': Replicate\(\)"),
        ({"x": (torch.zeros(8), torch.zeros(1, 8))}, {}, r"x\[0\]: 8 rows.*x\[1\]: 1 rows"),
        ({"x": torch.zeros(8)}, {"y": 0}, r"names \['y'\].*\['x'\]"),
        ({"x": torch.zeros(8)}, {"x": 1}, r"dimension 1: it is float32\[8\]"),
        ({"x": 7}, {"x": 1}, "dimension 1: it is 7"),
        ({"x": torch.zeros(8)}, {"x": "rows"}, "the spec for x is 'rows'"),
        ({"x": {"a": torch.zeros(8)}}, {"x": {"b": 0}}, r"names \['b'\].*\['a'\]"),
        ({"x": [torch.zeros(8)]}, {"x": [0, 1]}, "same shape"),
        ({"x": torch.zeros(8)}, {"x": ChunkSpec()}, "it has no split"),
        ({"x": MicroBatches([1, 2, 3])}, {}, "has 3 values for x, and there are 2"),
        ({"x": MicroBatches([torch.zeros(2)] * 2), "y": torch.zeros(5)}, {}, r"\(2, 2\) rows, 4 in all.*y: 5 rows"),
        (
            {"x": torch.eye(4).to_sparse_bsr((2, 2))},
            {},
            r"x is sparse_bsr float32\[4, 4\], .*Replicate\(\).*MicroBatches",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(values, specs, words):
    with pytest.raises(MicrobatchError, match=f"(?s){words}"):
        divide(values, 2, specs)


WHOLE = torch.tensor([[0.0, 1, 2], [3, 0, 0], [0, 0, 0], [4, 0, 5], [6, 7, 0]])
SPARSE = {
    "coo": WHOLE.to_sparse(),
    "uncoalesced": WHOLE.to_sparse() + WHOLE.to_sparse(),
    "rows stored whole": WHOLE.to_sparse(1),
    "csr": WHOLE.to_sparse_csr(),
    "csc": WHOLE.to_sparse_csc(),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_cut(name, dim):
    x = SPARSE[name]
    pieces = divide({"x": x}, 2, {"x": dim}).microbatches("x")
    assert all(piece.layout == x.layout for piece in pieces)
    expected = torch.tensor_split(x.to_dense(), 2, dim)
    assert all(torch.equal(piece.to_dense(), rows) for piece, rows in zip(pieces, expected, strict=True))
    assert torch.equal(cat(pieces, dim).to_dense(), x.to_dense())


def test_a_layout_that_is_not_cut_may_be_given_whole_or_in_pieces():
    x = torch.eye(4).to_sparse_bsr((2, 2))
    assert divide({"x": x}, 1).take("x", 0).layout == torch.sparse_bsr
    assert divide({"x": x, "y": torch.ones(4)}, 2, {"x": Replicate()}).take("x", 1).shape == (4, 4)
    assert divide({"x": MicroBatches([x, x])}, 2).sizes == (4, 4)
    with pytest.raises(MicrobatchError, match="cannot be cut for a mask"):
        divide({"x": torch.eye(4).to_sparse()}, 2, mask=True)


def test_other_wrong_arguments_are_refused():
    for chunks in (0, -1, True, 2.0):
        with pytest.raises(MicrobatchError, match=r"chunks=.*: give the number of micro-batches, 1 or more"):
            divide({}, chunks)
    with pytest.raises(MicrobatchError, match="is given as MicroBatches"):
        divide({"x": MicroBatches([1, 2])}, 2, mask=True)
    with pytest.raises(MicrobatchError, match="takes a list"):
        MicroBatches(torch.zeros(3))


def test_one_micro_batch_is_the_whole_whatever_its_rows():
    division = divide({"x": torch.zeros(4), "mask": torch.zeros(3, 3), "none": torch.zeros(0)}, 1)
    assert division.sizes is None and division.take("mask", 0).shape == (3, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, input, *more, scale=1.0):
        x = self.lin(input)
        pipe_split()
        return x + more[0].t() * scale


def test_a_call_is_divided_by_the_names_of_the_model():
    pipe = pipeline(Net(), nn.MSELoss())
    args = (torch.randn(4, 2), torch.randn(2, 4), torch.randn(4, 2))
    for said in (
        {"batch_dims": [0, 1, 0]},
        {"batch_dims": [None, 1]},
        {"chunk_spec": {"more": [1]}},
        {"chunk_spec": [0, 1]},
    ):
        division = divide_call(pipe, 2, args, {}, **said)
        taken = {user: division.take(name, 1) for user, name in division.names.items()}
        assert (
            taken["input"].shape == taken["target"].shape == (2, 2)
            and taken["more"][0].tolist() == args[1][:, 2:].tolist()
        )
    with pytest.raises(MicrobatchError, match=r"'wrong'.*inputs are input"):
        divide_call(pipe, 2, args, {}, chunk_spec={"wrong": 0})
    with pytest.raises(MicrobatchError, match="call has 3 positional"):
        divide_call(pipe, 2, args, {}, batch_dims=[0] * 4)
    with pytest.raises(MicrobatchError, match=r"target has both a spec, 0, and a batch dim, 1"):
        divide_call(pipe, 2, args, {}, chunk_spec={"target": 0}, batch_dims=[0, 1, 1])


# Items of data become the arguments of one step.


Item = namedtuple("Item", "x target")


def test_one_item_is_given_as_it_is():
    x, target = torch.ones(4, 2), torch.ones(4)
    for item in ((x, target), [x, target], Item(x, target)):
        call = call_of_items([item], 2)
        assert call.args[0] is x and call.args[1] is target and not call.kwargs and call.chunks == 2
    assert call_of_items([{"x": x}], 2).kwargs["x"] is x
    assert call_of_items([x], None).args[0] is x


@pytest.mark.parametrize("rows, chunks", [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_an_item_is_cut_into_no_more_micro_batches_than_it_has_rows(rows, chunks):
    assert call_of_items([(torch.ones(rows, 2), torch.ones(rows))], 3).chunks == chunks
    assert call_of_items([torch.ones(rows, 2), torch.ones(4, 2)], 3).chunks == chunks + 3


def test_several_items_are_cut_one_by_one_and_what_is_the_same_in_all_stays_one():
    items = [({"x": torch.full((3, at + 1), at), "rate": at}, torch.tensor(0.5), None, "a") for at in range(2)]
    call = call_of_items(items, 2)
    asked, scale, nothing, text = call.args
    assert [piece.tolist() for piece in asked["x"].values] == [[[0], [0]], [[0]], [[1, 1], [1, 1]], [[1, 1]]]
    assert asked["rate"].values == (0, 0, 1, 1) and asked["rate"].dim is None
    assert (scale, nothing, text) == (torch.tensor(0.5), None, "a")


@pytest.mark.parametrize("item", [7, None, {1: torch.ones(2)}, {torch.ones(2)}])
def test_what_is_no_mini_batch_is_refused(item):
    with pytest.raises(MicrobatchError, match=r"data returned .* collate_fn"):
        call_of_items([item], 2)


@pytest.mark.parametrize(
    "other", [torch.ones(2), (torch.ones(2),), {"x": torch.ones(2), "y": torch.ones(2)}, {"x": [torch.ones(2)]}]
)
def test_items_of_different_shapes_are_not_one_mini_batch(other):
    with pytest.raises(MicrobatchError, match="must have the same shapes"):
        call_of_items([{"x": torch.ones(2)}, other], 2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x, scale=1.0):
        x = self.first(x) * scale
        pipe_split()
        return self.last(x)


def test_micro_batches_are_of_the_kind_that_the_example_was(threads):
    """They were refused by every Pipe that was made with an example: MicroBatches is no tensor."""
    example = torch.ones(2, 2)
    driver = PipelineDriver1F1B(pipeline(Scaled(), example_args=(example,)), threads)
    pieces = [torch.randn(3, 2), torch.randn(1, 2)]
    assert torch.equal(driver.run(2, MicroBatches(pieces)), driver.run(2, torch.cat(pieces), 1.0)[:4])
    with pytest.raises(InputError, match=r"x, micro-batch 1, is float32\[2\]; in the example .* 2 dimensions"):
        driver.run(2, MicroBatches([torch.ones(3, 2), torch.ones(2)]))


# Sequences cut into slices: what each micro-batch gets, wherever its rows are held, and what is joined of it again.


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
