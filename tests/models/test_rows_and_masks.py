"""Models of Hugging Face with other numbers of rows than their example, with and without a mask: as the plain model."""

import copy

import pytest
import torch

from pippy import PipelineDriver1F1B, pipeline
from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import MODELS

CASES = [(name, mask) for name in ("gpt2", "t5") for mask in (False, True)]
CASES += [("llama", True), ("llama, tied", False), ("bert, classes", True), ("vit", False)]  # vit takes no mask
MASK = "attention_mask"


def batch(name, rows, mask):
    """A mini-batch with so many rows. The mask, if there is one, leaves out nothing but in the first row."""
    arguments = MODELS[name].arguments()
    arguments.pop(MASK, None)
    at = torch.arange(rows) % 4
    found = {key: value[at].clone() for key, value in arguments.items()}
    if mask:
        found[MASK] = torch.ones_like(found["input_ids"])
        found[MASK][0, 7:] = 0
    return found


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_each_number_of_rows(name, mask):
    model = MODELS[name].make()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs=batch(name, 8, not mask and name != "vit"))
    with thread_cluster(2) as threads:
        driver = PipelineDriver1F1B(pipe, threads)
        for rows in (8, 1, 7, 5, 1):
            arguments = batch(name, rows, mask)
            plain.zero_grad()
            right = plain(**arguments)
            right.loss.backward()
            loss = driver.run(min(4, rows), **arguments, outputs=False)
            torch.testing.assert_close(loss, right.loss.detach(), rtol=1e-5, atol=1e-7)  # some losses are in float32
            found = driver.gradients()
            for key, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(found[key], parameter.grad, rtol=1e-4, atol=1e-7)
            driver.zero_grad()
        assert 1 < len(driver.graphs) < 8 or name == "vit"
