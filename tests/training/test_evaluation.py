"""Evaluations give what plain PyTorch gives, and leave the training as it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import pippy
from pippy import Pipe, PipelineDriver1F1B, pipe_split
from pippy.drivers.base.errors import DriverError
from pippy.ir.base.errors import ModeError
from tests.training.models import Parts, dataset, shuffled

pytestmark = pytest.mark.usefixtures("in_float64")


class Normed(nn.Module):
    """Something else in each mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(self.norm(self.first(x)), 0.4, self.training)
        pipe_split()
        return self.last(x)


def worst(outputs, item):
    return (outputs - item[1]).abs().max()


def several(outputs, item):
    return {"worst": worst(outputs, item), "rows": len(item[0])}


@pytest.mark.parametrize("metric", [None, worst, several])
def test_means_are_weighted_by_rows(threads, metric):
    """22 rows in items of 4: the last one has 2, fewer than there are micro-batches."""
    parts = Parts(threads, Normed)
    values = pippy.evaluate(parts.driver, shuffled(), chunks=3, metric=metric)
    parts.driver.copy_to(parts.model)
    parts.model.eval()
    data = list(DataLoader(dataset(), batch_size=22))
    with torch.no_grad():
        expected = {"loss": F.mse_loss(parts.model(data[0][0]), data[0][1]).item()}
    assert values["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert list(values) == ["loss", *([] if metric is None else ["worst"]), *(["rows"] if metric is several else [])]
    if metric is several:
        assert values["rows"] == pytest.approx((20 * 4 + 2 * 2) / 22)
    parts.driver.close()


def test_a_pipe_without_a_loss_is_evaluated_by_a_metric(threads):
    driver = PipelineDriver1F1B(Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), threads)
    with pytest.raises(DriverError, match="give metric="):
        pippy.evaluate(driver, [torch.ones(2, 2)], chunks=1)
    values = pippy.evaluate(driver, [torch.ones(2, 2)], chunks=1, metric=lambda outputs, item: len(outputs))
    assert values == {"<lambda>": 2.0}
    driver.close()


def trained(cluster, eval_data, steps=6, **options):
    parts = Parts(cluster, Normed)
    parts.model.norm.eval()  # a frozen one
    torch.manual_seed(4)
    reports = []
    try:
        result = pippy.train(
            parts.driver, shuffled(), parts.optimizer, parts.scheduler, chunks=2, steps=steps, callbacks=reports.append,
            eval_data=eval_data, **options
        )  # fmt: skip
        modes = [module.training for module in parts.driver.pipe.modules()]
        return result, reports, modes, parts.driver.state_dict(), torch.rand(())
    finally:
        parts.driver.close()


def test_an_evaluation_changes_nothing_of_the_training(cluster):
    own = shuffled(generator=torch.Generator().manual_seed(1))
    one, two = trained(cluster, own, eval_every=2, metric=worst), trained(cluster, None)
    assert one[0].losses == two[0].losses and one[2] == two[2] and one[4] == two[4]
    assert one[2].count(False) == 1
    assert all(torch.equal(value, two[3][name]) for name, value in one[3].items())
    assert list(one[0].evaluations) == [2, 4, 6] and not two[0].evaluations
    assert [report.step for report in one[1] if report.evaluation is not None] == [2, 4, 6]
    assert one[1][3].evaluation == one[0].evaluations[4]


def test_without_a_number_of_steps_it_is_evaluated_at_the_end(threads, tmp_path):
    result = trained(threads, shuffled(), steps=3, folder=tmp_path)[0]
    assert list(result.evaluations) == [3]
    assert trained(threads, shuffled(), steps=3, folder=tmp_path)[0].evaluations == result.evaluations


def test_a_model_in_evaluation_mode_as_from_pretrained_gives_it_is_trained_in_training_mode(threads):
    parts = Parts(threads, Normed)
    parts.model.eval()
    pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1)
    assert all(module.training for module in parts.driver.pipe.modules())
    parts.driver.close()


def test_a_scheduler_that_steps_by_a_loss_does_so_by_that_of_an_evaluation(parts):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer, patience=0, threshold=1e9, factor=0.5)
    with pytest.raises(DriverError, match="give eval_data= and eval_every="):
        pippy.train(parts.driver, shuffled(), parts.optimizer, plateau, chunks=2, steps=4)
    reports = []
    pippy.train(
        parts.driver, shuffled(), parts.optimizer, plateau, chunks=2, steps=6, eval_data=shuffled(), eval_every=2,
        callbacks=reports.append,
    )  # fmt: skip
    assert [report.rates for report in reports] == [(1e-2,)] * 2 + [(5e-3,)] * 2 + [(2.5e-3,)] * 2


def test_steps_of_an_evaluation_are_sent_ahead(cluster):
    """Two are under way when the result of the first is waited for; one message to each worker for each step."""
    parts = Parts(cluster)
    items, driver = list(DataLoader(dataset(40), batch_size=4)), parts.driver
    pippy.evaluate(driver, items, chunks=2)
    sent, waited, run_async = [], [], driver.run_async

    class Noted:
        def __init__(self, running):
            self.running, self.rows, self.number = running, running.rows, len(sent)
            sent.append(self)

        def result(self):
            waited.append(len(sent) - self.number)
            return self.running.result()

    before = list(cluster.session.counts)
    driver.run_async = lambda *args, **kwargs: Noted(run_async(*args, **kwargs))
    pippy.evaluate(driver, items, chunks=2)
    del driver.run_async
    assert waited == [3] * 8 + [2, 1]
    assert [after - was for after, was in zip(cluster.session.counts, before)] == [10, 10]
    driver.close()


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            x = x + 1
        x = self.first(x)
        pipe_split()
        return self.last(x)


def test_a_pipe_that_is_not_right_in_evaluation_mode_is_refused_before_the_training(threads):
    parts, reports = Parts(threads, Asks), []
    with pytest.raises(ModeError, match="was not traced in eval mode"):
        pippy.train(
            parts.driver, shuffled(), parts.optimizer, chunks=2, steps=4, eval_data=shuffled(), callbacks=reports.append
        )
    assert not reports
    pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1)
    parts.driver.close()


DATA = [(torch.ones(4, 8, dtype=torch.float64), torch.ones(4, 8, dtype=torch.float64))]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"eval_every": 2}, "give eval_data="),
        ({"metric": worst}, "give eval_data="),
        ({"eval_data": [3], "metric": 3}, "metric=3"),
        ({"eval_data": iter([1]), "eval_every": 2}, "can be read once"),
        ({"eval_data": torch.ones(2), "eval_every": 2}, "one mini-batch alone"),
        ({"eval_data": [], "eval_every": 1}, "gave no mini-batch"),
        ({"eval_data": DATA, "eval_every": 1, "metric": lambda outputs, item: outputs}, "to give a number"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(parts, options, says):
    with pytest.raises(DriverError, match=says):
        pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=2, **options)
