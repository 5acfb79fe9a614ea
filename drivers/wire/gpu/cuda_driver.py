"""Memory of an NVIDIA GPU that two processes map, and words by which the GPUs of both wait for each other: CUDA's driver.

torch can share a tensor, but keeps counts of it in a named file, which a process that is killed leaves behind; and an event
that it shares cannot be reached any more when its process has died, so whatever waits for it waits for ever. A word in memory
that both hosts see can always be written, by either of them.

Nothing here has run on a GPU.
"""

import ctypes
from collections.abc import Callable
from typing import Any

_HANDLE_SIZE = 64
_LAZY_PEER_ACCESS = 1  # to map memory of another GPU, too
_PORTABLE, _DEVICE_MAP = 1, 2
_REACHES, _AFTER_ALL = 0, 0  # a wait until the word is no less; a write behind all that was written before it


class NotShared(Exception):
    """Two processes cannot use one memory of a device; the text says why. Values go through the host's memory then."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_SIZE),)


_pointer, _count, _flags, _word = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint32
_to_pointer = ctypes.POINTER(_pointer)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (_to_pointer, _count),
    "cuMemFree_v2": (_pointer,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _pointer),
    "cuIpcOpenMemHandle_v2": (_to_pointer, _Handle, _flags),
    "cuIpcCloseMemHandle": (_pointer,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _count, _flags),
    "cuMemHostGetDevicePointer_v2": (_to_pointer, ctypes.c_void_p, _flags),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _pointer, _word, _flags),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _pointer, _word, _flags),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaDriver:
    """Calls of CUDA's driver, in the current context of this thread. ``load`` finds the library."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._library = load("libcuda.so.1")
            for name, arguments in SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise NotShared(f"CUDA's driver cannot be used: {error}") from error

    def allocate(self, size: int) -> int:
        """The address of new memory."""
        return self._address("cuMemAlloc_v2", size)

    def free(self, address: int) -> None:
        """Free what was allocated. No process has it mapped any more."""
        self._call("cuMemFree_v2", address)

    def handle_of(self, address: int) -> bytes:
        """By which another process finds memory that was allocated here."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.addressof(handle), _HANDLE_SIZE)

    def map(self, handle: bytes) -> int:
        """The address here of memory that another process has allocated."""
        return self._address("cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def unmap(self, address: int) -> None:
        """Use memory of another process no more."""
        self._call("cuIpcCloseMemHandle", address)

    def register(self, host: int, size: int) -> int:
        """Let devices read and write some memory of the host. Returns its address for them."""
        self._call("cuMemHostRegister_v2", host, size, _PORTABLE | _DEVICE_MAP)
        return self._address("cuMemHostGetDevicePointer_v2", host, 0)

    def unregister(self, host: int) -> None:
        """Devices use this memory of the host no more."""
        self._call("cuMemHostUnregister", host)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Write a word behind all that a stream was given."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, _AFTER_ALL)

    def wait_for_word(self, stream: int, address: int, value: int) -> None:
        """Let a stream go on when a word is no less than a value."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, _REACHES)

    def _address(self, name: str, *arguments: Any) -> int:
        """What such a call writes to its first argument."""
        found = _pointer()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            raise NotShared(f"{name} failed with {code}: {(said.value or b'no more is known').decode()}")
