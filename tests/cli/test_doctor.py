"""`pippy doctor`: all is well here, and what is not well is said with its remedy."""

import errno
import importlib
import json
import os
import platform
import resource
import socket
from importlib import metadata

import pytest
import torch

from pippy.cli.doctor import DOCTOR_CHECKS, NEEDS_TORCH, REMEDIES, CheckResult, Outcome, run_check

checks = importlib.import_module("pippy.cli.doctor")  # the file: pippy.cli has the command by this name


def test_all_that_is_needed_works_here(pippy):
    """docs/commands.md shows a run with workers."""
    findings = {each["name"]: each for each in json.loads(pippy("doctor --json --quick"))}
    assert [*findings, "workers"] == list(DOCTOR_CHECKS)
    assert {each["state"] for each in findings.values()} <= {"ok", "warning"}
    assert all(each["remedy"] for each in findings.values() if each["state"] == "warning")


def test_what_fails_is_told_of_and_is_the_status(pippy, monkeypatch):
    monkeypatch.setitem(DOCTOR_CHECKS, "loopback", lambda: Outcome("no lo", "put it up", fatal=True))
    monkeypatch.setitem(DOCTOR_CHECKS, "limits", lambda: Outcome("few", "more"))
    monkeypatch.setitem(DOCTOR_CHECKS, "memory", lambda: 1 / 0)
    output = pippy("doctor --quick", status=1)
    assert "FAILS    loopback         no lo\n                          → put it up\n" in output
    assert "warning  limits           few\n                          → more\n" in output
    assert "FAILS    memory           ZeroDivisionError: division by zero\n" in output
    assert "pippy does not work here: memory, loopback; 1 warning" in output
    assert "workers started" not in output


def test_without_torch_what_needs_it_is_not_checked(pippy, monkeypatch):
    error = ImportError("libtorch.so: cannot open shared object file")

    def fail():
        raise error

    monkeypatch.setitem(DOCTOR_CHECKS, "torch", fail)
    findings = {each["name"]: each for each in json.loads(pippy("doctor --json", status=1))}
    assert findings["torch"]["said"] == f"ImportError: {error}"
    assert findings["torch"]["remedy"].startswith("install it: pip install 'torch>=2.")
    assert {findings[name]["said"] for name in NEEDS_TORCH} == {"not checked, as torch does not work"}
    assert findings["loopback"]["state"] == "ok"


def test_every_name_is_that_of_a_check():
    assert set(NEEDS_TORCH) | set(REMEDIES) <= set(DOCTOR_CHECKS)


def refused(*_, **__):
    raise OSError(errno.EPERM, "Operation not permitted")


def said(name):
    finding = run_check(name, DOCTOR_CHECKS[name])
    return finding.state, f"{finding.said} {finding.remedy}"


@pytest.mark.parametrize(
    ("name", "target", "value", "state", "words"),
    [
        ("shared memory", (os, "memfd_create"), refused, "fails", "cluster(n, join=True)"),
        ("system calls", (os, "pidfd_open"), refused, "warning", "pidfd_open does not"),
        ("system calls", (os, "eventfd"), refused, "fails", "a container that allows them"),
        ("loopback", (socket, "if_nameindex"), lambda: [(1, "eth0")], "fails", "ip link set lo up"),
        ("loopback", (socket, "create_server"), refused, "fails", "Operation not permitted"),
        ("host name", (socket, "getaddrinfo"), refused, "warning", "--master-addr"),
        ("temporary files", (os, "mkdir"), refused, "fails", "TMPDIR"),
        ("python", (platform, "system"), lambda: "Darwin", "fails", "workers need Linux"),
        ("cores", (os, "sched_getaffinity"), lambda _: {0}, "warning", "one core"),
        ("cores", (checks, "cpu_quota"), lambda: 0.5, "warning", "start at most 1 workers"),
        ("memory", (os, "sysconf"), lambda _: 1, "ok", "GiB free"),
    ],
)
def test_what_is_amiss_is_found(monkeypatch, name, target, value, state, words):
    if name == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(*target, value)
    found = said(name)
    assert found[0] == state, found
    assert words in found[1]


@pytest.mark.parametrize(
    ("name", "least", "words"),
    [("torch", "99.0", "pip install 'torch>=99.0'"), ("packages", "99", "pip install 'cloudpickle>=99'")],
)
def test_versions_that_are_too_old(monkeypatch, name, least, words):
    monkeypatch.setattr(checks, "oldest_version", lambda package: least)
    assert said(name)[0] == "fails"
    assert words in said(name)[1]


def test_the_least_versions_are_those_that_the_distribution_declares():
    declared = {line.partition(">=")[0]: line.partition(">=")[2] for line in metadata.requires("pippy-compiler")}
    for package in ("torch", "cloudpickle", "networkx"):
        assert checks.oldest_version(package) == declared[package]
    assert checks.oldest_version("no-such-package") is None


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [(resource.RLIMIT_NOFILE, 256, "ulimit -n"), (resource.RLIMIT_NPROC, 100, "ulimit -u")],
)
def test_low_limits(monkeypatch, limit, value, words):
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (value, value) if which == limit else real(which))
    state, found = said("limits")
    assert state == "warning" and words in found and str(value) in found


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "warning", "unset RANK and WORLD_SIZE"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "warning", "there is no interface 'nowhere0'"),
        ({"PIPPY_WORKERS": "many"}, "warning", "PIPPY_WORKERS is a number"),
        ({"https_proxy": "http://proxy"}, "ok", "https_proxy set, which workers do not use"),
        ({"OMP_NUM_THREADS": "1"}, "ok", "OMP_NUM_THREADS=1"),
        ({}, "ok", "nothing is set"),
    ],
)
def test_variables(monkeypatch, variables, state, words):
    for name in (
        *checks._VARIABLES,
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said("environment")[0] == state
    assert words in said("environment")[1]


def test_gpus(monkeypatch):
    """One that torch lists and cannot compute on fails; one that it does not list is a warning."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Model X")
    monkeypatch.setattr(torch, "ones", lambda n, device: torch.zeros(n))
    assert said("GPUs") == ("ok", "2: Model X; name them: cluster(2, devices=[…]) ")
    monkeypatch.setattr(torch, "ones", refused)
    assert said("GPUs")[0] == "fails" and "device='cpu'" in said("GPUs")[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks.Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert said("GPUs")[0] == "warning" and "install a torch that fits the driver" in said("GPUs")[1]
    monkeypatch.setattr(checks.Path, "exists", lambda path: False)
    assert said("GPUs") == ("ok", "none; workers compute on the CPU ")


def test_quotas_of_both_kinds_of_control_groups(tmp_path):
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert checks.cpu_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert checks.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").unlink()
    assert checks.cpu_quota(tmp_path) is None


def test_a_finding_is_plain_data():
    assert CheckResult("a", "ok", "b") == CheckResult("a", "ok", "b", "")
