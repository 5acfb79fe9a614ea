"""`pippy run`: scripts run as Python would run them, with workers when they ask for them; nothing is left afterwards."""

import os
import re
import signal
import subprocess
import sys

import pytest

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import LazyCluster, current_cluster, current_lazy_cluster, lazy_cluster
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.engines.open_cluster import cluster
from tests.drivers.processes import watched

TRAINING = """
import sys, torch
from torch import nn
from pippy import Pipe, PipelineDriver1F1B, cluster, current_cluster
from beside import Layer

class Scaled(Layer):
    def forward(self, x):
        return super().forward(x) * FACTOR

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

FACTOR = 2.0
model = nn.Sequential(Scaled(), Scaled()).double()
x, target = torch.randn(2, 6, 4, dtype=torch.float64)
loss = loss_fn(model(x), target)
loss.backward()

def check(driver):
    torch.testing.assert_close(driver.run(2, x, target), loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(driver.get_grad(name), parameter.grad, rtol=1e-11, atol=1e-12)

check(PipelineDriver1F1B(Pipe.from_sequential(model, loss_fn)))
with cluster() as workers:
    assert workers is current_cluster()
    check(PipelineDriver1F1B(Pipe.from_sequential(model, loss_fn), workers))
    print(workers, *sys.argv[1:])
assert workers.closed
print("same")
"""

