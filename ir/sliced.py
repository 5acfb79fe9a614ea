"""A Pipe of one slice of a sequence, made from a Pipe of whole sequences: the same model, cut in the same places."""

from pippy.ir.base.errors import SliceError
from pippy.ir.base.interrupts import heard
from pippy.ir.base.names import LOSS
from pippy.ir.compile import compile_traced
from pippy.ir.cut.cut_alike import copied_parameters, mark_alike
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.loss.loss_function import FunctionLoss
from pippy.ir.pipe import Pipe, compiled_of, model_of, pipe_alike
from pippy.ir.request import Request
from pippy.ir.trace.language_models import trace_slice


def sliced(pipe: Pipe) -> Pipe:
    """The Pipe that computes one slice after another of what ``pipe`` computes at once. Its tensors are those of the model.

    >>> import torch
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
        stages = mark_alike(traced, compiled, SliceError, "run in slices")
        if stages != list(range(compiled.num_stages)):
            raise SliceError(
                f"the model cannot run in slices as it is cut: a slice needs stages {', '.join(map(str, stages))} of the Pipe, "
                f"which has {compiled.num_stages}; cut the Pipe between the layers of the model"
            )
        loss = compiled.loss_module
        request = Request(
            multi_use_param_spec=dict.fromkeys(copied_parameters(compiled), MultiUseParameterConfig.REPLICATE),
            loss_fn=loss.function if isinstance(loss, FunctionLoss) else loss,
            output_loss_value_spec=None if loss is not None or compiled.loss is not None else False,
        )
        return pipe_alike(pipe, traced, compile_traced(traced, request))
