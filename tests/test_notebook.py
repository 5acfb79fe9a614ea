"""The notebook runs in a kernel, is interrupted, and goes on; nothing is left when the kernel ends."""

import copy
import json
from pathlib import Path

import pytest

from tests import notebooks
from tests.drivers.processes import watched
from tests.notebooks import NotebookError, check_notebook, code_cells, printed

NOTEBOOK = Path(__file__).parent.parent / "docs/notebook.ipynb"
PIDS = "[each.pid for each in workers.session.workers]"


@pytest.fixture(scope="module")
def kernel():
    with notebooks.kernel() as running:
        yield running


def test_the_notebook_shows_what_it_says(kernel):
    notebook = json.loads(NOTEBOOK.read_text())
    assert check_notebook(kernel, notebook) == len(code_cells(notebook)) > 8
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))


MODEL = """
import sys
@torch.fx.wrap
def seen(x):
    print("seen on a worker", file=sys.stderr)
    return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = seen(self.first(x))
        pipe_split()
        return self.last(x)

driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), workers)
driver.run(1, x, target)
"""


def test_a_lost_cluster_makes_room_workers_are_heard_and_all_ends_with_the_kernel(kernel):
    """After the notebook: its names are there, and its cluster is closed."""
    kernel.run("workers = cluster(2, threads=1)")
    lost = kernel.value(PIDS)
    with watched(*lost):
        kernel.run("import os, signal; os.kill(workers.session.workers[0].pid, signal.SIGKILL)")
        outputs = kernel.run("driver = PipelineDriver1F1B(pipe, workers)")
        assert [each["ename"] for each in outputs if each["output_type"] == "error"] == ["WorkerLostError"]
        outputs = kernel.run("workers = cluster(2, threads=1)")
        assert [each for each in outputs if each["output_type"] == "error"] == []
    pids = kernel.value(PIDS)
    assert not set(lost) & set(pids)
    with watched(*pids):
        outputs = kernel.run(MODEL)
        heard = printed(outputs)
        streamed = kernel.streamed()
        while "seen on a worker" not in heard:
            heard += next(streamed)
        kernel.manager.shutdown_kernel(now=True)


class Recorded:
    """Stands in for a kernel whose cells show what is given."""

    def __init__(self, outputs):
        self.outputs = outputs

    def run(self, code, interrupt_after=None):
        return copy.deepcopy(self.outputs)


def cell(*tags, text="", error=None):
    outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    if error:
        outputs.append({"output_type": "error", "ename": error, "evalue": "", "traceback": [error]})
    return {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": "cell", "outputs": outputs}


@pytest.mark.parametrize(
    ("holds", "shows", "right"),
    [
        (cell(text="a\n"), cell(text="a\n"), True),
        (cell(text="a\n"), cell(text="b\n"), False),
        (cell(text="a\n"), cell(text="a\nb\n"), False),
        (cell("interrupt", text="a\n"), cell(text="a\nb\n"), True),
        (cell("interrupt", text="a\nc\n"), cell(text="a\nb\n"), False),
        (cell(), cell(error="ValueError"), False),
        (cell(error="ValueError"), cell(error="ValueError"), False),
        (cell("raises-exception", error="ValueError"), cell(error="ValueError"), True),
        (cell("raises-exception", error="KeyError"), cell(error="ValueError"), False),
        (cell("raises-exception", error="ValueError"), cell(), False),
    ],
)
def test_what_is_not_so_is_caught(holds, shows, right):
    try:
        check_notebook(Recorded(shows["outputs"]), {"cells": [holds]})
    except NotebookError:
        assert not right
    else:
        assert right
