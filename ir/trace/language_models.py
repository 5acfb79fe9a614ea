"""Traces causal language models with a cache of keys and values: to make one more token, and to train on slices of sequences.

To make a token, the model is called as `generate` of transformers calls it. It gets a cache that records a node of the graph
where a layer adds its keys and values; ir/run/key_value_cache.py has what the node does.

    keys, values = cache.update(k, v, 3)   ──▶   extended_cache = extended_cache(k, v, 3)
                                                 keys = extended_cache[0];  values = extended_cache[1]

The graph takes `input_ids`, `attention_mask` and `position_ids`, and gives the logits of the last position. Lengths are free. A
prompt and a token behind it are two graphs, since forward may ask how long its input is.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import GenerationError, PippyError, SliceError
from pippy.ir.record.compiled import Compiled, Traced
from pippy.ir.run.checkpointed_parts import parts_of
from pippy.ir.run.key_value_cache import KeysAndValues, KeyValueCache, extended_cache, using_cache
from pippy.ir.trace.arguments import Call, signature_of
from pippy.ir.trace.trace import trace_call, trace_in_both_modes

CACHE_ARGUMENTS = ("input_ids", "attention_mask", "past_key_values", "use_cache")
_STAR = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
IDS, MASK, POSITIONS, LABELS, NEXT_LABELS = "input_ids", "attention_mask", "position_ids", "labels", "shift_labels"
CUT = (IDS, MASK, POSITIONS, LABELS)  # the inputs of a Pipe that slices are cut from
_ROWS, _BEFORE, _LENGTH = 2, 7, 5  # what the example has of each: other numbers than forward may ask for


def check_can_generate(model: nn.Module) -> None:
    """Raise unless ``model`` is a causal language model with a cache, as transformers has them."""
    instead = "call driver.copy_to(model), and then model.generate() in this process"
    _check_has_cache(model, GenerationError, "generate() is", "", instead)


def _check_has_cache(model: nn.Module, error: type[PippyError], what: str, first: str, instead: str) -> None:
    """Raise an error unless ``model`` is a causal language model with a cache. ``what`` is for such models; what to do
    ``first`` for others, and ``instead`` for those with an encoder."""
    name = type(model).__name__
    missing = [each for each in CACHE_ARGUMENTS if each not in named_parameters(model)]
    if missing:
        raise error(
            f"{what} for causal language models with a cache of keys and values, as transformers has them, and the forward of "
            f"{name} does not take {', '.join(missing)}; {first}make the Pipe of the language model itself (of a "
            "GPT2LMHeadModel, say), and not of a module around it"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise error(f"{name} has an encoder and a decoder, and {what} for models that have a decoder only; {instead}")


def trace_generation(model: nn.Module, prompt: bool) -> Traced:
    """The graph of one call in evaluation mode: with a whole prompt, or with one token behind others."""
    length, before = (_LENGTH, 0) if prompt else (1, _BEFORE)
    with in_evaluation(model), using_cache(FakeCache(before)):
        lengths = {IDS: length, MASK: before + length, POSITIONS: length}
        constants = {"use_cache": True, "logits_to_keep": 1}
        call = CachedCall.of(model, named_parameters(model), lengths, constants, _logits_of_the_last)
        return trace_call(model, call)


def named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What forward can be called with, by name. One of peft passes on what the model inside of it takes."""
    signature = signature_of(model)
    named = {name: each for name, each in signature.parameters.items() if each.kind not in _STAR}
    inside = getattr(model, "get_base_model", None)
    if len(named) < len(signature.parameters) and inside is not None:
        named = {**named_parameters(inside()), **named}
    return {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in named.items()}


@dataclass
class CachedCall(Call):
    """A call of forward with a cache, which is no result of the graph: ``gives`` makes the result, of what forward gives."""

    gives: Callable[[Any], Any] = lambda output: output

    @staticmethod
    def of(
        model: nn.Module,
        parameters: Mapping[str, inspect.Parameter],
        lengths: Mapping[str, int],
        constants: Mapping[str, Any],
        gives: Callable[[Any], Any],
    ) -> "CachedCall":
        """A call with rows of so many tokens for each input, and with constants for all other parameters."""
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        inputs = {
            name: torch.ones(_ROWS, lengths[name], dtype=torch.long, device=device)
            for name in parameters
            if name in lengths
        }
        concrete = {name: constants.get(name, each.default) for name, each in parameters.items() if name not in inputs}
        signature = inspect.Signature(list(parameters.values()))
        return CachedCall(signature, concrete, inputs, is_example=True, is_decorated=True, gives=gives)

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional, named = super().arguments(inputs)
        return positional, {**named, "past_key_values": RecordingCache(inputs[IDS], inputs[MASK])}

    def result(self, output: Any) -> Any:
        return self.gives(output)


