"""The calls of CUDA's driver, as far as they can be seen without a GPU: a library of this process takes them."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from pippy.drivers.wire.gpu import accelerator as accelerators
from pippy.drivers.wire.gpu.accelerator import TorchAccelerator
from pippy.drivers.wire.gpu.cuda_driver import SIGNATURES, CudaDriver, NotShared


class Library:
    """Does what the driver would, with the host's memory; a handle is an address."""

    def __init__(self):
        self.calls, self.fails, self.held = [], {}, {}
        for name, arguments in SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._taking(name)))

    def _taking(self, name):
        def take(*given):
            self.calls.append(name)
            return self.fails.get(name) or getattr(self, f"_{name.partition('_')[0]}")(*given) or 0

        return take

    def _cuMemAlloc(self, address, size):
        memory = torch.zeros(size, dtype=torch.uint8)
        address[0] = memory.data_ptr()
        self.held[memory.data_ptr()] = memory

    def _cuMemFree(self, address):
        del self.held[address]

    def _cuIpcGetMemHandle(self, handle, address):
        ctypes.memmove(handle, address.to_bytes(64, "little"), 64)  # it has zeros, as a handle may

    def _cuIpcOpenMemHandle(self, address, handle, flags):
        assert flags == 1
        address[0] = int.from_bytes(ctypes.string_at(ctypes.addressof(handle), 64), "little")

    def _cuIpcCloseMemHandle(self, address):
        assert address in self.held

    def _cuMemHostRegister(self, host, size, flags):
        assert size == 64 and flags == 3

    def _cuMemHostGetDevicePointer(self, address, host, flags):
        assert flags == 0
        address[0] = host

    def _cuMemHostUnregister(self, host):
        assert host

    def _cuStreamWriteValue32(self, stream, address, value, flags):
        assert stream == 7 and flags == 0
        ctypes.c_uint32.from_address(address).value = value

    def _cuStreamWaitValue32(self, stream, address, value, flags):
        assert stream == 7 and flags == 0 and ctypes.c_uint32.from_address(address).value >= value

    def _cuGetErrorString(self, code, said):
        said[0] = b"out of memory"


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def accelerator(monkeypatch, library):
    """A GPU of torch whose memory is the host's, so that tensors can be made of it."""
    cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(accelerators, "CudaDriver", lambda: CudaDriver(lambda name: library))
    found = TorchAccelerator(torch.device("cuda:1"))
    found.memory_device = torch.device("cpu")
    return found


def test_two_processes_see_one_block(accelerator, library):
    block = accelerator.share(4096)
    assert len(block.handle) == 64 and block.memory.shape == (4096,)
    other = accelerator.open(block.handle, 4096)
    block.memory.fill_(3)
    assert (other.memory == 3).all()
    other.close()
    block.close()
    assert library.held == {} and library.calls[-2:] == ["cuIpcCloseMemHandle", "cuMemFree_v2"]


def test_words_are_written_and_waited_for_in_the_current_stream(accelerator, library):
    host = torch.zeros(64, dtype=torch.uint8)
    words = accelerator.words(host)
    words.write(3, 1 << 20)
    words.wait(3, 1 << 20)
    words.close()
    assert host.view(torch.int32)[3] == 1 << 20
    assert library.calls == [
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
        "cuStreamWriteValue32_v2",
        "cuStreamWaitValue32_v2",
        "cuMemHostUnregister",
    ]


@pytest.mark.parametrize(
    "name", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuMemHostRegister_v2"]
)
def test_a_call_that_fails_says_why_and_leaves_nothing(accelerator, library, name):
    library.fails[name] = 2
    with pytest.raises(NotShared, match=f"^{name} failed with 2: out of memory$"):
        accelerator.open(accelerator.share(64).handle, 64)
        accelerator.words(torch.zeros(64, dtype=torch.uint8))
    if name == "cuIpcGetMemHandle":
        assert library.held == {}


def test_without_the_driver_nothing_is_shared():
    with pytest.raises(NotShared, match=r"CUDA's driver cannot be used: .*libnot"):
        CudaDriver(lambda name: ctypes.CDLL("libnot.so.1"))
    with pytest.raises(NotShared, match=r"CUDA's driver cannot be used: .*cuMemAlloc_v2"):
        CudaDriver(lambda name: ctypes.CDLL(None))


def test_other_devices_share_nothing(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: None)
    other = TorchAccelerator(torch.device("xpu:0"))
    for call in (lambda: other.share(64), lambda: other.open(b"", 64), lambda: other.words(torch.zeros(64))):
        with pytest.raises(NotShared, match="'xpu'"):
            call()