BESIDE = """
from torch import nn

class Layer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""


def test_a_script_trains_on_the_workers_that_stand_by(pippy, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "beside.py").write_text(BESIDE)
    output = pippy("run train.py -n 2 --threads 1 -- --rate 0.1 -n 7")
    assert output == "<Cluster of 2 workers, open: worker0, worker1> --rate 0.1 -n 7\nsame\n"
    with pytest.raises(ClusterError, match="no cluster is open"):
        current_cluster()


def as_script(tmp_path, text):
    (tmp_path / "script.py").write_text(text)


def test_a_script_sees_what_python_would_show_it(pippy, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "near.py").write_text("here = True")
    text = "import sys, near, __main__\nprint(__name__, __file__, sys.argv[1:], sys.path[0], __main__.mark)"
    (tmp_path / "folder" / "script.py").write_text(f"mark = 4\n{text}\n")
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    folder = tmp_path / "folder"
    said = f"__main__ {folder}/script.py ['a', '-b'] {folder} 4\n"
    assert pippy("run folder/script.py a -n 1 -- -b") == said
    python = subprocess.run(
        [sys.executable, "folder/script.py", "a", "-b"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert python.stdout == said
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module(pippy, tmp_path):
    as_script(tmp_path, "import sys\nprint(__name__, __spec__.name, sys.argv[1:])")
    assert pippy("run -m script -n 1 a") == "__main__ script ['a']\n"
    assert "there is no module 'skript'; -m takes a name" in pippy("run -m skript -n 1", status=1)
    assert "there is no module 'no.such'" in pippy("run -m no.such -n 1", status=1)


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("print('well')", 0, "well\n"),
    ],
)
def test_the_status_is_the_scripts(pippy, tmp_path, line, status, said):
    as_script(tmp_path, f"import sys\n{line}\n")
    assert pippy("run script.py -n 1", status=status) == said


def test_whose_workers_run_is_said_where_a_script_opens_its_own(pippy, tmp_path):
    as_script(tmp_path, "from pippy import local_cluster\nwith local_cluster(1) as workers:\n    print(workers)")
    said, note = sorted(pippy("run script.py -n 2").splitlines())
    assert said.startswith("<Cluster of 1 worker, open")
    assert note.startswith("Note: the 2 workers of -n were not started: script.py opened a cluster of its own")
    as_script(tmp_path, "from pippy import cluster\ncluster(1)")
    assert "n=1, and this script was started for 2 workers" in pippy("run script.py -n 2", status=1)


def test_a_script_that_raises_shows_its_own_frames(pippy, tmp_path):
    as_script(tmp_path, "def step():\n    raise ValueError('mine')\n\nprint('before')\nstep()\n")
    output = re.sub(r"\n +[\^~]+", "", pippy("run script.py -n 1", status=1))
    file = tmp_path / "script.py"
    assert output == (
        f'before\nTraceback (most recent call last):\n  File "{file}", line 5, in <module>\n    step()\n'
        f"  File \"{file}\", line 2, in step\n    raise ValueError('mine')\nValueError: mine\n"
    )


def test_an_error_of_pippy_ends_with_the_scripts_frame_and_its_message(pippy, tmp_path):
    as_script(
        tmp_path,
        "from torch import nn\nfrom pippy import pipeline\n\n\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n\n\npipeline(Net(), num_stages=2)\n",
    )
    output = pippy("run script.py -n 1", status=1)
    assert re.findall(r'File "([^"]+)"', output) == [str(tmp_path / "script.py")]
    assert "During handling" not in output and "direct cause" not in output
    assert "pippy.ir.base.errors.BalanceError: Net cannot be cut into 2 stages" in output


def test_a_script_that_is_no_python_shows_its_line(pippy, tmp_path):
    as_script(tmp_path, "print('before')\nx = (1,\n")
    lines = pippy("run script.py -n 1", status=1).splitlines()
    assert lines[0] == f'  File "{tmp_path}/script.py", line 2'
    assert lines[-1] == "SyntaxError: '(' was never closed"


def test_a_script_with_a_hook_of_its_own(pippy, tmp_path):
    as_script(tmp_path, "import sys\nsys.excepthook = lambda kind, error, trace: print('hooked', error)\n1 / 0\n")
    hook = sys.excepthook
    try:
        assert pippy("run script.py -n 1", status=1) == "hooked division by zero\n"
    finally:
        sys.excepthook = hook


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("run script.py", 2, "Missing option '-n' / '--workers'"),
        ("run script.py -n 0", 2, "0 is not in the range x>=1"),
        ("run skript.py -n 2", 1, "there is no script 'skript.py'; did you mean 'script.py'?"),
        (
            "run script.py -n 2 --rate 3",
            2,
            "an option of the script goes behind --, as in: pippy run train.py -n 2 -- --rate",
        ),
    ],
)
def test_mistakes(pippy, tmp_path, command, status, words):
    as_script(tmp_path, "print('it did run')")
    output = pippy(command, status=status)
    assert words in output
    assert "it did run" not in output


def test_the_number_of_workers_from_the_environment(pippy, tmp_path, monkeypatch):
    as_script(
        tmp_path,
        "from pippy.drivers.engines.cluster import current_lazy_cluster\nprint(current_lazy_cluster().n)",
    )
    monkeypatch.setenv("PIPPY_WORKERS", "3")
    assert pippy("run script.py") == "3\n"
    assert pippy("run script.py -n 2") == "2\n"
    monkeypatch.setenv("PIPPY_WORKERS", "many")
    assert "'many' is not a valid integer" in pippy("run script.py", status=2)


def test_torchrun_is_told_of(pippy, tmp_path, monkeypatch):
    as_script(tmp_path, "print('ran')")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun --nproc-per-node 2 script.py" in pippy("run script.py -n 2", status=1)


class Started:
    """Stands for a cluster: remembers its options."""

    def __init__(self, **options):
        self.options, self.closed = options, False

    def close(self):
        self.closed = True


def test_a_cluster_is_started_when_it_is_asked_for_and_closed_in_the_end():
    with lazy_cluster(2, Started, threads=1) as lazy:
        assert current_lazy_cluster() is lazy and lazy.started is None
        first = current_cluster()
        assert first is current_cluster() is cluster() is cluster(2)
        assert first.options == {"n": 2, "threads": 1}
        first.close()
        second = cluster(timeout=3.0)
        assert second.options == {"n": 2, "threads": 1, "timeout": 3.0, "start_timeout": 60.0}
    assert second.closed and current_lazy_cluster() is None


def test_options_of_the_script_count_more():
    with lazy_cluster(2, Started, threads=1, device="cpu"):
        options = cluster(threads=4, names=["a", "b"], patience=0.0, transport="shared_memory", pin=False).options
    assert options["threads"] == 4 and options["names"] == ["a", "b"] and options["device"] == "cpu"
    assert (options["patience"], options["transport"], options["pin"]) == (0.0, "shared_memory", False)


def test_another_number_of_workers_is_refused():
    with (
        lazy_cluster(2, Started),
        pytest.raises(ClusterError, match=r"started for 2 workers; leave out n, or start it with: .* -n 3"),
    ):
        cluster(3)


def test_a_lazy_cluster_that_raises_is_forgotten():
    with pytest.raises(KeyError), lazy_cluster(2, Started):
        raise KeyError
    assert current_lazy_cluster() is None
    assert isinstance(LazyCluster(1, {}, local_cluster), LazyCluster)


WAITING = """
import os, signal
from pippy import cluster
workers = cluster()
print(os.getpid(), *(each.pid for each in workers.session.workers), flush=True)
signal.pause()
"""


def test_ctrl_c_ends_the_script_and_its_workers(tmp_path):
    as_script(tmp_path, WAITING)
    command = [sys.executable, "-m", "pippy", "run", "script.py", "-n", "2", "--threads", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as process:
        try:
            pids = [int(each) for each in process.stdout.readline().split()]
            assert pids[0] == process.pid
            with watched(*pids[1:], within=10):
                os.killpg(process.pid, signal.SIGINT)
                _, said = process.communicate(timeout=280)
        finally:
            process.kill()
    assert process.returncode == 130
    assert re.findall(r'File "([^"]+)", line [56],', said) == [str(tmp_path / "script.py")]
    assert said.endswith("KeyboardInterrupt\n")
