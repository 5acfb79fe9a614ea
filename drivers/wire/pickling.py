"""Objects as bytes that another process can read, with their tensors beside the bytes.

Tensors are not pickled: a pickler sets them aside, and the transport sends them as they are. Of a sparse tensor it sets aside
the plain tensors that it is made of. Classes and functions of a script, a notebook or a REPL travel by value, as their code
(cloudpickle); those of installed or importable modules by name.

    ===================  ==========================  ==========================================================
    what is pickled      by                          what of a tensor is set aside
    ===================  ==========================  ==========================================================
    a message            `pickle_message`            the tensor: the elements that it shows
    modules and code     `pickle_by_value`           its storage, each storage once: tied parameters stay tied
    part of a value      `pickle_to_bytes`           nothing: torch pickles it (a quantized tensor, for instance)
    ===================  ==========================  ==========================================================

Of a tensor of the meta device nothing is set aside: it is made where it is unpickled, without numbers.

What `pickle_by_value` returns may be part of a message. It is not pickled again: its bytes are set aside, too.
"""

import copyreg
import io
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial, reduce
from types import FunctionType
from typing import Any, NamedTuple, cast

import cloudpickle
import torch
from cloudpickle.cloudpickle import _dynamic_class_reduce
from torch import nn
from torch.nn.utils import parametrize

from pippy.drivers.base.errors import PackingError
from pippy.drivers.wire import script_objects
from pippy.ir.base.trees import describe, form_and_parts, from_parts, is_sparse
from pippy.ir.record.reached import is_own_code, reached_by

Ids = Collection[int]
_EVERYWHERE = ("builtins", "collections", "pippy", "torch")  # every process has these packages
_unpickling = threading.local()  # has the tensors that were set aside, while this thread unpickles


def _by_dtype(info: torch.finfo | torch.iinfo) -> tuple[Any, ...]:
    return type(info), (getattr(torch, info.dtype),)


for _kind in (torch.finfo, torch.iinfo):  # torch does not say how to pickle them, and masks are made with their limits
    copyreg.pickle(_kind, _by_dtype)  # type: ignore[arg-type]


class Pickled(NamedTuple):
    """An object as bytes, and the tensors that were set aside.

    >>> Pickled(b"four", [torch.zeros(2)]).data
    b'four'
    """

    data: bytes
    tensors: list[torch.Tensor]


def pickle_message(message: Any) -> Pickled:
    """A message, to be sent. Raises if it cannot be pickled.

    >>> unpickle(pickle_message({"a": torch.ones(1)}))
    {'a': tensor([1.])}
    """
    try:
        return _pickled(_ByNamePickler, message)
    except Exception:  # also what only the other pickler can do
        return _pickled(_ByValuePickler, message)


def pickle_by_value(
    value: Any, held: Mapping[int, Any] | None = None, empty: Ids = (), refused: tuple[type, ...] = (), own: Ids = ()
) -> Pickled:
    """Modules and code, for a worker that cannot import all of their classes. Raises PackingError if it cannot be pickled.

    ``held`` has what stands for tensors that the worker has already, by their ids: a tensor that is pickled in their place, or
    anything, and `unpickle` is told what that means. ``empty`` has the ids of tensors of the meta device for which it makes
    memory, without numbers. With an object of a ``refused`` class it raises. ``own`` has the ids of the model's tensors: code
    of importable modules that reaches them by its globals is sent by value, too, and a name stands for other leaves that
    require a gradient.

    >>> linear = nn.Linear(2, 2)
    >>> twice = unpickle(pickle_by_value([linear, linear]))
    >>> twice[0] is twice[1], torch.equal(twice[0].weight, linear.weight)
    (True, True)
    """
    try:
        return _pickled(partial(_ModulePickler, held=held or {}, empty=empty, refused=refused, own=own), value)
    except PackingError:
        raise
    except Exception as error:  # pickle has no one error for what it cannot write
        raise PackingError(
            f"a {type(value).__name__} cannot be sent to the workers: {type(error).__name__}: {error}. It contains "
            "an object that belongs to this process (such as a file, a lock, a generator or a cluster); keep such "
            "objects out of the model and its arguments"
        ) from error


