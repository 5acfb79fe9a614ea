"""The printed Pipes of PiPPy's example, as texts. Their structure is that of its design document."""

from pathlib import Path

import pytest
import torch

from pippy import MultiUseParameterConfig, Pipe, pipeline
from tests.zoo import ExampleCode

GOLDEN = Path(__file__).parent / "golden"


def example(loss_fn=None, config=MultiUseParameterConfig.TRANSMIT) -> Pipe:
    return pipeline(ExampleCode(512), loss_fn, multi_use_param_spec=config)


@pytest.mark.parametrize(
    ("name", "config", "loss_fn"),
    [
        ("forward", MultiUseParameterConfig.TRANSMIT, None),
        ("replicated", MultiUseParameterConfig.REPLICATE, None),
        ("training", MultiUseParameterConfig.TRANSMIT, torch.nn.functional.mse_loss),
        ("training_replicated", MultiUseParameterConfig.REPLICATE, torch.nn.MSELoss()),
    ],
)
def test_the_example_prints_as_its_golden_text(name, config, loss_fn):
    pipe = example(loss_fn, config)
    stages = "\n".join(f"{stage}:\n{module}" for stage, module in pipe.stages())
    assert f"{pipe}\n{stages}" == (GOLDEN / f"{name}.txt").read_text()


def test_replicated_parameters_are_written_down():
    assert example(config=MultiUseParameterConfig.REPLICATE).replicated_params == [
        {"submod_0": "mm_param", "submod_1": "mm_param"},
        {"submod_1": "lin.weight", "submod_2": "lin.weight"},
        {"submod_1": "lin.bias", "submod_2": "lin.bias"},
    ]


def test_transmitted_parameters_live_in_their_first_stage():
    pipe = example()
    assert pipe.replicated_params == [
        {"submod_1": "lin.weight", "submod_2": "lin.weight"},
        {"submod_1": "lin.bias", "submod_2": "lin.bias"},
    ]
    assert pipe.stage_qualnames("mm_param") == ("submod_0.mm_param",)