def _logits_of_the_last(output: Any) -> Any:
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
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """A context in which all modules are in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


# Traces how a causal language model trains on one slice of a sequence, behind slices whose keys and values it reads.
#
# The model is called with a cache, as for the making of tokens. The graph takes besides what the Pipe takes
#
#     attention_mask   of all tokens so far: those of earlier slices and of this one
#     position_ids     of the tokens of this slice
#     shift_labels     if the model makes its loss: the labels of the tokens that follow those of this slice
#
# and gives what the model returns, but for the cache. Lengths are free.


def check_can_be_sliced(model: nn.Module, compiled: Compiled) -> None:
    """Raise unless ``model``, which ``compiled`` was made from, is a causal language model with a cache, as of transformers."""
    name = type(model).__name__
    _check_has_cache(model, SliceError, "slices= is", "leave slices= out, or ", "leave slices= out")
    for path, module in model.named_modules():
        which = repr(path) if path else "the model"
        if False in (getattr(module, "is_causal", None), getattr(getattr(module, "config", None), "is_causal", None)):
            raise SliceError(
                f"the attention of {name} is not causal ({which} has is_causal=False): a token reads later ones, which are in "
                "later slices; leave slices= out"
            )
        if getattr(module, "gradient_checkpointing", False):
            raise SliceError(
                f"{which} of {name} has gradient_checkpointing on, with which it keeps no keys and values for later slices; "
                "turn it off, and give the driver checkpoint= instead"
            )
    other = [each for each in compiled.wiring.inputs if each not in (*CUT, compiled.target_name)]
    if other:
        raise SliceError(
            f"the Pipe takes {', '.join(other)}, and it is not known how a sequence of {name} is cut in these; slices= knows "
            f"{', '.join(CUT)} and the target of a loss function. Leave slices= out, or make the Pipe with an example without"
        )


def trace_slice(model: nn.Module, compiled: Compiled) -> Traced:
    """The graph of one slice, for a Pipe that was compiled from the model."""
    check_can_be_sliced(model, compiled)
    try:
        with using_cache(FakeCache(_BEFORE)):
            traced = trace_in_both_modes(model, _call_of_slice(model, compiled))
    except GenerationError as error:  # of the cache
        raise SliceError(f"{type(model).__name__} cannot run in slices: {error}; leave slices= out") from error
    _check_traced(traced, model, compiled)
    traced.concrete_args["use_cache"] = False  # with which the model gives the same for a whole sequence
    return traced


def _call_of_slice(model: nn.Module, compiled: Compiled) -> CachedCall:
    parameters = named_parameters(model)
    lengths = {IDS: _LENGTH, MASK: _BEFORE + _LENGTH, POSITIONS: _LENGTH}
    if LABELS in compiled.wiring.inputs:
        lengths |= {LABELS: _LENGTH, NEXT_LABELS: _LENGTH}
        parameters[NEXT_LABELS] = inspect.Parameter(NEXT_LABELS, inspect.Parameter.KEYWORD_ONLY, default=None)
    constants = {**compiled.concrete_args, "use_cache": True, "past_key_values": None}
    return CachedCall.of(model, parameters, lengths, constants, _without_cache)


def _without_cache(output: Any) -> Any:
    if isinstance(output, tuple):
        raise SliceError(
            "slices= needs what the model returns by name, as models of transformers return it, and this one returns a "
            "tuple; leave slices= out"
        )
    return type(output)(**{name: None if name == "past_key_values" else each for name, each in output.items()})


def _check_traced(traced: Traced, model: nn.Module, compiled: Compiled) -> None:
    """Raise if the graph of a slice does not read earlier slices, or counts other labels than the model does."""
    name = type(model).__name__
    parts = [node for part in parts_of(list(traced.graph.nodes)) for node in part.nodes]
    if any(node.target is extended_cache for node in parts):
        raise SliceError(
            f"{name} calls torch.utils.checkpoint for a part that adds keys and values to a cache, so the part would add them "
            "once more in the backward; take it out, and give the driver checkpoint= instead"
        )
    if not traced.graph.find_nodes(op="call_function", target=extended_cache):
        raise SliceError(
            f"no layer of {name} adds keys and values to a cache when it is called with use_cache=True, so a slice cannot read "
            "those before it; leave slices= out"
        )
    unused = {node.name for node in traced.placeholders() if not node.users}
    if LABELS in compiled.wiring.inputs and NEXT_LABELS in unused:
        raise SliceError(
            f"the loss of {name} does not take shift_labels, the labels of the next tokens, as the losses of transformers do: "
            "the last token of a slice needs the first label of the next one. Make the Pipe with a loss function of the "
            "logits, pipeline(model, loss_fn), or leave slices= out"
        )