def pickle_to_bytes(value: Any) -> bytes:
    """Anything, by value, in one string of bytes: `pickle.loads` reads it.

    >>> pickle.loads(pickle_to_bytes(lambda: 3))()
    3
    """
    stream = io.BytesIO()
    _UncheckingPickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpickle(
    pickled: tuple[bytes, list[torch.Tensor]],
    held: Callable[[Any], torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> Any:
    """The object that was pickled. It shares memory with the tensors that were set aside.

    ``held`` gives the tensor for what stands for one that this process has. Tensors without numbers are made on ``device``.

    >>> weight = torch.ones(1)
    >>> unpickle(pickle_by_value([weight], held={id(weight): "the weight"}), held=lambda name: name)
    ['the weight']
    """
    data, tensors = pickled
    before = dict(_unpickling.__dict__)
    _unpickling.__dict__.update(tensors=tensors, held=held, device=device)
    try:
        return pickle.loads(data)
    finally:
        _unpickling.__dict__.update({"tensors": None, "held": None, "device": None, **before})


def _pickled(kind: "Callable[[io.BytesIO], _SetsAside]", value: Any) -> Pickled:
    stream = io.BytesIO()
    pickler = kind(stream)
    pickler.dump(value)
    return Pickled(stream.getvalue(), pickler.tensors)


class _NotEverywhere(Exception):
    """The other process may lack a class or function."""


class _UncheckingPickler(cloudpickle.Pickler):
    """Has named tuples made past a constructor that checks what they hold: in a layout, there are no tensors yet."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, tuple) and hasattr(obj, "_make"):
            return obj._make, (list(obj),)
        return super().reducer_override(obj)


class _SetsAside(pickle.Pickler):
    """Sets tensors aside, and what was pickled before. A derived class says what becomes of the rest."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is Pickled:
            return _taken_apart(obj) or _set_aside(obj, self.tensors)
        return self._reduced(obj)

    @abstractmethod
    def _reduced(self, obj: Any) -> Any:
        """What `reducer_override` returns for an object that is not set aside."""


class _ByNamePickler(_SetsAside):
    """Raises at a class or function that only the controller's process may have.

    Nearly all messages are made of pippy's own classes. For them this takes half the time of pickling by value.
    """

    def _reduced(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__.partition(".")[0] not in _EVERYWHERE:
            raise _NotEverywhere
        if script_objects.reduced(obj) is not None:
            raise _NotEverywhere
        return NotImplemented


class _ByValuePickler(_SetsAside, cloudpickle.Pickler):
    """Classes and functions of ``__main__`` travel as their code."""

    def _reduced(self, obj: Any) -> Any:
        return script_objects.reduced(obj) or cloudpickle.Pickler.reducer_override(self, obj)

    def _function_getnewargs(self, func: FunctionType) -> tuple[Any, ...]:
        """As cloudpickle's, but without the name of the module among the function's globals.

        Another process has no such module, or another one: its own ``__main__``. torch.compile would look up there what
        the function calls, and takes the function's own globals if they name no module.
        """
        found = super()._function_getnewargs(func)
        found[1].pop("__name__", None)
        if operators := script_objects.operators_named_in(func):
            found[1]["__operators__"] = operators
        return found


class _ModulePickler(_ByValuePickler):
    """Sets storages aside, of parameters too, so that tensors that share memory share it after they are unpickled."""

    def __init__(
        self, stream: io.BytesIO, held: Mapping[int, Any], empty: Ids, refused: tuple[type, ...], own: Ids
    ) -> None:
        super().__init__(stream)
        self.refused, self.own = refused, own
        self.numbers: dict[int, int] = {}  # of the storages that were set aside
        self.held, self.empty = held, empty
        self.memories: dict[int, _EmptyMemory] = {}

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self.held:
            place = self.held[id(obj)]
            return _itself if isinstance(place, torch.Tensor) else _held, (place,)
        if self.refused and isinstance(obj, self.refused):
            raise PackingError(f"it holds a {type(obj).__name__}")
        if isinstance(obj, torch.jit.ScriptModule):
            tensors = dict([*obj.named_parameters(remove_duplicate=False), *obj.named_buffers(remove_duplicate=False)])
            return _scripted_module, (obj.save_to_buffer(), obj.training), tensors, None, None, _put_tensors
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            kind = parametrize.type_before_parametrizations(obj)
            return _empty_module, (kind,), obj.__dict__, None, None, _put_parametrized
        if isinstance(obj, (FunctionType, type)) and self._reaches_model(obj):
            return _class_of_its_own(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
        if type(obj) not in (torch.Tensor, nn.Parameter):
            return super().reducer_override(obj)
        if self.own and obj.requires_grad and obj.is_leaf and id(obj) not in self.own:
            return _held, ("a tensor that requires a gradient, and that no module has registered",)
        if obj.layout != torch.strided or obj.is_quantized:
            return (None if type(obj) is nn.Parameter else _taken_apart(obj)) or NotImplemented
        view = (obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset())
        flags = (obj.requires_grad, obj.is_conj(), obj.is_neg())
        storage = self._empty(obj) if obj.is_meta else self._number(obj)
        return _tensor_of_storage, (storage, type(obj) is nn.Parameter, view, flags)

    def _reaches_model(self, code: Any) -> bool:
        """Whether a function or class of an importable module reaches the model by a global. If it were imported anew, it would
        reach another model."""
        if not self.own or not is_own_code(code):
            return False
        return any(id(each.value) in self.own for each in reached_by(code, code.__qualname__, narrowly=False))

    def _empty(self, tensor: torch.Tensor) -> "_EmptyMemory":
        if id(tensor) not in self.empty:
            raise PackingError(
                f"something that is sent to the workers holds a tensor of the meta device, {describe(tensor)}, "
                "which is not a parameter or buffer of the model, so nothing fills it with numbers. Register it as "
                "a buffer, or make it inside of `with torch.device('cpu'):`"
            )
        storage = tensor.untyped_storage()
        return self.memories.setdefault(storage._cdata, _EmptyMemory(storage.nbytes()))

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.tensors)
            self.tensors.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu())
        return self.numbers[storage._cdata]


def _class_of_its_own(kind: type) -> tuple[Any, ...]:
    """A class by value. In this process it becomes another one: cloudpickle would change the class that is there."""
    make, (constructor, name, bases, options, _, extra), *rest = _dynamic_class_reduce(kind)
    return make, (constructor, name, bases, options, None, extra), *rest


def _empty_module(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _scripted_module(code: bytes, training: bool) -> nn.Module:
    return torch.jit.load(io.BytesIO(code)).train(training)


def _put_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a scripted module the tensors that were set aside, in place of those that travelled with its code."""
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        setattr(reduce(getattr, filter(None, owner.split(".")), module), own, tensor)


def _put_parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module its state, and the class that torch makes for each module with a parametrization (a weight norm, say).

    The class has a property for each parametrized tensor, and refuses to be pickled.
    """
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in cast(nn.ModuleDict, module.parametrizations):
        parametrize._inject_property(module, name)


def _taken_apart(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How to pickle a sparse tensor, with its parts as tensors of their own; None for any other object."""
    return (from_parts, form_and_parts(obj)) if isinstance(obj, torch.Tensor) and is_sparse(obj) else None


def _set_aside(obj: torch.Tensor | Pickled, tensors: list[torch.Tensor]) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Append a tensor, or something pickled before, to the tensors; returns the reference to it that is pickled."""
    number = len(tensors)
    if isinstance(obj, torch.Tensor):
        tensors.append(obj)
        return _tensor, (number,)
    tensors += [torch.frombuffer(bytearray(obj.data), dtype=torch.uint8), *obj.tensors]
    return _pickled_before, (number, len(tensors))


def _tensor(number: int) -> torch.Tensor:
    """A tensor that was set aside."""
    return _unpickling.tensors[number]


def _held(place: Any) -> torch.Tensor:
    """A tensor that the process has that unpickles."""
    return _unpickling.held(place)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _pickled_before(start: int, end: int) -> Pickled:
    """Something that was pickled before the message that it is part of."""
    data, *tensors = _unpickling.tensors[start:end]
    return Pickled(data.numpy().tobytes(), tensors)


class _EmptyMemory:
    """Memory without numbers, made when the first of the tensors that share it is unpickled."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return _EmptyMemory, (self.size,)

    @cached_property
    def tensor(self) -> torch.Tensor:
        """All of it, as bytes."""
        return torch.empty(self.size, dtype=torch.uint8, device=_unpickling.device)


def _tensor_of_storage(
    place: int | _EmptyMemory, is_parameter: bool, view: tuple[Any, ...], flags: tuple[bool, ...]
) -> torch.Tensor:
    """A tensor that shows a storage that was set aside, or one that is made here."""
    dtype, shape, stride, offset = view
    requires_grad, conjugate, negative = flags
    storage = (place.tensor if isinstance(place, _EmptyMemory) else _unpickling.tensors[place]).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    tensor = torch._conj(tensor) if conjugate else tensor
    tensor = torch._neg_view(tensor) if negative else tensor
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
