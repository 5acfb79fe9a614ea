"""Files of a checkpoint: what they hold, and that an interrupted save leaves none that is half written."""

import json
import os
import shutil
import struct
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, load_checkpoint
from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files import contents, safetensors_files, synced_files
from pippy.drivers.files.contents import checkpoints_in
from pippy.drivers.files.safetensors_files import _DTYPES, read_header, write_tensors
from pippy.drivers.model.state import saving

pytestmark = pytest.mark.usefixtures("seeded")

TENSORS = {
    **{f"of {name}": torch.arange(7).to(dtype) for name, dtype in _DTYPES.items()},
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(2, 0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.tensor([1 + 2j, 3j]).to(torch.complex64).conj(),
    "ünder a näme": torch.tensor([True]),
}


def assert_same(found):
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        mine, theirs = (
            each.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor)
        )
        assert torch.equal(mine, theirs), name


def test_what_was_written_is_read_by_us_and_by_the_library_and_what_it_writes_by_us(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    written, path = write_tensors(str(tmp_path), "a.safetensors", TENSORS, {"format": "pt"}), tmp_path / "a.safetensors"
    assert written.bytes == path.stat().st_size
    assert_same(library.load_file(path))
    found = read_header(str(path), written.hashes)
    assert all(stored.hash and stored.offset % stored.dtype.itemsize == 0 for stored in found.values())
    assert_same({name: stored.read() for name, stored in found.items()})
    library.save_file({name: each.resolve_conj().contiguous() for name, each in TENSORS.items()}, path)
    assert_same({name: stored.read() for name, stored in read_header(str(path)).items()})


def test_each_bit_that_is_changed_is_found(tmp_path):
    tensors = {"x": torch.arange(3.0), "y": torch.tensor(7)}
    written = write_tensors(str(tmp_path), "a.safetensors", tensors, {"format": "pt"})
    path = tmp_path / "a.safetensors"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CheckpointError):
            for stored in read_header(str(path), written.hashes).values():
                stored.read()


def test_a_file_that_is_cut_or_too_long_is_refused(tmp_path):
    write_tensors(str(tmp_path), "a.safetensors", {"x": torch.arange(3.0)}, {})
    path = tmp_path / "a.safetensors"
    data = path.read_bytes()
    for wrong in (*(data[:length] for length in range(len(data))), data + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="not a safetensors file, or is damaged"):
            read_header(str(path))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4, 8]},
        [],
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry):
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(CheckpointError, match="not a safetensors file, or is damaged"):
        read_header(str(path))


def test_a_tensor_that_cannot_be_written_leaves_no_file(tmp_path):
    for tensor in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(CheckpointError, match="'x' cannot be written"):
            write_tensors(str(tmp_path), "a.safetensors", {"x": tensor}, {})
    assert list(tmp_path.iterdir()) == []


# A save that ends anywhere leaves the last checkpoint or the new one, whole.


class Run:
    """A driver with an optimizer, and a run folder with a checkpoint of step 1."""

    def __init__(self, cluster, folder):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        self.driver = PipelineDriver1F1B(Pipe.from_sequential(model, nn.MSELoss()), cluster)
        self.optimizer = self.driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
        self.folder, self.states = folder, {}
        self.train(1)
        self.save(1)

    def train(self, step):
        self.driver.run(2, torch.ones(4, 3), torch.ones(4, 1))
        self.optimizer.step()
        self.driver.zero_grad()
        self.states[step] = self.driver.state_dict(), self.optimizer.state_dict()["state"]

    def save(self, step, folder=None, **options):
        return self.driver.save(folder or self.folder, optimizer=self.optimizer, step=step, **options)

    def assert_whole(self, folder, steps):
        """What is loaded is one of these steps, all of it."""
        saved = load_checkpoint(folder)
        assert saved["step"] in steps
        model, states = self.states[saved["step"]]
        assert all(torch.equal(value, saved["model"][name]) for name, value in model.items())
        for number, name in enumerate(states):
            mine = saved["optimizer"]["state"][number]
            assert all(torch.equal(value, mine[key]) for key, value in states[name].items())
        return saved["step"]


