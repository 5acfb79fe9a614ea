"""Functions that torch.func transforms run on workers as in the plain model."""

import pytest
import torch

from pippy import PipelineDriver1F1B, pipeline
from tests.ir.trace.test_function_transforms import MSE, TRANSFORMED, copy_of, kept

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
WITH_SUM = "vmap with values from outside"  # it sums over the rows


@pytest.mark.parametrize(("name", "chunks"), [(WITH_SUM, 1), ("a gradient for each row", 2), ("hessian", 2)])
def test_workers_compute_it(name, chunks, cluster):
    model, x, target = kept(TRANSFORMED[name]), torch.randn(6, 4), torch.randn(6, 4)
    plain = copy_of(model, TRANSFORMED[name])
    MSE(plain(x), target).backward()
    driver = PipelineDriver1F1B(pipeline(model, MSE, example_args=(x, target)), cluster)
    driver.run(chunks, x, target)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(driver.get_grad(name), parameter.grad)
