"""Programs of `torch.export`, on workers."""

import copy

import pytest
from torch import nn
from torch.export import export

from pippy import pipeline
from pippy.drivers.batch.merge import Sum
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.errors import InputError
from tests.comparisons import assert_same, run_plain
from tests.ir.trace.test_exported import Blocks, Called, exported, ids, numbers

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def test_a_driver_runs_it_with_micro_batches_of_any_size(threads):
    model, program, _, kwargs, _ = exported("language")
    plain = copy.deepcopy(model)
    whole = {"ids": ids(5)}
    expected = run_plain(Called(plain, kwargs), None, "loss", (whole,), None)
    driver = PipelineDriver1F1B(pipeline(program), threads, output_spec={"rows": Sum()})
    for chunks in (1, 3, 5):
        driver.zero_grad()
        result = driver.run(chunks, whole, **kwargs)
        assert_same(result["loss"], expected["loss"], f"loss with {chunks} micro-batches")
        for name, parameter in plain.named_parameters():
            assert_same(driver.get_grad(name), parameter.grad, f"gradient of {name}")
    with pytest.raises(InputError, match=r"size\(\)\[1\] > 3"):
        driver.run(1, {"ids": ids(5, 3)}, **kwargs)
    driver.close()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_its_buffers_change_once_in_a_step(checkpoint, threads):
    model, program, _, _, loss_fn = exported("counted")
    plain = copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(program, loss_fn), threads, checkpoint=checkpoint)
    for _ in range(2):
        x, target = numbers(4), numbers(4)[:, :1]
        plain.zero_grad()
        driver.zero_grad()
        assert_same(driver.run(2, x, target), run_plain(plain, loss_fn, None, (x,), target), "loss")
        for name, parameter in plain.named_parameters():
            assert_same(driver.get_grad(name), parameter.grad, f"gradient of {name}")
    assert_same(driver.state_dict(), plain.state_dict(), "state")
    driver.close()


def test_a_program_of_fixed_rows_runs_micro_batches_of_these(threads):
    model = Blocks()
    program, plain = export(model, (numbers(2),)), copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(program, nn.MSELoss(), num_stages=2, split="parameters"), threads, check=False)
    x, target = numbers(6), numbers(6)
    assert_same(driver.run(3, x, target), run_plain(plain, nn.MSELoss(), None, (x,), target), "loss")
    with pytest.raises(InputError, match=r"x\.size\(0\) is 3; .*it was 2"):
        driver.run(2, x, target)
    driver.close()
