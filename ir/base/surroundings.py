"""The surroundings of a call: what in the user's process changes its numbers. The workers follow it, or the call is refused.

`TABLE` has a row for each:

    ProcessSetting  of the whole process: read where the driver is called, and set in the processes of the workers
    Entered         of the calling thread: a context that the workers enter for the command
    Refused         acts in this process only; the row has the way out
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pippy.ir.base.compiling import compile_stance, forced_backend, in_stance

_C: Any = torch._C
_checkpoint: Any = torch.utils.checkpoint


@dataclass(frozen=True)
class ProcessSetting:
    """A setting of the whole process: how it is read, and how it is set."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


@dataclass(frozen=True)
class Entered:
    """A context of the calling thread. ``enter`` makes the same context on a worker, from what was read and the device."""

    name: str
    read: Callable[[], Any]
    enter: Callable[[Any, torch.device], Any] | None = None  # None: the step says it anyway


@dataclass(frozen=True)
class Refused:
    """A context or mode that workers cannot follow. ``read`` says whether it is in force."""

    name: str
    read: Callable[[], Any]
    remedy: str


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """A setting of the older of two interfaces; torch refuses to read it after the newer one was used."""
    try:
        return read()
    except RuntimeError:
        return None


_BACKENDS = ("cuda", "mkldnn") if torch.backends.cuda.is_built() else ("mkldnn",)
_PRECISIONS = [(backend, op) for backend in _BACKENDS for op in ("matmul", "conv", "rnn")]


def _read_precisions() -> tuple[Any, ...]:
    read = _C._get_fp32_precision_getter
    older = _unless_mixed(_C._get_float32_matmul_precision), _unless_mixed(_C._get_cudnn_allow_tf32)
    return *older, *[read(backend, op) for backend, op in _PRECISIONS]


def _write_precisions(values: tuple[Any, ...]) -> None:
    older = _C._set_float32_matmul_precision, _C._set_cudnn_allow_tf32
    for write, value in zip(older, values):  # these set some of the others, too: they come first
        if value is not None:
            write(value)
    for (backend, op), value in zip(_PRECISIONS, values[len(older) :]):
        _C._set_fp32_precision_setter(backend, op, value)


def _write_determinism(values: tuple[bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])
    _C._set_deterministic_fill_uninitialized_memory(values[2])


def _flags(name: str, *pairs: tuple[Callable[[], Any], Callable[[Any], Any]]) -> ProcessSetting:
    """A row for several flags that belong together."""

    def write(values: tuple[Any, ...]) -> None:
        for (_, set_one), value in zip(pairs, values):
            set_one(value)

    readers = [read for read, _ in pairs]
    return ProcessSetting(name, lambda: tuple([read() for read in readers]), write)


def _read_autocast() -> tuple[Any, ...]:
    """Nothing, or whether casts are kept, and the dtype of each device type that autocast is on for."""
    if not _C._is_any_autocast_enabled():
        return ()
    kinds = [kind for kind in _C._autocast_supported_devices() if torch.is_autocast_enabled(kind)]
    return torch.is_autocast_cache_enabled(), *[(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def _enter_autocast(read: tuple[Any, ...], device: torch.device) -> Iterator[None]:
    keeps, *kinds = read
    with ExitStack() as stack:
        for kind, dtype in kinds:
            if kind in (device.type, "cpu"):  # this worker has no tensors of another kind
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=keeps))
        yield


class OwnFunctionMode(TorchFunctionMode):
    """A function mode that pippy itself enters, while it traces."""


def device_contexts() -> list[DeviceContext]:
    """The default devices that are in force in this thread, the innermost last."""
    if not _C._len_torch_function_stack():
        return []
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]


def _default_device() -> str | None:
    """The type of the device on which tensors are made in this thread, if one was set."""
    contexts = device_contexts()
    return contexts[-1].device.type if contexts else None


def _function_modes() -> list[Any]:
    """The user's function modes: not those that `torch.set_default_device` and `with torch.device` make."""
    if not _C._len_torch_function_stack():
        return []
    modes = _get_current_function_mode_stack()
    return [mode for mode in modes if not isinstance(mode, DeviceContext | OwnFunctionMode)]


def _saved_tensors_hooks() -> Any:
    return _C._autograd._top_saved_tensors_default_hooks(True)


def global_hooks() -> list[str]:
    """The functions of torch that have registered hooks of all modules. Its own are left out, which note where forward is.

    >>> global_hooks()
    []
    """
    kinds = {"forward": "forward", "forward_pre": "forward_pre", "backward": "full_backward"}
    kinds["backward_pre"] = "full_backward_pre"
    hooks = {name: getattr(_module, f"_global_{kind}_hooks").values() for kind, name in kinds.items()}
    return [
        f"register_module_{name}_hook"
        for name, registered in hooks.items()
        if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in registered)
    ]


_IN_PIPE = "leave its region before the call, or call pipe(...) in it, which computes in this process"
_IN_MODEL = "leave its region before the call, or call the model itself in it, which computes in this process"

