"""Files of tensors are those of the library safetensors, in both directions; what is damaged is found."""

import json
import struct

import pytest
import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.safetensors_files import _DTYPES, read_header, write_tensors

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


def test_the_library_reads_what_was_written(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    write_tensors(str(tmp_path), "a.safetensors", TENSORS, {"format": "pt"})
    assert_same(library.load_file(tmp_path / "a.safetensors"))


def test_what_the_library_writes_is_read(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "a.safetensors"
    library.save_file({name: each.resolve_conj().contiguous() for name, each in TENSORS.items()}, path)
    assert_same({name: stored.read() for name, stored in read_header(str(path)).items()})


def test_what_was_written_is_read(tmp_path):
    written = write_tensors(str(tmp_path), "a.safetensors", TENSORS, {})
    path = tmp_path / "a.safetensors"
    assert written.bytes == path.stat().st_size
    found = read_header(str(path), written.hashes)
    assert all(stored.hash for stored in found.values())
    assert all(stored.offset % stored.dtype.itemsize == 0 for stored in found.values())
    assert_same({name: stored.read() for name, stored in found.items()})


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
