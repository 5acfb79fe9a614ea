"""Other graphs of the model that a Pipe was made from, cut in the same places. Their tensors are those of the model.

    a slice of a sequence           the Pipe computes one slice after another of what it computes at once
    a call that fails a guard       forward goes on in another way for it, for one row say

The stages of another graph use the parameters, buffers and modules that the same stages of the Pipe have. What passes between
them may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.ir.base.errors import GuardError, PippyError, SliceError
from pippy.ir.base.interrupts import heard
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.compile import compile_traced
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.cut.uses import copied_parameters, held_tensors, mark_alike, marks
from pippy.ir.loss.loss_function import FunctionLoss
from pippy.ir.pipe import Pipe, compiled_of, model_of, pipe_alike, request_of
from pippy.ir.record.compiled import Compiled, Traced
from pippy.ir.request import Request
from pippy.ir.trace.arguments import Example
from pippy.ir.trace.language_models import trace_slice
from pippy.ir.trace.trace import trace

_DO = "go on as this call asks"
Place = tuple[str, str]  # a stage, and the path of a tensor or a module in it


def sliced(pipe: Pipe) -> Pipe:
    """The Pipe that computes one slice after another of what ``pipe`` computes at once.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from pippy import pipeline
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_head=1, n_layer=1, use_cache=False))
    >>> ids = torch.ones(2, 3).long()
    >>> pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs={"input_ids": ids, "labels": ids})
    >>> compiled_of(sliced(pipe)).wiring.inputs
    ('input_ids', 'attention_mask', 'position_ids', 'labels', 'shift_labels')
    """
    compiled, model = compiled_of(pipe), model_of(pipe)
    if model is None:
        raise SliceError(
            "slices= needs the model that the Pipe was made from, which this Pipe, a copy, does not hold; make the driver from "
            "the Pipe that pipeline() returned"
        )
    if any(LOSS in group for group in compiled.replicated_params):
        raise SliceError(
            "the loss function has parameters of the model, which slices= does not follow; have the model return what the loss "
            "needs, or leave slices= out"
        )
    with heard():
        traced = trace_slice(model, compiled)
        return _cut_alike(
            pipe, traced, SliceError, "run in slices", "a slice", "cut the Pipe between the layers of the model"
        )


@dataclass(frozen=True)
class OtherGraph:
    """A Pipe of another graph. ``held`` says for the stages, and for `_loss`, where the first Pipe has each tensor and module
    that they use, by its id."""

    pipe: Pipe
    held: Mapping[str, Mapping[int, Place]]


def graph_for(pipe: Pipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OtherGraph:
    """The graph that forward has for these arguments, the target among them. Raises if it cannot be made, or if what a stage
    holds would move.

    >>> from torch import nn
    >>> from pippy import pipe_split, pipeline
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         h = self.a(x)
    ...         pipe_split()
    ...         return self.b(h) if len(x) > 1 else -self.b(h)
    >>> pipe = pipeline(Net(), example_args=(torch.ones(3, 2),))
    >>> other = graph_for(pipe, (torch.ones(1, 2),), {}).pipe
    >>> [[node.name for node in each.stage(1).graph.nodes][-3:] for each in (pipe, other)]
    [['check_fixed', 'b', 'output'], ['b', 'neg', 'output']]
    """
    compiled, model, request = compiled_of(pipe), model_of(pipe), request_of(pipe)
    if model is None or request is None:
        raise GuardError("this process has no model that it could trace again: the Pipe is a copy, or was not traced")
    with heard(), torch.inference_mode(False):
        given = {name: value for name, value in kwargs.items() if name not in (request.concrete_args or {})}
        example = Example.of(model, args, given, with_target=request.loss_fn is not None)
        traced = trace(model, request.tracer, request.concrete_args, example)
        found = _cut_alike(
            pipe, traced, GuardError, _DO, "it", "pass what the example passed, or cut the Pipe elsewhere"
        )
    other = compiled_of(found)
    if _copies(compiled) != _copies(other):
        raise GuardError("other parameters would be used by several stages")
    if (compiled.loss is None) != (other.loss is None):
        raise GuardError("the model returns a loss in one of the two cases only")
    tensors = held_tensors(other, list(range(compiled.num_stages)), compiled, GuardError, _DO)
    return OtherGraph(found, {name: _held(name, other, compiled, tensors) for name in other.split_gm._modules})


def _copies(compiled: Compiled) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(group.items()) for group in compiled.replicated_params}


def _held(name: str, other: Compiled, compiled: Compiled, tensors: Mapping[int, Place]) -> dict[int, Place]:
    """Where the stage with this name has what that of the other graph uses. Raises if it lacks a tensor."""
    stage, own = compiled.stage(name), dict(named_state(compiled.stage(name)))
    held = {id(each): (name, path) for path, each in own.items()}
    held |= {id(module): (name, path) for path, module in stage.named_modules() if path}
    for path, tensor in named_state(other.stage(name)):
        if id(tensor) in held:
            continue
        if id(tensor) not in tensors:
            user_name = other.remap_qualname(f"{name}.{path}")
            raise GuardError(
                f"{name} would use {user_name!r}, which no stage has: forward did not use it when it was traced"
            )
        held[id(tensor)] = tensors[id(tensor)]
    return held


def _cut_alike(pipe: Pipe, traced: Traced, error: type[PippyError], do: str, what: str, remedy: str) -> Pipe:
    """The Pipe of another traced graph, cut where ``pipe`` is cut."""
    compiled, marked = compiled_of(pipe), marks(traced)
    if len(marked) == compiled.num_stages - 1:
        traced.balanced = True  # the model's own marks
    else:
        for each in marked:
            traced.graph.erase_node(each)
        _check_stages(mark_alike(traced, compiled, error, do), compiled, error, do, what, remedy)
    loss = compiled.loss_module
    request = Request(
        multi_use_param_spec=dict.fromkeys(copied_parameters(compiled), MultiUseParameterConfig.REPLICATE),
        loss_fn=loss.function if isinstance(loss, FunctionLoss) else loss,
        output_loss_value_spec=None if loss is not None or compiled.loss is not None else False,
    )
    return pipe_alike(pipe, traced, compile_traced(traced, request))


def _check_stages(
    stages: list[int], compiled: Compiled, error: type[PippyError], do: str, what: str, remedy: str
) -> None:
    if stages != list(range(compiled.num_stages)):
        needed = ", ".join(map(str, stages))
        raise error(
            f"the model cannot {do} as it is cut: {what} needs stages {needed} of the Pipe, which has {compiled.num_stages}; "
            f"{remedy}"
        )
