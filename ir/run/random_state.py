"""Random numbers: the state of all generators that a model may draw from, Python's, torch's and numpy's; and draws by key.

Draws by key depend on a seed, a step, a micro-batch and an operation, and on nothing else: on no split, no order. A stage seeds
the generators before each operation that may draw:

    draw_key = draw_key()                                     the key of this micro-batch, which who runs the stage has set
    seed_draws = seed_draws(draw_key, 'layers.0.dropout')     as the operation is named in the model, wherever that is cut
    layers_0_dropout = self.layers_0_dropout(x)

Without a key, both do nothing. The key is a value of the graph, so that a checkpointed part that is run once more, on a thread
of autograd perhaps, has that of its first run.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from types import MethodType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class RandomState:
    """The state of Python's generator, of torch's on the CPU on ``devices`` (GPUs), and of numpy's.

    >>> before = RandomState.current()
    >>> one = torch.rand(2)
    >>> before.restore()
    >>> torch.equal(torch.rand(2), one)
    True
    """

    pythons: tuple[Any, ...] | None
    cpu: torch.Tensor
    devices: Mapping[Any, torch.Tensor]
    numpys: Any

    @classmethod
    def current(cls, devices: Sequence[Any] | None = None, only_torch: bool = False) -> "RandomState":
        """The state now; without ``devices``, that of all GPUs, if torch uses them. That of numpy takes most of the time."""
        if devices is None:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        numpy = None if only_torch else sys.modules.get("numpy")
        return cls(
            None if only_torch else random.getstate(),
            torch.get_rng_state(),
            {device: torch.cuda.get_rng_state(device) for device in devices},
            numpy.random.get_state() if numpy else None,
        )

    def is_current(self) -> bool:
        """Whether the generators have this state."""
        now = RandomState.current(list(self.devices), only_torch=self.pythons is None)
        same = all(torch.equal(state, now.devices[device]) for device, state in self.devices.items())
        same = same and torch.equal(self.cpu, now.cpu) and self.pythons == now.pythons
        if self.numpys is None:  # numpy was not imported, so nothing has drawn from it
            return same
        return same and self.numpys[2:] == now.numpys[2:] and bool((self.numpys[1] == now.numpys[1]).all())

    def restore(self) -> None:
        """Give the generators this state."""
        if self.pythons is not None:
            random.setstate(self.pythons)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        if self.numpys is not None:
            sys.modules["numpy"].random.set_state(self.numpys)


def seed_all(seed: int) -> None:
    """Seed all generators, but those of GPUs that torch has not used yet.

    >>> with untouched_random_state():
    ...     seed_all(7)
    ...     one = torch.rand(2), random.random()
    ...     seed_all(7)
    ...     torch.equal(torch.rand(2), one[0]), random.random() == one[1]
    (True, True)
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def untouched_random_state() -> Iterator[Callable[[], list[str]]]:
    """Inside, random numbers may be drawn and seeds set; afterwards every generator has the state that it had before.

    It gives a function that names the generators whose state has changed since the beginning: Python's and torch's on CPU.

    >>> with untouched_random_state() as changed:
    ...     print(changed(), torch.rand(2).shape, changed())
    [] torch.Size([2]) ['torch']
    """
    before = RandomState.current()

    def changed() -> list[str]:
        same = {
            "Python's random": random.getstate() == before.pythons,
            "torch": torch.equal(torch.get_rng_state(), before.cpu),
        }
        return [generator for generator, is_same in same.items() if not is_same]

    try:
        yield changed
    finally:
        before.restore()


_MASK = 2**64 - 1


class DrawKey:
    """What the random numbers of one micro-batch of one step depend on, and the generators of torch that they come from."""

    __slots__ = ("generators", "number")

    def __init__(self, number: int, generators: tuple[torch.Generator, ...]) -> None:
        self.number, self.generators = number, generators

    def seed(self, name: str, pythons: bool) -> None:
        """Seed the generators for an operation; with ``pythons``, those of Python and numpy too."""
        seed = _mixed(self.number ^ _number_of(name))
        for generator in self.generators:
            generator.manual_seed(seed)
        if pythons:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@dataclass(frozen=True)
