"""Files of tensors in the safetensors format, which Hugging Face's tools read and write.

    8 bytes         length of the header
    the header      JSON: the dtype, the shape and the place of each tensor by its name; "__metadata__" has strings
    the tensors     their elements, one tensor after the other

The library `safetensors` writes such a file in one call. These functions can be given up in between. They hash the bytes while
they write them, so that no file is read again. To read a tensor, only its place in the file is needed.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.manifest import plain_json
from pippy.drivers.files.synced_files import WrittenFile, check_hash, read_into, regular_size, write_file
from pippy.ir.base.trees import describe

HEADER_HASH = "header"  # what the header's hash is called; a tensor's has an "=" and the tensor's name
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: where its elements are, their dtype and shape. ``hash`` is None if the checkpoint has none.

    >>> StoredTensor("a.safetensors", 64, torch.float32, (2, 3)).nbytes
    24
    """

    path: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: str | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU. Raises if its bytes are not those that were written."""
        data = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        view = memoryview(cast(Any, data.numpy()))
        read_into(self.path, self.offset, view)
        check_hash(f"a tensor in {self.path}", view, self.hash)
        return data.view(self.dtype).reshape(self.shape)


def check_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if one of these tensors cannot be written under its name.

    >>> check_writable({"x": torch.zeros(2)})
    """
    for name, tensor in tensors.items():
        fault = _fault_of(tensor) or ("the format needs this name" if name == _METADATA else None)
        if fault:
            raise CheckpointError(f"{name!r} cannot be written to a checkpoint: {fault}; keep it out of the state dict")


def write_tensors(
    folder: str,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    goes_on: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Write tensors to a new file in a folder. ``goes_on`` is called between pieces, and raises if the work was given up.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_tensors(folder, "a.safetensors", {"x": torch.arange(3)}, {"format": "pt"})
    ...     stored = read_header(f"{folder}/a.safetensors")
    ...     print(stored["x"].read())
    tensor([0, 1, 2])
    """
    check_writable(tensors)
    # The widest first: then the elements of each begin at a multiple of their size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for each, tensor in ordered.items():
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[each] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[tuple[str, Any]]:
        yield HEADER_HASH, struct.pack("<Q", len(text)) + text
        for each, tensor in ordered.items():
            yield f"={each}", _bytes_of(tensor)

    return write_file(folder, name, pieces(), goes_on)


def _fault_of(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be written; None if it can."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"it is a {kind.__name__}, a class of its own"
    if tensor.is_meta:
        return "it is on the meta device and has no numbers"
    if tensor.layout is not torch.strided:
        return f"it is {describe(tensor)}, and only the elements of dense tensors can be stored"
    if tensor.dtype not in _NAMES:
        return f"its dtype is {tensor.dtype}, which the safetensors format does not have"
    return None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(cast(Any, plain.reshape(-1).view(torch.uint8).numpy()))


def read_header(path: str, written: Mapping[str, str] | None = None) -> dict[str, StoredTensor]:
    """Read where the tensors of a file are. ``written`` has the hashes of its pieces, if the checkpoint has them."""
    hashes, size = written or {}, regular_size(path)
    start = bytearray(8)
    if size >= len(start):
        read_into(path, 0, memoryview(start))
    length = struct.unpack("<Q", start)[0]
    begin = len(start) + length
    if length < 2 or begin > size:
        raise _no_file(path, f"its header would have {length} bytes, and the file has {size}")
    text = bytearray(length)
    read_into(path, len(start), memoryview(text))
    check_hash(f"the header of {path}", start + text, hashes.get(HEADER_HASH))
    try:
        header = plain_json(text)
        header.pop(_METADATA, None)
        tensors = {name: _stored(path, begin, entry, hashes.get(f"={name}")) for name, entry in header.items()}
        ends = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _no_file(path, f"its header is not what it must be ({type(error).__name__}: {error})") from error
    if begin + ends != size:
        raise _no_file(path, f"it has {size} bytes, and its header says {begin + ends}")
    if written is not None and written.keys() != {HEADER_HASH, *(f"={name}" for name in tensors)}:
        raise _no_file(path, f"its checkpoint has {len(written)} hashes for the header and {len(tensors)} tensors")
    return tensors


def _stored(path: str, begin: int, entry: Any, digest: str | None) -> StoredTensor:
    offset, end = map(int, entry["data_offsets"])
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r}, which is not known here")
    shape = tuple(map(int, entry["shape"]))
    tensor = StoredTensor(path, begin + offset, _DTYPES[entry["dtype"]], shape, digest)
    if offset < 0 or min(shape, default=0) < 0 or end - offset != tensor.nbytes:
        raise ValueError(f"{end - offset} bytes for {entry['dtype']}{list(shape)}")
    return tensor


def _no_file(path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a safetensors file, or is damaged: {why}; give a folder of safetensors files (what "
        "torch.save wrote is read with torch.load(path, weights_only=True), and loaded with driver.load_state_dict)"
    )
