"""All engines keep one contract."""

import pytest

from pippy import local_cluster
from pippy.drivers.engines import threads
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.engine import start
from tests.drivers import scripted_worker
from tests.drivers.engines.contract import keep
from tests.drivers.torchrun_jobs import started

pytestmark = pytest.mark.usefixtures("alone")


def by_threads():
    engine = threads.ThreadEngine(["a", "b"], worker=scripted_worker.Worker)
    return Cluster(engine.names, start(engine, 5.0, 60.0), engine)


def by_processes(**options):
    return local_cluster(2, names=["a", "b"], threads=1, _worker="tests.drivers.scripted_worker:Worker", **options)


@pytest.mark.parametrize(
    "engine",
    [by_threads, by_processes, lambda: by_processes(transport="rpc")],
    ids=["threads", "processes", "processes by rpc"],
)
def test_an_engine_keeps_the_contract(engine):
    cluster = engine()
    try:
        keep(cluster)
    finally:
        cluster.close()


SCRIPT = """
from unittest.mock import patch

from pippy import cluster
from tests.drivers import scripted_worker
from tests.drivers.engines.contract import keep

with patch("pippy.drivers.engines.torchrun.torchrun_worker.Worker", scripted_worker.Worker):
    workers = cluster(names=["a", "b"], **OPTIONS)
keep(workers)
print("kept")
"""


@pytest.mark.parametrize("options", [{}, {"transport": "rpc"}], ids=["", "by rpc"])
def test_torchrun_keeps_the_contract(options, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("**OPTIONS", f"**{options!r}"))
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    with started(*run) as job:
        output, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and output.split() == ["kept"], errors