class RandomStep:
    """Which step of a run random numbers are drawn in. Steps that train are counted by themselves."""

    seed: int
    number: int
    trains: bool = True

    def keys(self, chunks: int, device: torch.device) -> dict[int | None, DrawKey]:
        """The key of each micro-batch on a device, and that of the mini-batch under None."""
        number, generators = self._start, generators_of([device])
        return {
            microbatch: DrawKey(_of_microbatch(number, microbatch), generators) for microbatch in (*range(chunks), None)
        }

    def key(self, microbatch: int, devices: Iterable[torch.device]) -> DrawKey:
        """The key of a micro-batch on some devices."""
        return DrawKey(_of_microbatch(self._start, microbatch), generators_of(devices))

    @property
    def _start(self) -> int:
        return _hashed(f"{self.seed} {self.number} {self.trains}")


def _of_microbatch(number: int, microbatch: int | None) -> int:
    return number if microbatch is None else _mixed((number + 1 + microbatch) & _MASK)


def generators_of(devices: Iterable[torch.device]) -> tuple[torch.Generator, ...]:
    """The generators of torch on some devices; that of the CPU always."""
    gpus = [_index(device) for device in devices if device.type == "cuda"]
    return torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)


def devices_in_use() -> list[torch.device]:
    """The GPUs of this process, if torch uses them."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [torch.device("cuda", index) for index in range(count)]


def _index(gpu: torch.device) -> int:
    return torch.cuda.current_device() if gpu.index is None else gpu.index


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


_number_of = cache(_hashed)  # of the names of operations, of which there are not many


def _mixed(number: int) -> int:
    """A number of which each bit depends on all bits of another. The CPU's generator takes only the lower 32 bits."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class _Now(threading.local):
    key: DrawKey | None = None


_now = _Now()


def draw_key() -> DrawKey | None:
    """The key that this thread draws random numbers with, if it has one."""
    return _now.key


def set_draw_key(key: DrawKey | None) -> None:
    """Have the stages that this thread runs draw with a key."""
    _now.key = key


@contextmanager
def drawing_with(key: DrawKey | None) -> Iterator[None]:
    """Inside, stages draw with a key."""
    before = _now.key
    _now.key = key
    try:
        yield
    finally:
        _now.key = before


def seed_draws(key: DrawKey | None, name: str, pythons: bool = False) -> None:
    """Seed the generators for an operation that may draw. ``name`` is its name in the model.

    >>> key = RandomStep(seed=0, number=3).key(microbatch=1, devices=[])
    >>> with untouched_random_state():
    ...     seed_draws(key, "dropout")
    ...     one = torch.rand(2)
    ...     seed_draws(key, "dropout")
    ...     again = torch.rand(2)
    ...     seed_draws(key, "dropout_1")
    ...     torch.equal(one, again), torch.equal(one, torch.rand(2))
    (True, False)
    """
    if key is not None:
        key.seed(name, pythons)


def draw_from_torch(module: nn.Module) -> None:
    """Have the recurrent layers of a module drop values by torch's generator of a GPU. cuDNN has one of its own, which nothing
    seeds: it would drop others when a forward is computed again. Those layers then go without cuDNN.

    >>> layer = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
    >>> draw_from_torch(layer)
    >>> layer(torch.ones(1, 2))[0].shape
    torch.Size([1, 2])
    """
    for each in module.modules():
        if isinstance(each, nn.RNNBase) and each.dropout:
            each.forward = MethodType(_without_cudnn, each)


def _without_cudnn(layer: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    before = torch.backends.cudnn.enabled
    torch._C._set_cudnn_enabled(False)
    try:
        return type(layer).forward(layer, *args, **kwargs)
    finally:
        torch._C._set_cudnn_enabled(before)


@contextmanager
def keyed_random(seed: int, step: int = 0, microbatch: int = 0, *, training: bool = True) -> Iterator[None]:
    """Inside, a Pipe that is called in this process draws what the workers of a driver draw in a micro-batch of a step.

    ``seed`` is that of the driver: ``driver.random_state["seed"]``. ``step`` counts from 0 the steps that train, and with
    ``training=False`` those that do not. Afterwards all generators are as before.

    >>> import torch
    >>> from pippy import Pipe, keyed_random
    >>> dropout = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU()))
    >>> x = torch.ones(100)
    >>> with keyed_random(seed=7, step=2):
    ...     one = dropout(x)
    >>> with keyed_random(seed=7, step=2):
    ...     again = dropout(x)
    >>> with keyed_random(seed=7, step=3):
    ...     other = dropout(x)
    >>> torch.equal(one, again), torch.equal(one, other)
    (True, False)
    """
    key = RandomStep(seed, step, training).key(microbatch, devices_in_use())
    with untouched_random_state(), drawing_with(key):
        yield
