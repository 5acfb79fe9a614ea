"""`pippy fit`: the table of what fits, and the refusal of what does not; what is advised works."""

import re

import pytest

from pippy.drivers.plan.choice import search

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)
"""
CALL = "--loss torch.nn:MSELoss --input float32[64,8] --input float32[64,8]"


@pytest.fixture
def fit(pippy, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "SEARCHED", 0)  # to search an order takes seconds
    monkeypatch.setattr(search, "schedules", lambda: ["fill_drain", "1f1b", "zb_h1"])
    (tmp_path / "net.py").write_text(NET)
    return lambda options, call=CALL, **more: pippy(f"fit net.py:Net {options} {call}", **more)


def test_the_table_says_what_was_chosen_and_what_else_there_is(fit):
    free = fit("--memory 1GiB -p 2 -m 4")
    assert re.match(r"\w+ with 4 micro-batches: its step is guessed to take \S+ ms, and without the limit", free)
    assert "<- chosen" in free and "of 1 GiB" in free and "always" not in free
    some = fit("--memory 1GiB,2GiB -p 2 --optimizer adam --checkpoint always")
    assert "of 2 GiB" in some and "0 always, 1 always" in some


def test_where_nothing_fits_what_is_advised_does(fit):
    said = fit("--memory 9KiB -p 2 -m 2", status=1)
    assert said.startswith("Error: --memory '9KiB' is too little: the nearest, ")
    (limit, chunks) = re.findall(r"What would fit: --memory '(\S+)', or (\d+) micro-batches", said)[0]
    assert "<- chosen" in fit(f"--memory {limit} -p 2 -m 2")
    assert "<- chosen" in fit(f"--memory 9KiB -p 2 -m {chunks}")


def test_what_cannot_work_is_refused(fit):
    assert "Error: --memory '12': it has no unit" in fit("--memory 12 -p 2", status=1)
    assert "torch.optim has no 'adum'; did you mean 'Adam'" in fit("--memory 1GiB -p 2 --optimizer adum", status=2)
    assert "has no loss, and what fits is a step of training; give --loss" in fit(
        "--memory 1GiB -p 2", call="--input float32[64,8]", status=1
    )
    assert "has 2 stages for 3 workers; give --num-stages 3, or fewer workers" in fit(
        "--memory 1GiB -p 3 --num-stages 2", status=1
    )
    assert "<- chosen" in fit("--memory 1GiB -p 3 -m 2 --num-stages 3")


LOSS = "--loss torch.nn:MSELoss"


UNEVEN = f"{LOSS} --input float32[64,8] --input float32[32,8]"
NO_TARGET = f"{LOSS} --input float32[64,8]"
TOO_WIDE = f"{LOSS} --input float32[64,9] --input float32[64,8]"


@pytest.mark.parametrize(
    ("options", "call", "said", "typed"),
    [
        ("-m 100", CALL, r"too few for 100 micro-batches; use chunks=64 or less", "-m for chunks="),
        ("", UNEVEN, r"^Error: without -m, .* not all as many; give .*-m 1$", None),
        ("-m 2", UNEVEN, r"chunk_spec=.*Replicate\(\)", "-m for chunks=, -m 1 for Replicate()"),
        ("", NO_TARGET, r"^Error: example_args are not arguments of this Pipe: missing", "--input for example_args"),
        ("", TOO_WIDE, r"give example_args and example_kwargs that the model", "--input for example_args"),
    ],
)
def test_errors_name_the_options_for_the_arguments_that_they_name(options, call, said, typed, fit):
    shown = fit(f"--memory 1GiB -p 2 {options}", call=call, status=1).strip()
    assert re.search(said, shown, re.MULTILINE)
    last = shown.splitlines()[-1]
    assert "On the command line" not in last if typed is None else last == f"On the command line, use {typed}"


def test_numbers_of_micro_batches_that_fit_tries_itself_are_no_fault_of_the_users(fit, tmp_path):
    """It raised an error that asked for another example, which nobody had given."""
    loop = "        assert all(row.shape == (8,) for row in x)\n        return"
    (tmp_path / "net.py").write_text(NET.replace("        return", loop))
    told = fit("--memory 1GiB -p 2")
    assert "<- chosen" in told and "with 1 micro-batch:" in told
    assert (
        "Warning: without -m, numbers of micro-batches are tried; the model cannot be run in 2, 4, 8, 16, 32, 64"
        in told
    )


def test_why_so_many_micro_batches_and_this_schedule_is_said_in_what_a_worker_computes_and_waits(fit):
    """One micro-batch was chosen for two workers without a word, where every book says that more hide the waiting."""
    lines = fit("--memory 1GiB -p 2").splitlines()
    assert lines[0].startswith("zb_h1 with 1 micro-batch: its step is guessed to take ")
    ms = r"(\d+\.\d) ms"
    number = rf"  why: on average a worker computes {ms} and waits {ms}; in 2 micro-batches it would compute {ms}"
    begin, schedule = (
        f", because each computation takes time to begin, and wait {ms}",
        rf"; under \w+ it would compute {ms}",
    )
    told = re.fullmatch(f"{number}{begin}{schedule} and wait {ms}", lines[1])
    computes, waits, more, less, same, longer = told.groups()
    assert float(more) > float(computes) == float(same) and float(less) < float(waits) < float(longer)
    of_step = float(re.search(ms, lines[0])[1])
    assert float(computes) + float(waits) == pytest.approx(of_step, abs=0.11)  # they are rounded
    assert "; in " not in fit("--memory 1GiB -p 2 -m 2").splitlines()[1] and "why: " not in fit("--memory 1GiB -p 1")
