"""Models written by hand in one call: loss, gradients and buffers are the plain model's, on the reference and on workers."""

import pytest
import torch

from exps.tried_models import meta_llama, sequences
from exps.tried_models.candidate import rows_of
from exps.tried_models.comparison import compare_modes, cut, loss_in, plain_step
from pippy import PipelineDriver
from tests.comparisons import assert_same_gradient, twin
from tests.drivers.thread_cluster import thread_cluster

# Llama moves its rotations to the device of what it is given, and assigns them again.
pytestmark = pytest.mark.filterwarnings(r"ignore:forward\(\) sets turns:pippy.PippyWarning")

CANDIDATES = sequences.candidates() | meta_llama.candidates()
NAMES = [
    "nn.TransformerEncoder",
    "nn.TransformerEncoder, padding mask",
    "LSTM over packed sequences",
    "loop of LSTM cells",
    "Llama as Meta wrote it",
    "einops",
    "shape checks",
    "shape checks, mask",
]


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_plain_model(name):
    compare_modes(CANDIDATES[name], 4, rows=(4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_workers_have_its_loss_and_gradients_too(name, threads):
    candidate = CANDIDATES[name]
    model, arguments = candidate.model(), candidate.arguments()
    plain = twin(model)
    pipe = cut(candidate, model, 2, rows_of(arguments, 0, 2))
    # Rows of a packed sequence are not the rows of the batch, so the mean over these cannot be found out.
    known = {"loss_reduction": "mean"} if "packed" in name else {}
    driver = PipelineDriver(pipe, threads, schedule="1f1b", **known)
    found, expected = loss_in(candidate, driver.run(2, **arguments)), plain_step(candidate, plain, arguments)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for key, parameter in plain.named_parameters():
        assert_same_gradient(driver.get_grad(key), parameter.grad, key)
