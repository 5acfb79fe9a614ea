"""What may be around the loop: replicas, losses that are no numbers, data of all kinds, a loop by hand to compare with."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import pippy
from pippy import IndexLoader
from pippy.drivers.base.errors import DriverError
from tests.training.models import Parts, Plain, dataset, groups_of, shuffled

pytestmark = pytest.mark.usefixtures("in_float64")


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def test_with_replicas_it_trains_what_plain_pytorch_trains(threads, tmp_path):
    """Two pipelines of one stage; and a pipeline of two stages goes on where they were."""
    plain = Plain(layers())
    torch.manual_seed(7)
    expected = plain.train(groups_of(shuffled(), 2, 2), max_norm=0.1)
    for steps, options in ((3, {"replicas": 2}), (6, {})):
        stages = 2 // options.get("replicas", 1)
        pipe = pippy.pipeline(layers(), nn.MSELoss(), split="parameters", num_stages=stages)
        driver = pippy.PipelineDriver1F1B(pipe, threads, **options)
        optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        torch.manual_seed(7)
        result = pippy.train(
            driver, shuffled(), optimizer, scheduler, chunks=2, steps=steps, accumulate=2, max_norm=0.1, folder=tmp_path
        )
        torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected[:steps]), rtol=1e-12, atol=1e-12)
        assert result.resumed_at == steps - 3
        state = driver.state_dict()
        driver.close()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_callbacks_read_the_numbers_of_the_workers(threads):
    """An average of the weights, and a norm for a log, are those of plain PyTorch after each step."""

    def averages(model):
        seen, average = [], [each.detach().clone() for each in model.parameters()]

        def note(report=None):
            with torch.no_grad():
                for each, parameter in zip(average, model.parameters()):
                    each.mul_(0.9).add_(parameter, alpha=0.1)
            seen.append([*(each.sum() for each in average), model.layers[0].weight.detach().norm()])

        return seen, note

    plain, parts = Plain(), Parts(threads)
    (expected, note), (seen, callback) = averages(plain.model), averages(parts.model)
    for items in groups_of(dataset_items(), 1, 1):
        plain.train([items])
        note()
    pippy.train(parts.driver, dataset_items(), parts.optimizer, parts.scheduler, chunks=2, epochs=1, callbacks=callback)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-12, atol=1e-12)
    parts.driver.close()


def dataset_items():
    x, target = dataset(12).tensors
    return list(zip(x.split(4), target.split(4)))


def test_a_loss_that_is_no_number_is_noted_and_saved(threads, tmp_path):
    """As in a loop of plain PyTorch, the training goes on; a callback may stop it."""
    parts = Parts(threads)
    items = [(x, target * (math.nan if at == 1 else 1)) for at, (x, target) in enumerate(shuffled())]
    result = pippy.train(parts.driver, items, parts.optimizer, chunks=2, epochs=1, folder=tmp_path, save_every=2)
    assert [loss == loss for loss in result.losses] == [True, *[False] * 5]
    again = Parts(threads)
    found = pippy.train(again.driver, items, again.optimizer, chunks=2, epochs=1, folder=tmp_path)
    torch.testing.assert_close(found.losses, result.losses, equal_nan=True)
    stopped = Parts(threads)
    result = pippy.train(
        stopped.driver, items, stopped.optimizer, chunks=2, epochs=1,
        callbacks=lambda report: report.stop() if report.loss != report.loss else None,
    )  # fmt: skip
    assert result.steps == 2
    for each in (parts, again, stopped):
        each.driver.close()


class Endless:
    """Has no length, and can be read again and again."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        numbers = torch.Generator().manual_seed(2)
        for _ in range(self.count):
            yield torch.randn(4, 8, generator=numbers), torch.randn(4, 8, generator=numbers)


def test_data_without_a_length_and_empty_data(threads, parts, capsys):
    result = pippy.train(parts.driver, Endless(3), parts.optimizer, chunks=2, epochs=2, accumulate=2)
    assert (result.steps, result.epochs) == (4, 2)
    assert "step 4: loss" in capsys.readouterr().err
    before = list(threads.session.counts)
    for empty in (Endless(0), iter([]), []):
        with pytest.raises(DriverError, match="data gave no mini-batch in epoch 0; is it empty"):
            pippy.train(parts.driver, empty, parts.optimizer, chunks=2, steps=2)
    assert threads.session.counts == before


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_has_no_more_messages_than_one_of_a_loop_by_hand(threads, parts, max_norm):
    data, counts = list(shuffled(200)), []

    def note(report=None):
        counts.append(list(threads.session.counts))

    pippy.train(
        parts.driver, data, parts.optimizer, parts.scheduler, chunks=2, steps=6, max_norm=max_norm, callbacks=note
    )
    for item in data[:6]:
        loss = parts.driver.run(2, *item)
        if max_norm is not None:
            parts.driver.clip_grad_norm_(max_norm)
        parts.optimizer.step()
        parts.scheduler.step()
        parts.driver.zero_grad()
        loss.item()
        note()
    steps = [[after - was for was, after in zip(*pair)] for pair in pairwise(counts)]
    assert steps[2:5] == steps[-3:] == [steps[-1]] * 3


def test_an_index_loader_goes_on_where_it_was(threads, tmp_path):
    def trained(steps, folder):
        parts = Parts(threads)
        loader = IndexLoader(dataset(), batch_size=4, shuffle=True, seed=3)
        try:
            return pippy.train(parts.driver, loader, parts.optimizer, chunks=2, steps=steps, folder=folder)
        finally:
            parts.driver.close()

    expected = trained(8, None)
    for steps in (2, 6, 8):
        found = trained(steps, tmp_path)
    assert found.losses == expected.losses and found.resumed_at == 6
