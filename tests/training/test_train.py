"""The loop trains what a loop of plain PyTorch trains, step by step."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pippy
from pippy import PipelineDriver1F1B
from pippy.drivers.base.errors import CheckError, DriverError, MicrobatchError
from pippy.ir.base.errors import PippyWarning
from tests.drivers.models import TiedLanguage, cross_entropy
from tests.training.models import Parts, Plain, groups_of, shuffled

pytestmark = pytest.mark.usefixtures("in_float64")


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accumulate, max_norm", [(1, None), (1, 0.1), (2, None), (4, 0.1)])
def test_it_trains_what_plain_pytorch_trains(parts, accumulate, max_norm):
    """22 rows in items of 4: the last item has 2 rows, fewer than there are micro-batches, and the last group is shorter."""
    plain = Plain()
    torch.manual_seed(7)
    expected = plain.train(groups_of(shuffled(), accumulate, 3), max_norm)
    torch.manual_seed(7)
    reports = []
    result = pippy.train(
        parts.driver, shuffled(), parts.optimizer, parts.scheduler, chunks=3, epochs=3, accumulate=accumulate,
        max_norm=max_norm, callbacks=reports.append,
    )  # fmt: skip
    close(torch.tensor(result.losses), torch.tensor(expected))
    close(parts.driver.state_dict(), dict(plain.model.state_dict()))
    assert result.steps == len(expected) and result.epochs == 3
    assert [report.loss for report in reports] == result.losses
    assert [report.step for report in reports] == list(range(1, len(expected) + 1))
    assert sum(report.rows for report in reports) == 66
    assert (reports[0].norm is None) == (max_norm is None)


def test_items_of_other_lengths_weigh_as_their_tokens_do(threads):
    """Each item has a length of its own, and targets that do not count; the mean is over the targets of all."""
    numbers = torch.Generator().manual_seed(3)
    items = []
    for length, ignored in ((5, 3), (3, 0), (6, 11)):
        x, target = (torch.randint(13, (4, length), generator=numbers) for _ in range(2))
        target.flatten()[:ignored] = -100
        items.append((x, target))
    torch.manual_seed(1)
    model = TiedLanguage()
    driver = PipelineDriver1F1B(
        pippy.pipeline(model, cross_entropy), threads, loss_reduction=lambda target: (target != -100).sum()
    )
    plain = copy.deepcopy(model)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    result = pippy.train(driver, items, optimizer, chunks=2, epochs=1, accumulate=3)
    outputs = torch.cat([plain(x).flatten(0, 1) for x, _ in items])
    loss = F.cross_entropy(outputs, torch.cat([target.flatten() for _, target in items]))
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    close(torch.tensor(result.losses), loss.detach()[None])
    close(driver.state_dict(), dict(plain.state_dict()))
    driver.close()


class Asked(nn.Module):
    """Takes arguments by name, and gives its loss beside an output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, target=None, scale=1.0):
        x = torch.tanh(self.first(x)) * scale
        pippy.pipe_split()
        output = self.last(x)
        return {"loss": F.mse_loss(output, target), "output": output}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dicts_are_arguments_by_name_and_the_output_stays_where_it_is(threads, accumulate):
    torch.manual_seed(2)
    model = Asked()
    items = [{"x": torch.randn(4, 3), "target": torch.randn(4, 1), "scale": 0.5 + at} for at in range(2)]
    pipe = pippy.pipeline(model, example_kwargs=items[0], output_loss_value_spec={"loss": True, "output": False})
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
    model = copy.deepcopy(model)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    result = pippy.train(driver, items, optimizer, chunks=2, epochs=1, accumulate=accumulate)
    expected = []
    for at in range(0, 2, accumulate):
        plain.zero_grad()
        loss = sum(model(**item)["loss"] for item in items[at : at + accumulate]) / accumulate
        loss.backward()
        plain.step()
        expected.append(loss.item())
    close(torch.tensor(result.losses), torch.tensor(expected))
    close(driver.state_dict(), dict(model.state_dict()))
    driver.close()


@pytest.mark.parametrize("max_norm, commands", [(None, 2), (1.0, 4)])
def test_the_next_items_are_read_while_a_step_is_under_way_and_a_step_is_two_commands(cluster, max_norm, commands):
    """As in a loop by hand: the step, the norm and the scaling, the optimizer; and the data is there when it is needed."""
    parts, order, counts = Parts(cluster), [], []

    def data():
        for item in shuffled(200):
            order.append("read")
            yield item

    run_async = parts.driver.run_async
    parts.driver.run_async = lambda *args, **kwargs: order.append("sent") or run_async(*args, **kwargs)
    pippy.train(
        parts.driver, data(), parts.optimizer, chunks=2, steps=6, max_norm=max_norm,
        callbacks=lambda report: (order.append("done"), counts.append(list(cluster.session.counts))),
    )  # fmt: skip
    assert order == ["read", *["sent", "read", "done"] * 5, "sent", "done"]
    assert [after - was for was, after in zip(counts[-3], counts[-1])] == [2 * commands] * 2
    del parts.driver.run_async
    parts.driver.close()


