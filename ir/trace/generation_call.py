"""Traces how a causal language model makes one more token: its forward with a cache of keys and values.

The model is called as `generate` of transformers calls it. It gets a cache that records a node of the graph where a layer
adds its keys and values; ir/run/key_value_cache.py has what the node does.

    keys, values = cache.update(k, v, 3)   ──▶   extended_cache = extended_cache(k, v, 3)
                                                 keys = extended_cache[0];  values = extended_cache[1]

The graph takes `input_ids`, `attention_mask` and `position_ids`, and gives the logits of the last position. Lengths are free. A
prompt and a token behind it are two graphs, since forward may ask how long its input is.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import GenerationError
from pippy.ir.record.traced import Traced
from pippy.ir.run.key_value_cache import KeysAndValues, KeyValueCache, extended_cache, using_cache
from pippy.ir.trace.arguments import Call, signature_of
from pippy.ir.trace.trace import trace_call

CACHE_ARGUMENTS = ("input_ids", "attention_mask", "past_key_values", "use_cache")
_STAR = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ROWS, _BEFORE, _PROMPT = 2, 7, 5  # what the example has of each: other numbers than forward may ask for


def check_can_generate(model: nn.Module) -> None:
    """Raise unless ``model`` is a causal language model with a cache, as transformers has them."""
    missing = [name for name in CACHE_ARGUMENTS if name not in named_parameters(model)]
    if missing:
        raise GenerationError(
            "generate() is for causal language models with a cache of keys and values, as transformers has them, and the "
            f"forward of {type(model).__name__} does not take {', '.join(missing)}; make the Pipe of the language model itself "
            "(of a GPT2LMHeadModel, say), and not of a module around it"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise GenerationError(
            f"{type(model).__name__} has an encoder and a decoder, and generate() is for models that have a decoder only; "
            "call driver.copy_to(model), and then model.generate() in this process"
        )


def trace_generation(model: nn.Module, prompt: bool) -> Traced:
    """The graph of one call in evaluation mode: with a whole prompt, or with one token behind others."""
    length, before = (_PROMPT, 0) if prompt else (1, _BEFORE)
    with _evaluating(model), using_cache(FakeCache(before)):
        return trace_call(model, _call(model, length, before))


def named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What forward can be called with, by name. One of peft passes on what the model inside of it takes."""
    signature = signature_of(model)
    named = {name: each for name, each in signature.parameters.items() if each.kind not in _STAR}
    inside = getattr(model, "get_base_model", None)
    if len(named) < len(signature.parameters) and inside is not None:
        named = {**named_parameters(inside()), **named}
    return {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in named.items()}


def _call(model: nn.Module, length: int, before: int) -> "GenerationCall":
    parameters = named_parameters(model)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    lengths = {"input_ids": length, "attention_mask": before + length, "position_ids": length}
    inputs = {
        name: torch.ones(_ROWS, lengths[name], dtype=torch.long, device=device)
        for name in parameters
        if name in lengths
    }
    constants = {"use_cache": True, "logits_to_keep": 1}
    concrete = {name: constants.get(name, each.default) for name, each in parameters.items() if name not in inputs}
    return GenerationCall(
        inspect.Signature(list(parameters.values())), concrete, inputs, is_example=True, is_decorated=True
    )


@dataclass
class GenerationCall(Call):
    """A call of forward with a cache; only the logits of the last position are a result of the graph."""

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional, named = super().arguments(inputs)
        cache = RecordingCache(inputs["input_ids"], inputs["attention_mask"])
        return positional, {**named, "past_key_values": cache}

    def result(self, output: Any) -> Any:
        return (output[0] if isinstance(output, tuple) else output.logits)[:, -1]


class RecordingCache:
    """What forward takes for a cache while it is traced: what a `Cache` of transformers can be asked for."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, ids: Any, mask: Any) -> None:
        self._ids, self._mask = ids, mask

    def update(self, key: Any, value: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Record that a layer adds keys and values; those of all tokens so far are the result."""
        made = key.tracer.create_proxy("call_function", extended_cache, (key, value, layer), {})
        return made[0], made[1]

    def get_seq_length(self, layer: int = 0) -> Any:
        """How many tokens there were before this call."""
        return self._mask.shape[1] - self._ids.shape[1]

    def get_query_offset(self, layer: int = 0) -> Any:
        """The position of the first token of this call, among all."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer: int = 0) -> tuple[Any, int]:
        """How many tokens a mask is for, and where they begin."""
        return self._mask.shape[1], 0

    def get_max_length(self, layer: int = 0) -> int:
        """There is no limit, which transformers writes as -1."""
        return -1

    def __getattr__(self, name: str) -> Any:
        raise GenerationError(f"forward asks its cache for {name!r}, which pippy does not know how to follow")


class FakeCache(KeyValueCache):
    """Stands for a cache with ``length`` tokens while forward is traced: it gives fake tensors, and keeps none."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def extended(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KeysAndValues:
        return self._longer(key), self._longer(value)

    def _longer(self, each: torch.Tensor) -> torch.Tensor:
        *front, length, size = each.shape
        return each.new_empty(*front, self.length + length, size)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which all modules are in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag
