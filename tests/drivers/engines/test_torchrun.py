"""One script under torchrun, and without it: it trains as plain PyTorch does, and leaves nothing. (Several: test_hosts.py.)"""

import os
import re
import runpy
import signal
import sys
from unittest.mock import Mock

import pytest

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import current_cluster
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.engines.open_cluster import cluster
from tests.drivers.models import numbers_of_training
from tests.drivers.processes import listening, watched
from tests.drivers.thread_cluster import thread_cluster
from tests.drivers.torchrun_jobs import ROOT, ready, started

SCRIPT = str(ROOT / "tests/drivers/torchrun_script.py")
STANDALONE = ["-m", "tests.drivers.forking_torchrun", "--standalone", "--nproc-per-node"]
DONE = "equal to plain training\n{}\nrank {} goes on\n"


@pytest.fixture(scope="module")
def numbers():
    """What the script says of a keyed training: the same wherever it runs, and however the model is cut."""
    with thread_cluster(1) as worker:
        return numbers_of_training(worker, stages=1)


def test_the_same_script_trains_everywhere_and_says_nothing(numbers):
    """With the controller on rank 0 it is tried by the quick start, under torchrun itself, and by the tests of hosts."""
    options = {"DRIVER_OPTIONS": '{"all_ranks": [1, 0]}', "OPTIONS": '{"n": 2, "controller_hosts": false}'}
    with started(*STANDALONE, "3", SCRIPT, **options) as process:
        pids = ready(process)
        with watched(*pids):
            out, err = process.communicate(timeout=280)
            assert process.returncode == 0, err
    assert out == DONE.format(numbers, "0")
    assert err == ""


@pytest.mark.usefixtures("alone", "in_float64")
def test_the_same_script_trains_without_torchrun_and_says_nothing(monkeypatch, capfd, numbers):
    monkeypatch.setenv("PIPPY_WORKERS", "2")
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    runpy.run_path(SCRIPT, run_name="__main__")
    out, err = capfd.readouterr()
    assert re.fullmatch(r"ready \d+ \d+\n" + DONE.format(numbers, "none"), out)
    assert err == ""


def test_a_killed_controller_ends_the_job():
    """A killed worker does in test_mixed_clusters.py."""
    with started(*STANDALONE, "2", SCRIPT, "cut") as process:
        pids = ready(process)
        with watched(*pids, within=10):
            assert process.stdout.readline() == "in the step\n"
            assert not listening(pids)
            os.kill(pids[0], signal.SIGKILL)
            process.communicate(timeout=20)
            assert process.returncode != 0


@pytest.mark.usefixtures("alone")
def test_a_cluster_opens_as_the_message_says_and_takes_the_options_of_local_clusters():
    with pytest.raises(ClusterError, match="no cluster is open") as told:
        current_cluster()
    advised = str(told.value).partition("open one: ")[2]
    options = '2, pin=True, threads=1, names=["front", "back"], patience=0.001, transport="shared_memory"'
    found = []

    def see(workers):
        found.extend([workers.workers, workers is current_cluster()])
        found.extend(len(os.sched_getaffinity(worker.pid)) for worker in workers.session.workers)

    exec(advised.replace("(2)", f"({options})").replace("...", "see(workers)"), {"cluster": cluster, "see": see})
    assert found == [("front", "back"), True, 1, 1]


def test_without_torchrun_and_without_a_number(monkeypatch):
    monkeypatch.delenv("PIPPY_WORKERS", raising=False)
    with pytest.raises(ClusterError, match="torchrun --nproc-per-node 2, set PIPPY_WORKERS=2"):
        cluster()
    monkeypatch.setenv("PIPPY_WORKERS", "two")
    with pytest.raises(ClusterError, match="PIPPY_WORKERS is 'two'"):
        cluster()


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"n": 3},
            r"n=3, and torchrun started 1 processes, for 1 workers; .*; local_cluster\(3\) starts 3 workers beside",
        ),
        ({"controller_hosts": False}, "torchrun started only the controller"),
        ({"devices": ["cpu", "cpu"]}, "each of the 1 workers"),
        ({"devices": ["cpu"], "device": "cpu"}, "give only one of the two"),
        ({"timeout": 0}, "timeout=0: give a number of seconds, more than 0"),
        ({"names": ["a", "b"]}, "names must name each of the 1 workers"),
        ({"threads": 0}, "threads=0: give how many"),
        (
            {"pin": True},
            r"pin=True is an option of cluster\(n\), and this cluster is on engine 'torchrun'; leave out pin",
        ),
        ({"n": 1, "transport": "none"}, "transport must be one of None, 'shared_memory', 'rpc'; this is 'none'"),
        ({"patience": 2}, "patience=2: give how many .*, from 0 to 1"),
    ],
)
def test_wrong_arguments_under_torchrun(monkeypatch, options, words):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ClusterError, match=words):
        cluster(**options)


@pytest.mark.parametrize("local, seconds", [("2", 5.0), ("1", 65.0)])
def test_workers_of_several_hosts_have_more_time_to_answer(monkeypatch, local, seconds):
    """TCP sends again within 61 s what a cut of 30 s has lost."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, value)
    told = Mock(side_effect=ClusterError("seen"))
    monkeypatch.setattr("pippy.drivers.engines.torchrun.torchrun.check_seconds", told)
    with pytest.raises(ClusterError, match="seen"):
        cluster()
    assert told.call_args.kwargs["timeout"] == seconds


def test_a_second_cluster_in_one_run(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("pippy.drivers.engines.torchrun.torchrun._was_open", True)
    with pytest.raises(ClusterError, match="open one cluster, and use it for the whole script"):
        cluster()


def test_a_local_cluster_is_refused_in_each_of_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        refused = (
            rf"rank {rank} of 2 processes .* local_cluster\(3\) would start 3 workers for each .* write cluster\(\)"
        )
        with pytest.raises(ClusterError, match=refused):
            local_cluster(3)


@pytest.mark.usefixtures("alone")
def test_a_local_cluster_starts_in_the_only_process_that_torchrun_has_started(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with local_cluster(1, threads=1) as workers:
        assert len(workers) == 1


MISSING = """
import os
if os.environ["RANK"] == "0":
    import pippy
    pippy.cluster(start_timeout=1)
import time; time.sleep(60)
"""


def test_a_rank_that_does_not_come_is_named(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(MISSING)
    with started(*STANDALONE, "2", str(path)) as process:
        _, err = process.communicate(timeout=280)
    assert "these ranks did not call cluster() within 1 s, as rank 0 saw: 1." in err
    assert process.returncode != 0
