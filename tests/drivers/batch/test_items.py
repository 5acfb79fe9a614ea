"""Items of data become the arguments of one step."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from pippy import MicroBatches, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.items import call_of_items
from pippy.ir.base.errors import InputError

Pair = namedtuple("Pair", "x target")


def test_one_item_is_given_as_it_is():
    x, target = torch.ones(4, 2), torch.ones(4)
    for item in ((x, target), [x, target], Pair(x, target)):
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
    driver.close()
