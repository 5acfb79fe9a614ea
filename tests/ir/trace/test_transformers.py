"""Transformers of torch.nn: with an example they are cut between their layers, and give torch's numbers."""

import pytest
import torch
from torch import nn

from pippy import pipeline
from pippy.errors import StageError
from tests.comparisons import twin


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, 3, **options)

    def forward(self, x, padding=None, mask=None):
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


def arguments():
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 4:] = True
    return {"x": torch.randn(4, 6, 8, dtype=torch.float64), "padding": padding}


def pipe_of(model, **example):
    return pipeline(model, num_stages=3, split="parameters", output_loss_value_spec=False, example_kwargs=example)


def test_padding_that_torch_fills_with_zeros_is_refused_and_the_advice_works():
    given, model = arguments(), Encoder()
    pipe = pipe_of(model, **given).eval()
    torch.testing.assert_close(pipe(**given), twin(model)(**given), rtol=1e-12, atol=1e-14)
    with torch.no_grad(), pytest.raises(StageError, match="enable_nested_tensor=False"):
        pipe(**given)
    frozen = pipe_of(model.train().requires_grad_(False), **given)
    with pytest.raises(StageError, match="enable_nested_tensor=False"):
        frozen.eval()(**given)
    frozen.train()
    torch.testing.assert_close(frozen(**given), twin(model)(**given), rtol=1e-12, atol=1e-14)
    other = Encoder(enable_nested_tensor=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe_of(other, **given)(**given), twin(other)(**given), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_that_may_be_causal(training):
    given = {"x": arguments()["x"], "mask": nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)}
    model = Encoder().train(training)
    pipe = pipe_of(model, **given)
    torch.testing.assert_close(pipe(**given), twin(model)(**given), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(pipe(**given), twin(model)(**given), rtol=1e-12, atol=1e-14)


def test_an_encoder_and_a_decoder():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    given = {"src": torch.randn(4, 6, 8, dtype=torch.float64), "tgt": torch.randn(4, 5, 8, dtype=torch.float64)}
    pipe = pipe_of(model, **given)
    expected = twin(model)(**given)
    torch.testing.assert_close(pipe(**given), expected, rtol=1e-12, atol=1e-14)


def test_without_an_example_they_are_leaves():
    traced = pipeline(nn.Sequential(nn.Linear(8, 8), Encoder().float()), num_stages=2, split="parameters")
    assert [type(module) for module in traced.split_gm.submod_1.modules() if type(module) is nn.TransformerEncoder]
