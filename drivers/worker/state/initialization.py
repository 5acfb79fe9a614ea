"""Modules make their parameters themselves, where these are, and every split gives the same numbers.

    the model's modules; of its tensors those that are to be made here, all others on the meta device
        each layer of a LayerSpec:        its constructor
        each other module, its children first:  reset_parameters()    as its constructor did
                                          function(module)            as model.apply(function) does after that
        each random operation on a tensor that is named draws from a generator seeded with (seed, name, how many before)

So what a tensor becomes does not depend on which others are here: an operation on one of these computes nothing, and seeds the
generators for nobody else. Afterwards it is known which tensors nothing has written.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import InitializationError
from pippy.ir.base.names import named_state
from pippy.ir.base.operations import draws, effect_of
from pippy.ir.base.without_dynamo import DispatchMode
from pippy.ir.run.in_place import memory_of
from pippy.ir.run.layers import LayerSpec, spec_of
from pippy.ir.run.random_state import seed_all, untouched_random_state

Function = Callable[[nn.Module], Any]
_one_at_a_time = threading.Lock()  # workers that are threads of one process seed the same generators


def initialize(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], seed: int, function: Function | None = None
) -> list[str]:
    """Have the modules of a model make these tensors of theirs, and return the names of those that nothing has written.

    >>> linear = nn.Linear(2, 2)
    >>> initialize(linear, dict(linear.named_parameters()), seed=0)
    []
    >>> one = linear.weight.clone()
    >>> initialize(linear, {"weight": linear.weight}, seed=0), torch.equal(linear.weight, one)
    ([], True)
    """
    with _one_at_a_time, untouched_random_state(), torch.no_grad():
        for tensor in tensors.values():
            _mark(tensor)
        with _KeyedDraws(seed, model) as draws:
            for name, writes, call in _Calls(set(map(id, tensors.values())), function).of("", model):
                draws.enter(name, writes)
                call()
        return [name for name, tensor in tensors.items() if _is_marked(tensor, draws.written)]


def reset_function(module: nn.Module) -> Callable[[], Any] | None:
    """What a module's constructor calls to make its parameters, if it has that; some of torch's name it with a ``_``."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(found := getattr(module, name, None)):
            return found
    return None


def function_of_hugging_face(module: nn.Module) -> Function | None:
    """What initializes each module inside of a model of Hugging Face; None for other modules."""
    for kind in type(module).__mro__:
        if kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers."):
            return module._init_weights  # type: ignore[return-value]
    return None


class _Calls:
    """The calls that initialize what holds these tensors: the name of a module, what the call may write, and the call.

    A module's children come first, and the last of them before the others: a parameter that two modules share is as the first
    one makes it.
    """

    def __init__(self, wanted: set[int], function: Function | None) -> None:
        self.wanted, self.function = wanted, function
        self.seen: set[int] = set()

    def of(
        self, name: str, module: nn.Module, of_model: Function | None = None, made: bool = False
    ) -> Iterator[tuple[str, nn.Module | None, Callable[[], Any]]]:
        """Those of a module and what it holds. ``made`` says that a layer around it was made, by its constructor."""
        if id(module) in self.seen or not any(id(tensor) in self.wanted for _, tensor in named_state(module)):
            return
        self.seen.add(id(module))
        spec = spec_of(module)
        if spec is not None:
            made = True
            yield name, None, partial(self._make, module, spec)
        of_model = function_of_hugging_face(module) or of_model
        for child_name, child in reversed(list(module.named_children())):
            yield from self.of(f"{name}.{child_name}" if name else child_name, child, of_model, made)
        reset = None if made else reset_function(module)
        if reset is not None:
            yield name, module, reset
        function = self.function or (None if made else of_model)
        if function is not None:
            yield name, module, partial(function, module)

    def _make(self, module: nn.Module, spec: LayerSpec) -> None:
        """Make another layer, here, and copy its numbers."""
        wanted = {name: tensor for name, tensor in named_state(module) if id(tensor) in self.wanted}
        with torch.device(next(iter(wanted.values())).device):
            made = dict(named_state(spec.build()))
        for name, tensor in wanted.items():
            if name not in made or made[name].shape != tensor.shape:
                raise InitializationError(
                    f"{spec} has {name!r} of shape {list(tensor.shape)} when it is made on the meta device, and makes "
                    f"{'none' if name not in made else f'one of shape {list(made[name].shape)}'} on a worker"
                )
            tensor.copy_(made[name])


class _KeyedDraws(DispatchMode):
    """Seeds the generators before each random operation, and notes which memory operations write.

    What is drawn into a tensor without a name, in a module's function, is keyed by the module, and by how much was drawn so
    before: which is known only where all of the module is.
    """

    def __init__(self, seed: int, model: nn.Module) -> None:
        super().__init__()
        self.seed = seed
        self.names: dict[int | None, str] = {}
        for name, tensor in named_state(model):
            self.names.setdefault(memory_of(tensor), f"tensor {name}")
        self.module, self.is_whole = "", True
        self.draws: dict[str, int] = {}
        self.written: set[int | None] = set()

    def enter(self, name: str, writes: nn.Module | None) -> None:
        """From now on a function of the module with this name runs, which may write into the tensors of a module."""
        self.module = f"module {name}"
        self.is_whole = writes is None or not any(tensor.is_meta for _, tensor in named_state(writes))
        seed_all(self._key(self.module))  # also the generators of Python and numpy

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if draws(operation):
            drawn = args[0] if args and isinstance(args[0], torch.Tensor) else None
            name = self.names.get(memory_of(drawn), self.module)
            if name == self.module and not self.is_whole and not (drawn is not None and drawn.is_meta):
                raise InitializationError(
                    f"what initializes {name.removeprefix('module ') or 'the model'!r} draws random numbers into a "
                    "temporary tensor (as orthogonal_ does) for a parameter of a module inside of it. Other "
                    "modules inside of it are on other workers, so the numbers would depend on how the model is "
                    "cut. Let the module that has the parameter initialize it: in its reset_parameters(), or when "
                    "function(module) is called with that module"
                )
            self._seed(name)
        result = operation(*args, **(kwargs or {}))
        known = effect_of(operation, args, kwargs or {})
        self.written.update(map(memory_of, known.changed if known is not None else ()))
        return result

    def _seed(self, name: str) -> None:
        key = self._key(name)
        torch.default_generator.manual_seed(key)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(key)

    def _key(self, name: str) -> int:
        number = self.draws[name] = self.draws.get(name, -1) + 1
        return int.from_bytes(blake2b(f"{self.seed} {name} {number}".encode(), digest_size=7).digest(), "little")


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1


def _mark(tensor: torch.Tensor) -> None:
    """Write what is found again unless all of a tensor is written."""
    if _can_be_nan(tensor):
        tensor.fill_(float("nan"))


def _is_marked(tensor: torch.Tensor, written: set[int | None]) -> bool:
    if not tensor.numel():
        return False
    if not _can_be_nan(tensor):
        return memory_of(tensor) not in written
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())  # the sum needs no memory
