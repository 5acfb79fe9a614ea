"""Rows with other numbers in some tensors, such as padding in targets: both answers to each question that a model asks.

labels        5 rows of 6        first edit                  second edit
              3 1 4 1 5 9        3 1 4 -100 -100 -100        3 1 4 1 5 9
              2 6 5 3 5 8        2 6 5 3 5 8                 2 6 5 3 5 8
              ...                ...                         ...
              9 7 9 3 2 3        9 7 9 3 2 3                 -100 -100 9 3 2 3
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from pippy.drivers.compare.trial_notes import InputTensor, Question, TrialNotes
from pippy.drivers.driver.check.rows import Edit, TriedRows


def edited(rows: TriedRows, asked: TrialNotes, target: str | None) -> Iterator[TriedRows]:
    """The rows with other numbers, edited in two ways; none if the model asks nothing."""
    values: dict[InputTensor, tuple[float, ...]] = {}
    for place, tensor in rows.tensors():
        values_to_put = tuple(_values(place, tensor, asked.questions, target))
        if values_to_put:
            values[place] = values_to_put[: max(1, len(tensor) // 2)]
    if values:
        for second in (False, True):
            put = partial(_put, second=second)
            yield rows.edited({place: Edit(each, partial(put, values=each)) for place, each in values.items()})


def _values(
    place: InputTensor, tensor: torch.Tensor, questions: Sequence[Question], target: str | None
) -> Iterator[float]:
    """The numbers to put into a tensor: those with the other answer to each question about it."""
    if tensor.dtype == torch.bool:
        yield False
        return
    index = not (tensor.is_floating_point() or tensor.is_complex())
    for question in questions:
        asked = question.place == place or (question.place is None and index and target == place[0])
        for value in question.examples() if asked else ():
            if not (index and tensor.is_cuda) or question.counted or 0 <= value <= int(tensor.max()):
                yield value  # a GPU does not recover from an index that is out of range
    if not index and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
        yield float(tensor.flatten()[0]) / 2 or 0.5  # weights that are all alike, say
    if index and (place[0] == target or any(question.place == place for question in questions)):
        left_out = [question.value for question in questions]
        others = {number for number in tensor.unique().tolist() if number not in left_out}
        if len(others) == 1 and (only := others.pop()) > 0:
            yield only // 2  # labels that are all alike


def _put(tensor: torch.Tensor, values: Sequence[float], second: bool) -> torch.Tensor:
    """Put the numbers in turn into the first rows, or into the last ones. In a row of several numbers, a half is replaced."""
    rows = range(len(tensor) - 1, -1, -1) if second else range(len(tensor))
    for row, value in zip(rows, values):
        places = tensor[row].reshape(-1)
        half = slice(None, (places.numel() + 1) // 3 or None) if second else slice(places.numel() // 2, None)
        places[half] = value
        tensor[row] = places.reshape(tensor[row].shape)
    return tensor
