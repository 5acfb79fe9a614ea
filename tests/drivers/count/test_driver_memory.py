"""`driver.memory`: what it takes, what it says, and what it refuses."""

import re

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.ir.base.errors import InputError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        return self.last(x)


def test_nothing_is_computed_and_nothing_changes(threads):
    model = Net()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    calls = []
    model.first.register_forward_hook(lambda *given: calls.append(given[1][0]))
    state = torch.random.get_rng_state()
    x = torch.zeros(16, 8)
    counted = driver.memory(4, x, x)
    assert all(type(each) is not torch.Tensor for each in calls), "with fake tensors only"
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.first.weight.grad is None and driver.get_grad("first.weight") is None
    assert counted.sizes.stages[0].parameters == (8 * 16 + 16) * 4
    assert [row.split()[0] for row in str(counted).splitlines()] == [
        "worker",
        str(counted).splitlines()[1],
        "0",
        "1",
        "no",
        "the",
    ]
    driver.close()


def test_the_example_of_the_pipe_is_the_mini_batch_or_tensors_without_numbers(threads):
    x = torch.zeros(16, 8)
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss(), example_args=(x, x)), threads)
    empty = torch.empty(16, 8, device="meta")
    assert driver.memory(4).peaks == driver.memory(4, x, x).peaks == driver.memory(4, empty, target=empty).peaks
    with pytest.raises(DriverError, match="is on the meta device and holds no numbers; only memory"):
        driver.run(4, empty, empty)
    driver.close()
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    with pytest.raises(InputError, match=r"made without an example.*torch.empty\(32, 8, device='meta'\)"):
        driver.memory(4)
    with pytest.raises(OptimizerError, match="optimizer='adam': give a class"):
        driver.memory(4, x, x, optimizer="adam")
    driver.close()


def test_the_state_of_optimizers(threads):
    x = torch.zeros(16, 8)
    driver = PipelineDriver1F1B(pipeline(Net().to(torch.bfloat16), nn.MSELoss()), threads)
    x = x.to(torch.bfloat16)
    assert "no optimizer yet" in str(driver.memory(2, x, x))
    numbers = [8 * 16 + 16, 16 * 8 + 8]
    found = driver.memory(2, x, x, optimizer=torch.optim.AdamW)
    assert [each.optimizer for each in found.sizes.stages] == [2 * 2 * count + 2 * 4 for count in numbers]
    driver.instantiate_optimizer(
        torch.optim.SGD, lr=0.1, momentum=0.9, master_dtype=torch.float32, param_groups=[{"params": "first.*"}]
    )
    found = driver.memory(2, x, x)
    assert [each.optimizer for each in found.sizes.stages] == [2 * 4 * numbers[0], 0]
    assert "no optimizer yet" not in str(found)
    driver.close()


def test_steps_without_gradients_and_the_largest_micro_batch(threads):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    x = torch.zeros(10, 8)
    with torch.no_grad():
        found = driver.memory(4, x, x)
    assert all(each.peak.gradients == each.peak.kept == 0 for each in found.workers)
    assert driver.memory(4, x, x).sizes.values["tanh"] == 3 * 16 * 4, "10 rows are 3, 3, 2 and 2"
    driver.close()


class DependsOnNumbers(nn.Module):
    def forward(self, x):
        return x[x > 0].sum() * x


def test_a_model_that_fake_tensors_cannot_run_is_refused_and_a_step_can_be_measured(threads):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(8, 8), DependsOnNumbers()

        def forward(self, x):
            x = self.first(x)
            pipe_split()
            return self.odd(x)

    driver = PipelineDriver1F1B(pipeline(Model(), nn.MSELoss()), threads, check=False)
    x = torch.ones(8, 8)
    with pytest.raises(
        DriverError, match=r"(?s)cannot run with them:.*submod_1.*x\[x > 0\].*driver.record\(memory=True\)"
    ):
        driver.memory(2, x, x)
    with driver.record(memory=True) as recording:
        driver.run(2, x, x)
    assert all(max(each.held[0]) > 256 for each in recording.steps[0].noted)
    driver.close()
    single = PipelineDriverFillDrain(pipeline(Net(), nn.MSELoss()), threads, single_loss=True)
    with pytest.raises(DriverError, match=r"cannot count a step with single_loss=True.*record\(memory=True\)"):
        single.memory(2, x, x)
    single.close()


def test_a_batch_norm_that_averages_all_it_has_seen_is_counted_like_another(threads):
    """It asks for the number in `num_batches_tracked`, which fake tensors do not have."""
    found = []
    for momentum in (None, 0.1):
        norm = nn.BatchNorm1d(16, momentum=momentum)
        pipe = pipeline(nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 8)), nn.MSELoss(), split=[1, 2])
        driver, x = PipelineDriver1F1B(pipe, threads), torch.zeros(16, 8)
        found.append(driver.memory(4, x, x).peaks)
        driver.close()
        assert norm.momentum == momentum
    assert found[0] == found[1]


def test_over_time(threads):
    driver = PipelineDriver(pipeline(Net(), nn.MSELoss()), threads, schedule="fill_drain", checkpoint="always")
    x = torch.zeros(16, 8)
    for series, held in zip(driver.memory(4, x, x).series, driver.memory(4, x, x).workers):
        assert max(most for _, most, _ in series) == held.peak.total
        assert series[-1][0] == "end" and "R" in {name[0] for name, _, _ in series}
    driver.close()


def test_the_report_draws_what_was_counted_beside_what_was_measured(threads, tmp_path):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    x = torch.zeros(16, 8)
    counted = driver.memory(4, x, x)
    with driver.record(memory=True) as recording:
        driver.run(4, x, x)
    recording.report(tmp_path / "report.html", memory=counted)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 4
    assert (
        len(re.findall(r"at its peak measured [\d.]+ KiB, counted [\d.]+ KiB \((the same|[+-][\d.]+ %)\)", page)) == 2
    )
    with pytest.raises(DriverError, match=r"memory= was counted for <Program .* chunks=2.* this step ran .* chunks=4"):
        recording.report(tmp_path / "report.html", memory=driver.memory(2, x, x))
    with driver.record() as recording:
        driver.run(4, x, x)
    recording.report(tmp_path / "report.html", memory=counted)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == len(re.findall("<figcaption>.*?: at its peak counted", page)) == 2
    driver.close()


def test_a_storage_at_an_address_that_was_used_before_is_a_new_one():
    """Values seemed to be a part of something that was there, now and then, and did not count."""
    addresses, again = set(), 0
    with LiveStorages() as live:
        for _ in range(20):
            seen = live.seen
            made = torch.ones(8)
            assert live.newest_of([made]) > seen
            again += made.untyped_storage()._cdata in addresses
            addresses.add(made.untyped_storage()._cdata)
            assert live.newest_of([made]) == live.seen
            del made
    assert again
