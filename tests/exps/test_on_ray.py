"""The times of workers on Ray are taken as those of a local cluster are."""

from exps import on_ray
from tests.drivers.processes import close_open_cluster


def test_times_of_a_local_cluster(monkeypatch, capsys):
    close_open_cluster()
    monkeypatch.setattr(on_ray, "ENGINES", ("local",))
    on_ray.main(["start", "recovery", "--workers", "2", "--repeat", "1"])
    start, recovery = capsys.readouterr().out.splitlines()
    assert start.startswith("2 workers start in local ") and recovery.startswith("a worker is replaced in local ")
    assert 0 < float(recovery.split()[6]) < 60
