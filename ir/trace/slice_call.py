"""Traces how a causal language model trains on one slice of a sequence, behind slices whose keys and values it reads.

The model is called with a cache, as for the making of tokens: generation_call.py. The graph takes besides what the Pipe takes

    attention_mask   of all tokens so far: those of earlier slices and of this one
    position_ids     of the tokens of this slice
    shift_labels     if the model makes its loss: the labels of the tokens that follow those of this slice

and gives what the model returns, but for the cache. Lengths are free.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import GenerationError, SliceError
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.traced import Traced
from pippy.ir.run.checkpointed_parts import parts_of
from pippy.ir.run.key_value_cache import extended_cache, using_cache
from pippy.ir.trace.arguments import Call
from pippy.ir.trace.generation_call import CACHE_ARGUMENTS, FakeCache, RecordingCache, named_parameters
from pippy.ir.trace.trace import trace_in_both_modes

IDS, MASK, POSITIONS, LABELS, NEXT_LABELS = "input_ids", "attention_mask", "position_ids", "labels", "shift_labels"
CUT = (IDS, MASK, POSITIONS, LABELS)  # the inputs of a Pipe that slices are cut from
_ROWS, _LENGTH, _BEFORE = 2, 5, 7  # what the example has of each: other numbers than forward may ask for


def check_can_be_sliced(model: nn.Module, compiled: Compiled) -> None:
    """Raise unless ``model``, which ``compiled`` was made from, is a causal language model with a cache, as of transformers."""
    name, config = type(model).__name__, getattr(model, "config", None)
    missing = [each for each in CACHE_ARGUMENTS if each not in named_parameters(model)]
    if missing:
        raise SliceError(
            "slices= is for causal language models with a cache of keys and values, as transformers has them, and the "
            f"forward of {name} does not take {', '.join(missing)}; leave slices= out, or make the Pipe of the language model "
            "itself (of a GPT2LMHeadModel, say), and not of a module around it"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SliceError(
            f"{name} has an encoder and a decoder, and slices= is for models that have a decoder only; leave slices= out"
        )
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
            traced = trace_in_both_modes(model, _call(model, compiled))
    except GenerationError as error:  # of the cache
        raise SliceError(f"{type(model).__name__} cannot run in slices: {error}; leave slices= out") from error
    _check_traced(traced, model, compiled)
    traced.concrete_args["use_cache"] = False  # with which the model gives the same for a whole sequence
    return traced


def _call(model: nn.Module, compiled: Compiled) -> "SliceCall":
    parameters = named_parameters(model)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    names = [IDS, MASK, *([POSITIONS] if POSITIONS in parameters else [])]
    if LABELS in compiled.wiring.inputs:
        names += [LABELS, NEXT_LABELS]
        parameters[NEXT_LABELS] = inspect.Parameter(NEXT_LABELS, inspect.Parameter.KEYWORD_ONLY, default=None)
    inputs = {
        name: torch.ones(_ROWS, _LENGTH + _BEFORE * (name == MASK), dtype=torch.long, device=device) for name in names
    }
    fixed = {**compiled.concrete_args, "use_cache": True, "past_key_values": None}
    concrete = {name: fixed.get(name, each.default) for name, each in parameters.items() if name not in inputs}
    return SliceCall(inspect.Signature(list(parameters.values())), concrete, inputs, is_example=True, is_decorated=True)


@dataclass
class SliceCall(Call):
    """A call of forward with a cache, which is no result of the graph."""

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional, named = super().arguments(inputs)
        return positional, {**named, "past_key_values": RecordingCache(inputs[IDS], inputs[MASK])}

    def result(self, output: Any) -> Any:
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