TABLE: tuple[ProcessSetting | Entered | Refused, ...] = (
    ProcessSetting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    ProcessSetting(
        "torch.use_deterministic_algorithms",
        lambda: (
            _C._get_deterministic_algorithms(),
            _C._get_deterministic_algorithms_warn_only(),
            _C._get_deterministic_fill_uninitialized_memory(),
        ),
        _write_determinism,
    ),
    ProcessSetting(
        "torch.set_float32_matmul_precision, fp32_precision and allow_tf32 of torch.backends",
        _read_precisions,
        _write_precisions,
    ),
    _flags(
        "allow_bf16_reduced_precision_reduction and allow_fp16_reduced_precision_reduction of torch.backends",
        (_C._get_cublas_allow_bf16_reduced_precision_reduction, lambda v: _allow_reduced("bf16", v)),
        (_C._get_cublas_allow_fp16_reduced_precision_reduction, lambda v: _allow_reduced("fp16", v)),
        (_C._get_cpu_allow_fp16_reduced_precision_reduction, _C._set_cpu_allow_fp16_reduced_precision_reduction),
        (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    ),
    _flags(
        "torch.backends.cudnn.flags",
        (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
        (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
        (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    ),
    _flags(
        "torch.backends.mkldnn.flags",
        (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
        (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    ),
    _flags(
        "torch.nn.attention.sdpa_kernel",
        (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
        (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
        (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
        (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
        (_C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable),
        (lambda: tuple(_C._get_sdp_priority_order()), lambda order: _C._set_sdp_priority_order(list(order))),
    ),
    ProcessSetting(
        "torch.autograd.detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
    ),
    ProcessSetting(
        "torch.utils.checkpoint.set_checkpoint_early_stop",
        lambda: _checkpoint._enable_checkpoint_early_stop,
        lambda enable: setattr(_checkpoint, "_enable_checkpoint_early_stop", enable),
    ),
    Entered("torch.no_grad, torch.inference_mode", torch.is_grad_enabled),
    Entered("torch.autocast", _read_autocast, _enter_autocast),
    Entered("torch.compiler.set_stance", compile_stance, lambda stance, _: in_stance(stance)),
    Refused(
        "torch.compiler.set_stance(force_backend=)",
        forced_backend,
        "give the driver that backend: compile=, and leave force_backend= out",
    ),
    Refused(
        "torch.set_default_device, with torch.device",
        lambda: _default_device() not in (None, "cpu"),
        "put `with torch.device('cpu'):` around the call, and where forward makes a tensor, say where: "
        "torch.zeros(n, device=x.device)",
    ),
    Refused("torch.autograd.graph.saved_tensors_hooks, save_on_cpu", _saved_tensors_hooks, _IN_PIPE),
    Refused("a TorchFunctionMode", _function_modes, _IN_PIPE),
    Refused("a TorchDispatchMode", _C._len_torch_dispatch_stack, _IN_PIPE),
    Refused("a transform of torch.func", lambda: _C._functorch.peek_interpreter_stack() is not None, _IN_MODEL),
    Refused(
        "torch.nn.modules.module.register_module_forward_hook and its like",
        global_hooks,
        "take the hooks of all modules off, or register hooks of the modules that you mean, before pipeline()",
    ),
    Refused("torch.autograd.forward_ad.dual_level", lambda: forward_ad._current_level >= 0, _IN_MODEL),
)

_RECORDED = (
    "torch.no_grad, torch.inference_mode",
    "torch.set_default_device, with torch.device",
    "torch.utils.checkpoint.set_checkpoint_early_stop",
)
SETTINGS = [row for row in TABLE if isinstance(row, ProcessSetting)]
ENTERED = [row for row in TABLE if isinstance(row, Entered) and row.enter is not None]
REFUSED_ROWS = [row for row in TABLE if isinstance(row, Refused)]


def _allow_reduced(dtype: str, value: tuple[bool, bool]) -> None:
    getattr(_C, f"_set_cublas_allow_{dtype}_reduced_precision_reduction")(*value)


@dataclass(frozen=True)
class Surroundings:
    """What each row of `TABLE` gave that the workers follow: each `ProcessSetting`, and each `Entered` with a context."""

    settings: tuple[Any, ...]
    entered: tuple[Any, ...]

    @staticmethod
    def current() -> "Surroundings":
        """The surroundings of this call."""
        return Surroundings(tuple([row.read() for row in SETTINGS]), tuple([row.read() for row in ENTERED]))

    def set_process(self) -> None:
        """Give this process the settings, as far as it does not have them."""
        for row, value in zip(SETTINGS, self.settings, strict=True):
            if row.read() != value:
                row.write(value)

    def changed_settings(self) -> list[str]:
        """The names of the settings that are different in this process."""
        return [row.name for row, value in zip(SETTINGS, self.settings, strict=True) if row.read() != value]

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """The contexts of the caller's thread, on a worker that computes on ``device``."""
        if not any(self.entered):
            yield
            return
        with ExitStack() as stack:
            for row, value in zip(ENTERED, self.entered, strict=True):
                if value:
                    stack.enter_context(row.enter(value, device))  # type: ignore[misc]
            yield

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return bool(self.entered[0])


class ChangesInForward:
    """Finds the rows of the table that have changed since this was made: a traced graph would not have these changes.

    Gradient modes, default devices and settings of checkpointed parts are not counted, as tracing records them.
    """

    ROWS = [row for row in TABLE if row.name not in _RECORDED]

    def __init__(self) -> None:
        self.before = [row.read() for row in self.ROWS]

    def found(self) -> list[str]:
        """The names of the rows."""
        return [row.name for row, value in zip(self.ROWS, self.before) if row.read() != value]


def refused_here() -> Refused | None:
    """What is in force around this call and cannot go to the workers, if there is something."""
    for row in REFUSED_ROWS:
        if row.read():
            return row
    return None
