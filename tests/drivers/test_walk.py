"""The walk of a step, as docs/changing.md draws it, is the walk that a step takes."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pippy
from pippy import PipelineDriver1F1B, local_cluster
from tests.drivers.processes import close_open_cluster
from tests.drivers.watched_worker import FOLDER, noting_calls

PAGE = Path(__file__).resolve().parents[2] / "docs/changing.md"
MOST = 25  # stops each way


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        pippy.pipe_split()
        return self.second(x)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The calls of the third step, by process: of the script, worker0 and worker1."""
    close_open_cluster()
    folder = tmp_path_factory.mktemp("calls")
    os.environ[FOLDER] = str(folder)
    noted = []
    try:
        with local_cluster(2, threads=1, _worker="tests.drivers.watched_worker:Worker") as cluster:
            driver = PipelineDriver1F1B(pippy.pipeline(Two(), nn.MSELoss()), cluster)
            x = torch.randn(4, 4)
            driver.run(2, x, x), driver.run(2, x, x)
            for file in folder.iterdir():
                os.truncate(file, 0)
            with noting_calls(lambda *call: noted.append(" ".join(call))):
                driver.run(2, x, x)
            workers = {file.name: file.read_text().splitlines() for file in folder.iterdir()}
            driver.close()
    finally:
        del os.environ[FOLDER]
    return {"script": noted, **workers}


def drawn(which):
    """The stops of the figure that follows the words "First there" or "And back": (process, call), ..."""
    _, _, text = PAGE.read_text().partition("### The walk of a step")
    figure = text.partition(which)[2].partition("\n\n")[2].partition("\n\n")[0]
    stops, process = [], ""
    for line in figure.splitlines():
        named, file, function = re.fullmatch(r" {4}(\w*) +(\S+\.py) +([\w.]+).*", line).groups()
        process = named or process
        stops.append((process, f"{file} {function}"))
    return stops


def first_missing(stops, calls):
    """The first stop that is not called after those before it, or None."""
    left = {process: iter(made) for process, made in calls.items()}
    return next((stop for process, stop in stops if stop not in left[process]), None)


def test_a_step_walks_as_it_is_drawn(calls):
    there, back = drawn("First there"), drawn("And back")
    assert 10 <= len(there) <= MOST and 10 <= len(back) <= MOST
    assert first_missing(there + back, calls) is None
    assert first_missing((back + there)[1:], calls) is not None


@pytest.mark.parametrize("at", range(9))
def test_stops_that_change_places_are_found(calls, at):
    stops = [stop for stop in drawn("First there") if stop[0] == "script"]
    stops[at], stops[at + 1] = stops[at + 1], stops[at]
    assert first_missing(stops, calls) is not None
