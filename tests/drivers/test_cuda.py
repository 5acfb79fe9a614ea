"""Stages on GPUs. Values travel through host memory, so one GPU can hold several workers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, PipelineDriver1F1B, local_cluster, pipeline
from tests.drivers.models import TiedLanguage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def gpus():
    """Two workers on the first GPU, one on the last, one without."""
    last = f"cuda:{torch.cuda.device_count() - 1}"
    with local_cluster(4, devices=["cuda:0", "cuda:0", last, "cpu"]) as cluster:
        yield cluster


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_training_on_gpus_is_that_of_the_plain_model(gpus, config, schedule):
    torch.manual_seed(0)
    model = TiedLanguage().double()
    plain = copy.deepcopy(model)
    driver = PipelineDriver(pipeline(model, cross_entropy, multi_use_param_spec=config), gpus, schedule=schedule)
    mine, theirs = (
        driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2),
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
    )
    for _ in range(3):
        x, target = torch.randint(13, (7, 5)), torch.randint(13, (7, 5))
        mine.zero_grad()
        theirs.zero_grad()
        loss = cross_entropy(plain(x), target)
        loss.backward()
        torch.testing.assert_close(driver.run(3, x, target), loss.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(driver.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        mine.step()
        theirs.step()
    for name, tensor in driver.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-8, atol=1e-11)
    driver.close()


def test_inputs_may_be_on_a_gpu(gpus):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    driver = PipelineDriver1F1B(Pipe.from_sequential(model), gpus)
    x = torch.randn(4, 8)
    torch.testing.assert_close(driver.run(2, x.cuda()).cpu(), model(x), rtol=1e-4, atol=1e-5)
    driver.close()
