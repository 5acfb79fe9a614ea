"""The script of `make gpu` runs where there is no GPU, too: on the CPU, or to say that there is none."""

import pytest
import torch

from exps import gpu
from exps.peers.on_devices import DeviceTeam, PippyRank
from tests.drivers.processes import close_open_cluster


def test_all_tables_are_written_on_the_cpu(capsys):
    close_open_cluster()
    command = "--device cpu --size tiny --rounds 1 --transfers 65536 --only".split()
    assert gpu.main([*command, "torch, one process", "pippy 1f1b"]) == 0
    times, peaks, rates = [table.splitlines() for table in capsys.readouterr().out.split("\n\n")[1:]]
    assert [line[:22].strip() for line in times[1:]] == ["plain", "torch, one process", "pippy 1f1b"]
    assert [line[:21] for line in peaks[1:]] == ["pippy 1f1b   worker 0", "pippy 1f1b   worker 1"]
    assert [line.split()[:2] for line in rates[1:]] == [["64.0", "KiB"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_line(capsys):
    assert gpu.main(["--tests"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("there is no GPU: torch ") and line.endswith("nothing was run")


class Held(DeviceTeam):
    """A contestant that takes no step, and has held more than was counted."""

    def __init__(self):
        super().__init__(0, PippyRank)

    def step(self):
        return 1.0

    def loss(self):
        return 1.0

    def gradients(self):
        return {}

    def peaks(self):
        return [(100, 104), (100, 106)]


def test_a_peak_that_was_not_counted_is_shown_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "contestants", lambda size, devices: {"plain": Held()})
    monkeypatch.setattr(gpu, "transfers", lambda *_: None)
    assert gpu.main("--device cpu --size tiny --rounds 1".split()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("6% apart") and "apart" not in lines[-2]


def test_two_gpus_are_used_in_both_ways(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    found = gpu.places("cuda")
    assert found == {"one GPU": ("cuda:0", "cuda:0"), "two GPUs": ("cuda:0", "cuda:1")}
    teams = {name: set(gpu.contestants(gpu.SIZES["tiny"], devices)) for name, devices in found.items()}
    assert teams["two GPUs"] - teams["one GPU"] == {"torch 1F1B"}, "NCCL takes no two processes on one GPU"
