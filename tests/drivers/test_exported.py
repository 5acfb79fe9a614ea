"""Models traced by `torch.export`, on workers."""

import copy

import pytest
import torch

from pippy import pipeline
from pippy.drivers.batch.merge import Sum
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.ir.base.errors import InputError
from tests.comparisons import assert_same, run_plain
from tests.ir.export.models import Language

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def ids(rows=4, length=5):
    return torch.randint(10, (rows, length))


def test_a_driver_runs_it_with_micro_batches_of_any_size(threads):
    model = Language()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, front_end="export", example_args=({"ids": ids()},))
    whole = {"ids": ids(5)}
    expected = run_plain(plain, None, "loss", (whole,), None)
    driver = PipelineDriver1F1B(pipe, threads, output_spec={"rows": Sum()})
    for chunks in (1, 3, 5):
        driver.zero_grad()
        result = driver.run(chunks, whole)
        assert_same(result["loss"], expected["loss"], f"loss with {chunks} micro-batches")
        for name, parameter in plain.named_parameters():
            assert_same(driver.get_grad(name), parameter.grad, f"gradient of {name}")
    with pytest.raises(InputError, match=r"batch\['ids'\].size\(1\) > 3"):
        driver.run(1, {"ids": ids(5, 3)})
    driver.close()
