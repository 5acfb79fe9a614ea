"""Finds that the example's tensors are of another dtype, or on another device, than the model needs, and says which.

Most operations on fake tensors of two devices or dtypes fail, but some do not: nn.Linear takes float64 for float32 weights
then, and would fail only when the Pipe runs. So layers of torch's are looked at.

    x                       the layer                               here
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────
    float64, the example    nn.Linear, nn.Conv2d, nn.LSTM, …        refused
    bfloat16, computed      the same                                nothing: forward decides about its own dtypes
    float16, the example    nn.LayerNorm of float32                 nothing: torch has kernels for these two
    anything                any, under autocast                     nothing
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import InputError
from pippy.ir.base.names import named_state
from pippy.ir.base.trees import describe, tensors
from pippy.ir.call.kinds import leaves_by_path

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_STRICT = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    *_NORMS,
)


def check_call(module: nn.Module, args: Any, model: nn.Module, example: Mapping[str, Any]) -> None:
    """Raise a RuntimeError, as torch would, if a layer of torch's is given an argument unlike its weights."""
    argument, parameters = next(iter(tensors(args)), None), list(module.parameters())
    if (
        argument is None
        or not parameters
        or module._forward_pre_hooks
        or not isinstance(module, (*_STRICT, nn.Embedding))
    ):
        return
    for what in ("device", "dtype"):
        actual, expected = getattr(argument, what), {getattr(each, what) for each in parameters}
        if actual in expected or (what == "dtype" and _takes(module, actual)):
            continue
        if any(getattr(each, what) == actual for _, each in named_state(model)):
            continue  # forward may have converted it
        if any(getattr(each, what) == actual for _, each in _tensors_of(example)):
            raise RuntimeError(
                f"{type(module).__name__} is given a tensor of {what} {actual}, and its parameters are of {what} "
                f"{' and '.join(sorted(map(str, expected)))}"
            )


def _takes(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a layer takes another dtype than that of its weights."""
    if isinstance(module, nn.Embedding) or torch._C._is_any_autocast_enabled():
        return True
    return isinstance(module, _NORMS) and dtype in (torch.float16, torch.bfloat16)


def unfit_example(
    line: str, error: Exception, model: nn.Module, example: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> InputError:
    """The error for an example for which an operation of the model fails. ``inputs`` are those of the operation."""
    lines = [f"with the example arguments, this operation fails:\n{line}", f"{type(error).__name__}: {error}"]
    lines += [_advice(model, example, _dtypes(example if inputs is None else inputs)) or _ADVICE]
    if inputs and lines[-1] == _ADVICE:
        arguments = [f"{name}={describe(example[name])}" for name in inputs if name in example]
        lines[-1] += f"; this operation takes {', '.join(arguments)}" * bool(arguments)
    return InputError("\n".join(lines))


_ADVICE = "What to do: give example_args and example_kwargs that the model itself can be called with, on its device"


def _advice(model: nn.Module, example: Mapping[str, Any], used: set[torch.dtype]) -> str:
    return _device_advice(model, example) or _dtype_advice(model, example, used)


def _dtypes(values: Mapping[str, Any]) -> set[torch.dtype]:
    return {each.dtype for each in tensors(list(values.values()))}


def _device_advice(model: nn.Module, example: Mapping[str, Any]) -> str:
    """What to do about arguments that are on another device than all of the model."""
    devices = {each.device for _, each in named_state(model)}
    others = {path: each.device for path, each in _tensors_of(example) if each.device not in devices}
    if not others or len(devices) != 1:
        return ""
    where = ", ".join(f"{path!r} is on {device}" for path, device in others.items())
    (device,) = devices
    return (
        f"Why: in the example {where}, and the model is on {device}.\nWhat to do: give "
        f"{', '.join(f'{path}.to({str(device)!r})' for path in others)} in the example; or move the model first"
    )


def _dtype_advice(model: nn.Module, example: Mapping[str, Any], used: set[torch.dtype]) -> str:
    """What to do about arguments in a dtype that is among ``used``, and that no parameter of the model has."""
    model_dtypes = {each.dtype for _, each in named_state(model) if each.is_floating_point() or each.is_complex()}
    others = {path: each.dtype for path, each in _tensors_of(example) if each.dtype in used - model_dtypes}
    if not others or len(model_dtypes) != 1:
        return ""
    (dtype,) = model_dtypes
    where = ", ".join(f"{path!r} is {_short(each)}" for path, each in others.items())
    return (
        f"Why: in the example {where}, and the model's parameters are {_short(dtype)}.\nWhat to do: give "
        f"{', '.join(f'{path}.to({dtype})' for path in others)} in the example and in calls; or convert the model first; or, "
        "if the Pipe is to be called under torch.autocast, call pipeline() under it, too"
    )


def _tensors_of(example: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in leaves_by_path(example).items() if isinstance(leaf, torch.Tensor)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
