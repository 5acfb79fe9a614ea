"""The interface on which a rank listens: the one that leads to the others, or that the environment names."""

import subprocess
import sys

import pytest

from exps.peers.hosts import NoHosts, hosts, ip
from pippy.drivers.engines.hub import interfaces
from pippy.drivers.engines.hub.interfaces import NetworkInterface, addresses, link_named, link_to
from pippy.drivers.engines.torchrun.ranks import RankInfo, link_of_rank

LOOPBACK = NetworkInterface("lo", "127.0.0.1")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name in interfaces.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_where_to_listen(environment):
    assert link_of_rank(RankInfo(0, 2, 0, 2, True)) == (LOOPBACK, "")
    assert link_of_rank(RankInfo(0, 2, 0, 1, True)) == (LOOPBACK, "")  # as that is where 127.0.0.1 is
    environment.setenv("MASTER_ADDR", "127.0.1.1")  # what Debian says of a host's own name
    assert link_of_rank(RankInfo(0, 2, 0, 1, True)) == (LOOPBACK, "") and not LOOPBACK.leaves


def test_the_environment_names_it(environment):
    """gloo takes several names, and the first is ours, too. One that is not there is said to be wrong, before anyone waits."""
    environment.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert link_of_rank(RankInfo(0, 2, 0, 1, True)) == (LOOPBACK, "")
    environment.setenv("TP_SOCKET_IFNAME", "eth7")
    link, trouble = link_of_rank(RankInfo(0, 2, 0, 1, True))
    assert link == NetworkInterface("eth7") and "TP_SOCKET_IFNAME is 'eth7'" in trouble and "address are lo" in trouble
    environment.setenv("TP_SOCKET_IFNAME", "")
    assert link_of_rank(RankInfo(0, 2, 0, 1, True)) == (LOOPBACK, "")


def test_what_leads_nowhere():
    assert (
        link_to("no-such-host.invalid", 1) == NetworkInterface()
        and not NetworkInterface().leaves
        and link_named("none").address is None
    )


ASK = (
    "from pippy.drivers.engines.hub.interfaces import *; "
    "print(addresses(), link_to('10.99.7.2', 1), link_to('fd00:7::2', 1))"
)


def test_addresses_of_both_versions_and_a_second_one():
    """An interface has several addresses, and the one that leads to the other host may be its second."""
    assert ("lo", "127.0.0.1") in addresses()
    try:
        with hosts(1) as (host,):
            for address, *nodad in (["10.99.9.1/24"], ["fd00:7::1/64", "nodad"]):
                ip("-n", host.namespace, "addr", "add", address, "dev", "eth0", *nodad)
            ip("-n", host.namespace, "addr", "del", "10.99.7.1/24", "dev", "eth0")
            ip("-n", host.namespace, "addr", "add", "10.99.7.1/24", "dev", "eth0")
            words = host.command(sys.executable, "-c", ASK)
            said = subprocess.run(words, capture_output=True, text=True, timeout=280, check=True).stdout
    except NoHosts as error:
        pytest.skip(str(error))
    assert "('eth0', '10.99.9.1'), ('eth0', '10.99.7.1')" in said and "fe80" not in said
    assert (
        "NetworkInterface(interface='eth0', address='10.99.7.1') NetworkInterface(interface='eth0', address='fd00:7::1')"
        in said
    )
