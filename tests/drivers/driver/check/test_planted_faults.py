"""Faults that are planted into the runtime are found by `driver.check`, and named with the stage where they begin."""

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, PipelineDriver, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.driver.check import origin
from tests.drivers.driver.check import faults

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

# What differs, where it begins, and what is said of it.
ALL = {"loss", "output", "gradient"}
LAST, GOT = "the last stage whose gradient differs", "is not what was given for it"
FAULTS = {
    faults.gradient_scaled: ({"gradient"}, "submod_1", LAST),
    faults.gradient_of_input_scaled: ({"gradient"}, "submod_1", "from the same gradients, it gives others"),
    faults.buffer_updated_twice: ({"buffer"}, "submod_1", "its buffer rows differs after the step"),
    faults.weight_of_loss_wrong: ({"loss", "gradient"}, "submod_2", "is not the weighted sum of the losses"),
    faults.copies_not_added_up: ({"gradient", "parameter"}, "submod_0", f"{LAST}, that of shared"),
    faults.value_of_other_microbatch: (ALL, "submod_1", GOT),
    faults.gradient_of_other_microbatch: ({"gradient"}, "submod_1", GOT),
    faults.stale_parameters: (ALL, "submod_1", "from the same inputs, it gives other outputs"),
    faults.other_rate: ({"parameter"}, "submod_1", "its update of second"),
    faults.activation_rounded: (ALL, "submod_2", GOT),
    faults.copy_not_stored: (ALL | {"parameter"}, "submod_2", "from the same inputs, it gives other outputs"),
}


ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])


def checked(threads):
    pipe = pipeline(faults.Net(), nn.CrossEntropyLoss(), multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    driver = PipelineDriver1F1B(pipe, threads, check=False)
    driver.load_state_dict(pipe.state_dict())
    driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    return driver.check(3, *ROWS)


def test_nothing_is_found_without_a_fault(threads):
    report = checked(threads)
    assert report and report.equal and report.begins is None
    assert report.compared == {"loss": 1, "output": 1, "gradient": 7, "buffer": 1, "parameter": 7}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found_and_named_with_its_stage(threads, monkeypatch, fault):
    fault(monkeypatch)
    report = checked(threads)
    kinds, stage, words = FAULTS[fault]
    assert not report and not report.equal
    assert {each.kind for each in report.differences} == kinds, report
    assert report.begins.stage == stage, report
    assert f"begins in {stage}" in str(report) and words in str(report)


KINDS = {
    "halves of backwards": {"schedule": "zb_h1"},
    "computed again": {"schedule": "1f1b", "checkpoint": "always"},
    "out of order": {"schedule": "1f1b", "out_of_order": True},
    "single loss": {"schedule": "fill_drain", "single_loss": True},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("fault", [faults.gradient_of_input_scaled, faults.activation_rounded])
def test_faults_are_found_under_any_schedule(threads, monkeypatch, fault, options):
    fault(monkeypatch)
    pipe = pipeline(faults.Net(), nn.CrossEntropyLoss())
    report = PipelineDriver(pipe, threads, **options).check(3, *ROWS)
    _, stage, words = FAULTS[fault]
    assert report.begins.stage == stage and words in str(report)


class Containers(nn.Module):
    """Stages that give dicts and tuples: of rows, of one number, of a constant, and without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        given = {"x": x, "fixed": (x.detach() * 2, 3), "sum": self.first.weight.sum()}
        pipe_split()
        x, (fixed, three) = torch.tanh(self.second(given["x"])), given["fixed"]
        given = {"x": x * fixed / three, "sum": given["sum"]}
        pipe_split()
        return self.last(given["x"]) * given["sum"]


IN_CONTAINERS = [each for each in FAULTS if FAULTS[each][2].startswith(("from the same", GOT))]


@pytest.mark.parametrize("fault", [each for each in IN_CONTAINERS if each is not faults.copy_not_stored])
def test_faults_are_found_where_stages_give_containers(threads, monkeypatch, fault):
    def report():
        return PipelineDriver1F1B(pipeline(Containers(), nn.CrossEntropyLoss()), threads, check=False).check(3, *ROWS)

    assert report()
    fault(monkeypatch)
    found, (_, stage, words) = report(), FAULTS[fault]
    assert found.begins.stage == stage and words in found.begins.what


def test_an_error_in_the_search_does_not_hide_the_difference(threads, monkeypatch):
    def raising(*args):
        raise RuntimeError("the stages cannot run here")

    monkeypatch.setattr(origin, "run_microbatches", raising)
    faults.stale_parameters(monkeypatch)
    report = checked(threads)
    assert {each.kind for each in report.differences} == ALL
    assert report.begins.what.startswith("the last stage whose gradient differs")
