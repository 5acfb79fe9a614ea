"""Opens a cluster that workers join."""

import os
from collections.abc import Sequence

from pippy.drivers.engines.arguments import check_seconds, polling_time, worker_names
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.current_cluster import check_none_open, note_opened_cluster
from pippy.drivers.engines.engine import start
from pippy.drivers.engines.joined.joined_engine import JoinedEngine, JoinedLaunch
from pippy.drivers.engines.joined.secret_file import DEFAULT_SECRET
from pippy.drivers.engines.lazy_cluster import note_local_cluster
from pippy.drivers.engines.local.local_cluster import WORKER


def joined_cluster(
    n: int,
    *,
    join: bool | int | str = True,
    secret_file: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """A cluster of ``n`` workers that join. `cluster` says what the arguments are."""
    names = worker_names(n, names)
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    polling_time(patience, crowded=False)
    check_none_open()
    note_local_cluster()
    engine = JoinedEngine(JoinedLaunch(_worker, names, join, secret_file or DEFAULT_SECRET, timeout, patience))
    try:
        session = start(engine, timeout, start_timeout)
        return note_opened_cluster(Cluster(names, session, engine, engine.places.device_type), by_rpc=False)
    except BaseException as error:
        engine.close(lost=f"the cluster did not start: {str(error) or type(error).__name__}")
        raise
