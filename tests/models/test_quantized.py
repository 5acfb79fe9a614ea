"""Quantized models on workers are the plain ones: what faq.md says of them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import disable_observer, get_default_qat_qconfig, prepare_qat, quantize_dynamic

from pippy import PipelineDriver1F1B, errors, local_cluster, pipeline

CHUNKS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Int8Linear(nn.Module):
    """A linear layer whose weight is kept in 8 bits."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.fixture(scope="module")
def workers():
    with local_cluster(2) as opened:
        yield opened


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(32, 16), torch.randn(32, 1)


@pytest.fixture(autouse=True)
def without_torch_s_warnings():
    """torch.ao.quantization is deprecated, and says so in every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", message=".*(quantiz|TypedStorage|reduce_range)")
        yield


def trained(model, workers, data, chunks, steps=3, **options):
    """The losses of some steps, of the pipeline and of the plain model, and what both then hold."""
    x, target = data
    plain = copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss(), split=["b"]), workers, **options)
    ours, theirs = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        expected = nn.functional.mse_loss(plain(x), target)
        losses.append((driver.run(chunks, x, target), expected.detach()))
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    driver.copy_to(model)
    return losses, model.state_dict(), plain.state_dict()


def prepared():
    model = Net()
    model.qconfig = get_default_qat_qconfig("fbgemm")
    return prepare_qat(model)


def test_weights_of_8_bits_in_buffers(workers, data):
    model = Net().double()
    model.a, model.b = Int8Linear(model.a), Int8Linear(model.b)
    losses, ours, theirs = trained(model, workers, tuple(each.double() for each in data), CHUNKS)
    torch.testing.assert_close(*zip(*losses))
    torch.testing.assert_close(ours, theirs)


def test_dynamic_quantization_gives_each_micro_batch_a_scale(workers, data):
    model = quantize_dynamic(Net().eval(), {nn.Linear}, dtype=torch.qint8)
    driver = PipelineDriver1F1B(pipeline(model, split=["b"]), workers)
    x = data[0] * torch.linspace(0.1, 2, 32)[:, None]
    with torch.no_grad():
        assert torch.equal(driver.run(1, x), model(x))
        in_parts = torch.cat([model(part) for part in x.chunk(CHUNKS)])
        assert torch.equal(driver.run(CHUNKS, x), in_parts) and not torch.equal(in_parts, model(x))


def test_observers_see_the_plain_rows_in_one_micro_batch(workers, data):
    losses, ours, theirs = trained(prepared(), workers, data, 1)
    torch.testing.assert_close(*zip(*losses))
    assert ours["a.weight_fake_quant.scale"].shape == (16,), "observers resize it"
    torch.testing.assert_close(ours, theirs)


def test_observers_in_several_micro_batches_are_refused(workers, data):
    with pytest.raises(errors.MicrobatchError, match=r"(?s)buffer of 'a\.activation_post_process.*chunks=1"):
        trained(prepared(), workers, data, CHUNKS)
    with pytest.raises(
        errors.MicrobatchError, match="loss of the whole is"
    ):  # each micro-batch is rounded by its own scale
        trained(prepared(), workers, data, CHUNKS, buffers="per_microbatch")
    trained(prepared(), workers, data, CHUNKS, buffers="per_microbatch", check=False)


def test_rounding_that_was_observed_before_is_the_plain_one(workers, data):
    model = prepared()
    model(data[0])
    losses, ours, theirs = trained(model.apply(disable_observer), workers, data, CHUNKS)
    torch.testing.assert_close(*zip(*losses))
    torch.testing.assert_close(ours, theirs)
