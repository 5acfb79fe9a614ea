"""All engines keep one contract."""

import inspect
import os
import socket
import sys
import textwrap

import pytest

from pippy import local_cluster
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.engine import start
from tests.drivers import scripted_worker
from tests.drivers.engines.contract import info_is_logged, keep
from tests.drivers.launched_cluster import LaunchedEngine, launched_cluster
from tests.drivers.thread_cluster import ThreadEngine
from tests.drivers.torchrun_jobs import ROOT

pytestmark = pytest.mark.usefixtures("alone")


def by_threads(folder):
    engine = ThreadEngine(["a", "b"], worker=scripted_worker.Worker)
    return Cluster(engine.names, start(engine, 5.0, 60.0), engine)


def by_processes(folder):
    return local_cluster(2, names=["a", "b"], threads=1, _worker="tests.drivers.scripted_worker:Worker")


def by_jobs(folder):
    return launched_cluster(2, folder / "secret", worker="tests.drivers.scripted_worker:Worker")


@pytest.mark.parametrize(
    "engine",
    [by_threads, by_processes, by_jobs],
    ids=["threads", "processes", "jobs of another system"],
)
def test_an_engine_keeps_the_contract(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # from where the jobs import the tests
    with info_is_logged():
        cluster = engine(tmp_path)
        try:
            keep(cluster)
        finally:
            cluster.close()


def test_the_page_for_those_who_change_pippy_shows_the_launcher():
    page = (ROOT / "docs/changing.md").read_text()
    assert textwrap.indent(inspect.getsource(LaunchedEngine), "    ") in page


RANK = """
from unittest.mock import patch

from pippy import cluster
from tests.drivers import scripted_worker
from tests.drivers.engines.contract import info_is_logged, keep

with info_is_logged(), patch("pippy.drivers.engines.torchrun.torchrun.WORKER", "tests.drivers.scripted_worker:Worker"):
    workers = cluster(names=["a", "b"], **OPTIONS)
    keep(workers)
open("kept", "w")
"""


@pytest.mark.parametrize("options", [{}, {"transport": "rpc"}], ids=["", "by rpc"])
def test_ranks_keep_the_contract(quick_clusters, options, tmp_path):
    """Two processes with what torchrun tells its own; torchrun itself is in test_torchrun.py."""
    code = RANK.replace("**OPTIONS", f"**{options!r}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        quick_clusters.popen(
            [sys.executable, "-c", code],
            pass_fds=[],
            env=os.environ | told | {"RANK": rank, "LOCAL_RANK": rank},
            cwd=tmp_path,
        )
        for rank in "01"
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                rank.wait()
    assert (tmp_path / "kept").exists()
