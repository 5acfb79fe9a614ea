"""A model of Hugging Face cut in two at places all over it: the loss and the gradients are the plain model's."""

import copy
from dataclasses import replace

import torch

from pippy.ir.base.errors import SplitError
from pippy.ir.base.marks import pipe_split
from pippy.ir.compile import compile_traced
from pippy.ir.pipe import Pipe
from pippy.ir.request import Request
from pippy.ir.trace.arguments import Example
from pippy.ir.trace.trace import trace
from tests.comparisons import assert_same_gradients, twin
from tests.models.hugging_face import MODELS

EACH = 5  # 1 tries every place, which takes half a minute for two blocks


def test_gpt2():
    options = {**MODELS["gpt2"].options, "n_layer": 1}
    model, arguments = replace(MODELS["gpt2"], options=options).make(), MODELS["gpt2"].arguments()
    plain = twin(model)
    expected = plain(**arguments).loss
    expected.backward()
    traced = trace(model, example=Example((), arguments))
    places = [index for index, node in enumerate(traced.graph.nodes) if node.op.startswith("call")]
    cut = 0
    for place in places[1::EACH]:
        here = replace(traced, graph=copy.deepcopy(traced.graph), attributes=dict(traced.attributes))
        node = list(here.graph.nodes)[place]
        with here.graph.inserting_before(node):
            here.graph.create_node("call_function", pipe_split)
        try:
            pipe = Pipe(here, compile_traced(here, Request()))
        except SplitError:  # two operations that must stay together
            continue
        cut += pipe.num_stages == 2
        pipe.zero_grad()
        torch.testing.assert_close(pipe(**arguments).loss.detach(), expected.detach(), rtol=1e-12, atol=0)
        assert_same_gradients(pipe, plain)
    assert cut > len(places) / EACH / 2
