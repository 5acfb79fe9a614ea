"""One script under torchrun on two and on three hosts: it trains as plain PyTorch does, and a lost host ends it everywhere.

The hosts are network namespaces. A job takes seconds to start, so each test does all that can be done with one.
"""

import re
import subprocess
import time
from contextlib import ExitStack

import pytest

from exps.peers.hosts import NoHosts, hosts
from tests.drivers.processes import watched, within
from tests.drivers.torchrun_jobs import PORT, ROOT, job, ready, tell

SCRIPT = str(ROOT / "tests/drivers/hosts_script.py")
SCHEDULES = ["1f1b", "interleaved_1f1b", "zb_v"]  # one of each placement
OPTIONS = {"OPTIONS": '{"timeout": 1.0}'}


@pytest.fixture
def make_hosts():
    """Makes hosts, or skips the test and says why."""
    with ExitStack() as stack:

        def make(n, **options):
            try:
                return stack.enter_context(hosts(n, **options))
            except NoHosts as error:
                pytest.skip(str(error))

        yield make


def trained(process, schedules):
    """Wait until these have trained as plain PyTorch does."""
    for name in schedules:
        line = process.stdout.readline()
        assert line == f"{name} equals plain training\n", (line, process.communicate(timeout=30))


def test_two_hosts_with_two_workers_each_train_also_after_a_cut_and_a_killed_host_is_named(make_hosts):
    """A cut of 2 s ends nothing with a timeout of 6 s: TCP sends again within 4.3 s. Commands and values wait so long."""
    both, options = make_hosts(2), {"OPTIONS": '{"timeout": 6.0}', "SCHEDULES": " ".join(SCHEDULES)}
    with job(both, SCRIPT, ranks=2, **options) as (first, second):
        pids = ready(first)
        trained(first, SCHEDULES)
        both[1].cut()
        tell(first, "train")
        time.sleep(2.0)
        both[1].mend()
        trained(first, SCHEDULES)
        tell(first, "step")
        assert second.stdout.readline() == "in the step\n"
        with watched(*pids, within=7):
            with within(2):
                both[1].kill()
                line = first.stdout.readline()
            lost = r"the step ended with WorkerLostError worker 'worker[23]' .* "
            seen = (
                "(its process has ended|the connection .* broke|worker 'worker[01]' found the connection to it closed)"
            )
            assert re.match(lost + seen, line)
            assert first.wait(20) != 0
        assert both[0].pids() == both[1].pids() == []


def test_three_hosts_on_a_slow_network_train_and_a_cut_is_noticed_everywhere(make_hosts):
    """The controller notices it within interval + timeout + 1 s, the host that is cut off within 4 × timeout (+ 2).

    A firewall between the hosts lets through what hosts.md says, and nothing else.
    """
    all_three = make_hosts(3, delay=0.001, ports=f"{PORT},40000-40999")
    for each in all_three:
        command = "echo 40000 40999 > /proc/sys/net/ipv4/ip_local_port_range"
        subprocess.run(each.command("sh", "-c", command), check=True)
    with job(all_three, SCRIPT, SCHEDULES=" ".join(SCHEDULES), **OPTIONS) as (first, second, third):
        pids = ready(first)
        trained(first, SCHEDULES)
        tell(first, "step")
        assert third.stdout.readline() == "in the step\n"
        with watched(*pids, within=7):
            with within(1 + 1 + 1):
                all_three[2].cut()
                line = first.stdout.readline()
            assert line.startswith("the step ended with WorkerLostError worker 'worker2' ")
        lost = f"worker 'worker2' (number 2, pid {pids[2]}"
        assert f"pippy: worker 'worker1' (pid {pids[1]}) leaves: {lost}" in second.communicate(timeout=20)[1]
        ended = "ends itself: the connection with the controller broke"
        assert ended in (said := third.communicate(timeout=20)[1]), said
        assert first.wait(20) != 0 and third.returncode != 0
        assert not any(each.pids() for each in all_three)
