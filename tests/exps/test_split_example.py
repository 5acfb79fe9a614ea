"""Micro-batches that are masked whole batches give the bits of the whole batch; slices give them up to rounding."""

import re

import torch
from torch import nn

from exps import split_example


def rows(text, name):
    """The lines of one way: chunks, same bits, difference."""
    return re.findall(rf"^{name} +(\d+) +(yes|no) +(\S+)$", text, re.MULTILINE)


def test_it_finds_what_it_says(capsys):
    split_example.main()
    text = capsys.readouterr().out
    for name in ("masked wholes", "a driver, masked wholes"):
        assert [(same, difference) for _, same, difference in rows(text, name)] == [("yes", "0.0e+00")] * 5
    for name in ("slices", "a driver, slices"):
        assert len(rows(text, name)) == 5
        assert all(float(difference) < 1e-5 for _, _, difference in rows(text, name))
    assert "no" in [same for _, same, _ in rows(text, "slices")]  # rows alone are a product of another shape


def test_where_rows_depend_on_one_another_the_mask_shows_in_the_results():
    """A mutation that must be seen: batch normalization takes the zeros of the mask for rows."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    masked = split_example.in_masked_wholes(model, x, 2)
    assert not torch.allclose(masked, model(x), rtol=1e-3, atol=1e-3)
