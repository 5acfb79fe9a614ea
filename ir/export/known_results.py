"""The results of layers whose shapes are known. A run on fake tensors takes long, and fixes the steps of a recurrent layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_LIKE_THEIR_INPUT = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def result_of(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives what ``module`` returns, as empty tensors of the right shapes. ``run`` calls the module."""

    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, torch.Tensor) or input.dim() not in (2, 3) or module._forward_hooks:
            return run(input, *args, **kwargs)
        if isinstance(module, _LIKE_THEIR_INPUT):
            return _empty(input, *input.shape)
        return _recurrent(module, input)  # type: ignore[arg-type]

    known = (*_LIKE_THEIR_INPUT, nn.RNN, nn.LSTM, nn.GRU)
    return call if type(module) in known else run


def _recurrent(module: nn.RNNBase, input: torch.Tensor) -> Any:
    directions = 2 if module.bidirectional else 1
    width = module.proj_size or module.hidden_size
    batch = () if input.dim() == 2 else (input.shape[0 if module.batch_first else 1],)
    layers = directions * module.num_layers
    output, last = _empty(input, *input.shape[:-1], directions * width), _empty(input, layers, *batch, width)
    return output, (last, _empty(input, layers, *batch, module.hidden_size)) if isinstance(module, nn.LSTM) else last


def _empty(like: torch.Tensor, *sizes: Any) -> torch.Tensor:
    return like.new_empty(sizes).requires_grad_(torch.is_grad_enabled() and like.is_floating_point())