@pytest.fixture
def in_memory():
    """A folder on a file system in memory, if there is one: thousands of fsyncs take seconds on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture
def run(threads, in_memory):
    return Run(threads, str(in_memory / "run"))


@pytest.mark.parametrize("wait", [True, False])
def test_a_process_that_dies_at_any_operation_leaves_a_whole_checkpoint(run, in_memory, monkeypatch, wait):
    run.train(2)
    with mortal(monkeypatch) as whole:
        path = run.save(2, shutil.copytree(run.folder, in_memory / "whole"), keep=1)
    before_it_counts = whole.done[: whole.done.index("rename")]
    assert before_it_counts.count("fsync") == len(os.listdir(path)) + 1  # each file, and their folder
    assert {"write", "fsync", "rename", "mkdir", "unlink"} <= set(whole.done)
    found = []
    for lives in range(len(whole.done)):
        folder = str(in_memory / str(lives))
        shutil.copytree(run.folder, folder)
        with mortal(monkeypatch, lives) as its:
            with suppress(Killed, CheckpointError, Exception):
                run.save(2, folder, keep=1, wait=wait)
                run.driver.saving.finish()
            run.driver.state_dict()  # which is answered when no worker saves any more
        assert "killed" in its.done
        found.append(run.assert_whole(folder, (1, 2)))
        # Whoever comes next has no use for what was left.
        run.save(2, folder, keep=1)
        assert len(os.listdir(folder)) == 2 and len(checkpoints_in(folder)) == 1
        assert run.assert_whole(folder, (2,)) == 2
    assert found == sorted(found) and {1, 2} == set(found)


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_is_full_leaves_all_as_it_was(run, monkeypatch, wait):
    before = sorted(os.listdir(run.folder))
    run.train(2)
    room = 900  # bytes

    class FullDisk(MortalOs):
        left = room

        def write(self, file, data):
            taken = min(len(data), self.left)
            if not taken:
                raise OSError(28, "No space left on device")
            self.left -= taken
            return os.write(file, data[:taken])

        def rmtree(self, path, ignore_errors=False):
            shutil.rmtree(path)

    monkeypatch.setattr("tests.drivers.files.test_written_files.MortalOs", FullDisk)
    with mortal(monkeypatch), pytest.raises(CheckpointError, match=r"(?s)no checkpoint was written to .*No space left"):
        run.save(2, wait=wait)
        run.driver.saving.finish()
    assert sorted(os.listdir(run.folder)) == before
    run.train(3)  # the workers go on
    run.save(3)
    assert run.assert_whole(run.folder, (3,)) == 3


# A process that dies at its n-th operation on files: from then on it does none, not even to clean up.


MODULES = [saving, contents, safetensors_files, synced_files]


class Killed(BaseException):
    """The process is gone."""


class MortalOs:
    """Python's `os`, whose operations on files are counted. ``lives`` is how many it does before it dies; None for all."""

    changing = ("open", "write", "fsync", "mkdir", "makedirs", "rename", "unlink", "rmdir", "close")

    def __init__(self, lives=None):
        self.lives, self.done, self.opened = lives, [], set()

    def __getattr__(self, name):
        found = getattr(os, name)
        if name not in self.changing:
            return found

        def counted(*args, **kwargs):
            if self.lives is not None and len(self.done) >= self.lives:
                if name == "write" and len(self.done) == self.lives:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                self.done.append("killed")
                raise Killed
            self.done.append(name)
            result = found(*args, **kwargs)
            if name == "open" and args[1] & os.O_DIRECTORY:  # a file is closed by its object
                self.opened.add(result)
            elif name == "close":
                self.opened.discard(args[0])
            return result

        return counted

    def rmtree(self, path, ignore_errors=False):
        """`shutil.rmtree`, file by file."""
        for entry in sorted(os.scandir(path), key=lambda each: each.name):
            self.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else self.unlink(entry.path)
        self.rmdir(path)

    def end(self):
        """What the kernel does for a process that is gone: close its folders."""
        for file in self.opened:
            os.close(file)


class MortalShutil:
    def __init__(self, mortal):
        self.rmtree = mortal.rmtree

    copytree = staticmethod(shutil.copytree)


@contextmanager
def mortal(monkeypatch, lives=None):
    """Inside, the process dies after so many operations; gives what has been done."""
    its = MortalOs(lives)
    with monkeypatch.context() as patch:
        for module in MODULES:
            for name, stand_in in (("os", its), ("shutil", MortalShutil(its))):
                if hasattr(module, name):
                    patch.setattr(module, name, stand_in)
        try:
            yield its
        finally:
            for thread in threading.enumerate():
                if thread.name in ("pippy checkpoint", "pippy save"):
                    thread.join()  # or it would go on with Python's `os`, on files that others have opened since
            its.end()
