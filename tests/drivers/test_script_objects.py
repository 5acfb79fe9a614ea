"""Custom functions and operators, cached and scripted functions of a script travel to workers, and give the plain numbers."""

import functools
import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch._library.custom_ops import OPDEFS

from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.wire import script_objects
from pippy.drivers.wire.pickling import pickle_by_value, unpickle

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def run_script():
    """The script as a module that workers cannot import."""
    path = Path(__file__).with_name("functions_of_a_script.py")
    spec = importlib.util.spec_from_file_location("a_script_of_tests", path)
    module = sys.modules["a_script_of_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


SCRIPT = run_script()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", SCRIPT.ROWS)
def test_what_a_script_defines_travels(cluster, name, schedule):
    middle, loss_fn = SCRIPT.ROWS[name]
    model, plain = SCRIPT.Net(middle()), SCRIPT.Net(middle())
    plain.load_state_dict(model.state_dict())
    x, target = torch.randn(7, 4), torch.randn(7, 4)
    loss = loss_fn(plain(x), target)
    loss.backward()
    driver = PipelineDriver(pipeline(model, loss_fn), cluster, schedule=schedule)
    torch.testing.assert_close(driver.run(3, x, target), loss.detach(), rtol=1e-12, atol=0)
    found = driver.gradients()
    for each, parameter in plain.named_parameters():
        torch.testing.assert_close(found[each], parameter.grad, rtol=1e-10, atol=1e-12)


def test_an_operator_of_a_library_is_refused_by_name(cluster):
    """The row "a custom operator" above follows the advice."""
    model = SCRIPT.Net(SCRIPT.Traced(SCRIPT.of_a_library))
    with pytest.raises(
        StepError, match=r"library_of_tests::cubed is defined in the script.*define it by torch.library.custom_op"
    ):
        PipelineDriver(pipeline(model, torch.nn.functional.mse_loss), cluster).run(
            2, torch.randn(6, 4), torch.randn(6, 4)
        )


def defined(by):
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * by

    return torch.library.custom_op("script_of_tests::scaled", mutates_args=())(kernel)


def test_an_operator_that_is_defined_anew_arrives_anew_and_another_process_s_own_stays():
    sent = [pickle_by_value([defined(by), torch.ops.script_of_tests.scaled.default]) for by in (2.0, 3.0)]
    own = defined(5.0)
    assert unpickle(sent[0])[0] is own, "a process that has defined it itself keeps that"
    del own
    OPDEFS.pop("script_of_tests::scaled")
    try:
        for by, pickled in zip((2.0, 3.0), sent):
            definition, operator = unpickle(pickled)
            assert definition(torch.ones(1)).item() == operator(torch.ones(1)).item() == by
    finally:
        script_objects._arrived.pop("script_of_tests::scaled")


def test_a_cached_function_arrives_with_its_options_and_an_empty_cache():
    calls = []

    @functools.lru_cache(maxsize=3, typed=True)
    def counted(n):
        calls.append(n)
        return n + 1

    counted(1)
    arrived = unpickle(pickle_by_value(counted))
    assert arrived.cache_parameters() == {"maxsize": 3, "typed": True}
    assert arrived.cache_info().currsize == 0
    assert arrived(1) == arrived(1) == 2
    assert arrived.cache_info().hits == 1