def test_a_scaler_and_several_optimizers_step_as_by_hand(threads):
    def made():
        parts = Parts(threads)
        names = [name for name, _ in parts.model.named_parameters()]
        optimizers = [
            parts.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=[{"params": own}])
            for own in (names[:2], names[2:])
        ]
        scaler = parts.driver.instantiate_grad_scaler(init_scale=2.0**10, growth_interval=2)
        return parts.driver, optimizers, scaler

    items = list(shuffled())
    driver, optimizers, scaler = made()
    expected = []
    for item in items:
        expected.append(driver.run(2, *item).item())
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        driver.zero_grad()
    state, scale = driver.state_dict(), scaler.get_scale()
    driver.close()
    driver, optimizers, scaler = made()
    with pytest.raises(DriverError, match="scaler=scaler"):
        pippy.train(driver, items, optimizers, chunks=2, epochs=1)
    result = pippy.train(driver, items, optimizers, chunks=2, epochs=1, scaler=scaler)
    assert result.losses == expected and scaler.get_scale() == scale
    assert all(torch.equal(value, state[name]) for name, value in driver.state_dict().items())
    driver.close()


def test_an_iterator_that_ends_early_is_said(parts):
    with pytest.warns(PippyWarning, match="data ended after step 6, before the training did, and cannot be read again"):
        assert pippy.train(parts.driver, iter(list(shuffled())), parts.optimizer, chunks=2, steps=9).steps == 6


REFUSED = {
    "the length of the training is missing": {"steps": None},
    "steps=0": {"steps": 0},
    "epochs=1.5": {"epochs": 1.5},
    "accumulate=None": {"accumulate": None},
    "chunks=0": {"chunks": 0},
    "max_norm=-1": {"max_norm": -1},
    "clip_value=True": {"clip_value": True},
    "callbacks=7": {"callbacks": [7]},
    "optimizer= is a SGD": {"optimizer": "plain"},
    "optimizer= is an empty list": {"optimizer": []},
    "scheduler=3": {"scheduler": 3},
    "scaler=7": {"scaler": 7},
    "save_every= is an option of checkpoints": {"save_every": 3},
    "save_minutes='1'": {"save_minutes": "1", "folder": "run"},
    "resume=None": {"resume": None, "folder": "run"},
    "a part of its own by that name": {"also": {"optimizer": 1}, "folder": "run"},
    "a state_dict": {"also": {"average": 1}, "folder": "run"},
    "one mini-batch alone": {"data": {"x": 1}},
    "has no end": {"data": "repeated", "epochs": 1, "steps": None},
}


def test_what_cannot_be_is_refused_before_anything_is_sent(threads, parts):
    before = list(threads.session.counts)
    for says, options in REFUSED.items():
        given = {"data": shuffled(), "optimizer": parts.optimizer, "chunks": 2, "steps": 2, **options}
        if given["optimizer"] == "plain":
            given["optimizer"] = torch.optim.SGD(parts.model.parameters())
        if given["data"] == "repeated":
            given["data"] = pippy.RepeatingLoader([1])
        with pytest.raises(DriverError, match=re.escape(says)):
            pippy.train(parts.driver, **given)
    assert threads.session.counts == before


def test_what_trains_nothing_is_refused(parts):
    with pytest.raises(DriverError, match="this is a Chain"):
        pippy.train(parts.model, shuffled(), parts.optimizer, chunks=2, steps=1)
    with torch.no_grad(), pytest.raises(DriverError, match=r"inside of torch.no_grad\(\)"):
        pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1)
    with pytest.raises(MicrobatchError, match=r"data returned 7, .* write a collate_fn"):
        pippy.train(parts.driver, [7], parts.optimizer, chunks=2, steps=1)


def test_check_before_the_first_step(threads):
    """The same training, to the bit; a model that mixes rows is an error with the table, and nothing is trained."""
    trained = []
    for check in (False, True):
        parts = Parts(threads)
        torch.manual_seed(7)
        pippy.train(
            parts.driver, shuffled(), parts.optimizer, chunks=3, epochs=1, accumulate=2, check=check, progress=False
        )
        trained.append(parts.driver.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(*(state.values() for state in trained)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0))
    driver = PipelineDriver1F1B(pippy.Pipe.from_sequential(model, nn.MSELoss()), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    data = [(torch.randn(4, 4), torch.randn(4, 4))]
    with pytest.raises(CheckError, match=r"begins in submod_1 on worker1: .* it mixes rows") as caught:
        pippy.train(driver, data, optimizer, chunks=2, steps=1, check=True)
    assert not caught.value.report
    assert torch.equal(driver.state_dict()["0.weight"], model[0].weight)
