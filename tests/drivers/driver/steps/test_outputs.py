"""What a step gives: outputs, output specs, and values of the user's own."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Max, Mean, Min, PipelineDriver1F1B, Replicate, Sum, TensorChunkSpec, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.specs import ChunkSpec
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Net(nn.Module):
    """Returns its loss, and something else."""

    def __init__(self, other):
        super().__init__()
        self.a, self.b, self.other = nn.Linear(4, 6), nn.Linear(6, 3), other

    def forward(self, x, t):
        x = torch.relu(self.a(x))
        pipe_split()
        y = self.b(x)
        return F.cross_entropy(y, t), self.other(y, t, self.b.weight)


OTHERS = {
    "count": (lambda y, t, w: (y.argmax(1) == t).sum(), Sum()),
    "rows": (lambda y, t, w: y.shape[0], Sum()),
    "largest": (lambda y, t, w: y.max(), Max()),
    "smallest of each": (lambda y, t, w: y.amin(0), Min()),
    "mean": (lambda y, t, w: {"accuracy": (y.argmax(1) == t).double().mean()}, {"accuracy": Mean()}),
    "weight": (lambda y, t, w: w * 2, Replicate()),
    "rows in front": (lambda y, t, w: (y, y.sum(1)), None),
    "a constant": (lambda y, t, w: (2, "text", None), None),
    "the labels": (lambda y, t, w: t, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_returned_beside_the_loss(threads, name):
    other, spec = OTHERS[name]
    model, x = Net(other), torch.randn(8, 4)
    labels = torch.randint(3, (8,))
    pipe = pipeline(copy.deepcopy(model), output_loss_value_spec=(True, False))
    if spec is not None:
        driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
        with pytest.raises(MicrobatchError, match=r"does not know how to merge") as error:
            driver.run(4, x, labels)
        assert all(gradient is None for gradient in driver.gradients().values()), "nothing is adopted"
        (advised,) = re.findall(r"output_spec=(.*)", str(error.value))
        advised = eval(advised)
        assert advised == [None, Sum()] or advised == [None, {"accuracy": Sum()}]
        PipelineDriver1F1B(pipe, threads, loss_reduction="mean", output_spec=advised).run(4, x, labels)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean", output_spec=(None, spec))
    mine, plain = driver.run(4, x, labels), model(x, labels)
    torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12, check_dtype=False) if name != "a constant" else None
    assert name != "a constant" or mine[1] == plain[1]
    assert driver.get_grad("a.weight") is not None
    torch.testing.assert_close(driver.run(1, x, labels)[0], plain[0])


def test_an_input_that_is_not_cut_is_returned_once(threads):
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, scale):
            x = self.a(x)
            pipe_split()
            return self.b(x) * scale, scale

    driver = PipelineDriver1F1B(pipeline(Passing()), threads)
    with torch.no_grad():
        assert driver.run(3, torch.randn(6, 4), torch.tensor(2.0))[1] == 2


class Returning(nn.Module):
    """Returns what a function makes of a value and the number of its rows."""

    def __init__(self, returned):
        super().__init__()
        self.a, self.norm, self.b, self.returned = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), returned

    def forward(self, x):
        x, rows = self.norm(torch.relu(self.a(x))), x.shape[0]
        pipe_split()
        return self.returned(self.b(x), rows)


BY_CHANCE = {
    "rows by rows": (lambda y, rows: y @ y.t(), (8, 8)),
    "a number for each feature": (lambda y, rows: y.mean(0), (4,)),
    "a number in brackets": (lambda y, rows: y.sum().reshape(1), (1,)),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", BY_CHANCE)
def test_as_many_rows_by_chance(threads, name, trains):
    returned, shape = BY_CHANCE[name]
    both = lambda y, rows: {"loss": y.square().mean(), "value": returned(y, rows)}  # noqa: E731
    model = Returning(both if trains else returned).train(trains)
    if shape == (1,):
        model.eval()  # of one row there is no batch norm
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(8, 4)
    chunks = 8 if shape == (1,) else 2
    driver = PipelineDriver1F1B(pipe, threads)
    for _ in range(2):  # the next step is checked too
        with pytest.raises(MicrobatchError, match=r"the row count only happens to match.*does not know how to merge"):
            driver.run(chunks, x)


ROWS = {
    "rows": lambda y, rows: (y, y.sum(1), {"none": None}),
    "rows that an earlier stage counted": lambda y, rows: y.view(rows, 2, 2),
    "several values for each row": lambda y, rows: y.reshape(-1, 2).reshape(-1, 2, 2),
    "the rows of all": lambda y, rows: y - y.mean(0),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_seen_as_such(threads, name):
    model = Returning(ROWS[name]).eval()
    driver, x = PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads), torch.randn(8, 4)
    mine, plain = driver.run(2, x), model(x)
    if name != "the rows of all":
        torch.testing.assert_close(mine, plain)


RUNS: list[int] = []


def note_run(*_):
    RUNS.append(1)


def test_only_first_steps_run_a_stage_once_more(threads):
    RUNS.clear()
    model = Returning(lambda y, rows: y)
    pipe = pipeline(model, nn.MSELoss())
    driver, x = PipelineDriver1F1B(pipe, threads, check=False), torch.randn(8, 4)
    for state in [each for worker in threads.engine.workers for each in worker.drivers.values()]:
        for module in state.modules.values():
            module.register_forward_hook(note_run)
    driver.run(2, x, x)
    once = len(RUNS)
    driver.run(2, x, x, outputs=True)
    driver.run(2, x, x, outputs=True)
    assert len(RUNS) == 3 * once + 1


TRACED = {
    "rows in the second dimension, and in front again": lambda y, rows: y.t().contiguous().t(),
    "rows in the second dimension": lambda y, rows: y.t(),
}


@pytest.mark.parametrize("shape", [(8, 4), (4, 8)], ids=["8 rows", "4 rows"])
@pytest.mark.parametrize("name", TRACED)
def test_where_the_rows_of_an_output_are_is_seen_while_it_is_traced(threads, name, shape):
    """Values go from stage to stage with their rows in the second dimension, as those of XLNet do."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(shape[1], 4), nn.Linear(4, 2)

        def forward(self, x):
            x, rows = self.a(x).unsqueeze(0).transpose(0, 1), x.shape[0]
            x = x.transpose(0, 1)
            pipe_split()
            return TRACED[name](self.b(x)[0], rows)

    model, x = Turned(), torch.randn(*shape)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), example_args=(x[:2],)), threads)
    torch.testing.assert_close(driver.run(2, x), model(x))


# A driver's output_spec for a model that returns its loss beside other things.


class ReturnsLoss(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.a, self.b, self.make = nn.Linear(8, 8), nn.Linear(8, 8), make

    def forward(self, x, target):
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        return self.make(F.mse_loss(x, target), x)


MAKERS = {
    "tuple": lambda loss, y: (loss, y),
    "dict": lambda loss, y: {"loss": loss, "y": y},
    "nested": lambda loss, y: [{"loss": loss}, y],
}
PLACES = {
    "tuple": lambda loss, y: (loss, y),
    "dict": lambda loss, y: {"y": y} if loss is None else {"loss": loss, "y": y},
    "nested": lambda loss, y: [None if loss is None else {"loss": loss}, y],
}
FITTING = [TensorChunkSpec(0), 0, torch.cat, None]


def parts(output):
    if isinstance(output, dict):
        return output["loss"], output["y"]
    return (output[0]["loss"] if isinstance(output[0], dict) else output[0]), output[1]


def made(threads, kind):
    model = ReturnsLoss(MAKERS[kind])
    mark = {"tuple": (True, False), "dict": {"loss": True, "y": False}, "nested": [{"loss": True}, False]}[kind]
    return model, pipeline(model, output_loss_value_spec=mark)


@pytest.mark.parametrize("kind", MAKERS)
def test_specs_for_the_rest(threads, kind):
    model, pipe = made(threads, kind)
    x, target = torch.randn(7, 8), torch.randn(7, 8)
    loss, y = parts(model(x, target))
    for spec in [*(PLACES[kind](None, each) for each in FITTING), TensorChunkSpec(0), 0, None]:
        driver = PipelineDriver1F1B(pipe, threads, output_spec=spec)
        for found, expected in zip(parts(driver.run(3, x, target)), (loss, y)):
            torch.testing.assert_close(found, expected)
        driver.close()
    driver = PipelineDriver1F1B(pipe, threads, output_spec=Sum())  # for all but the loss
    same = x[:2].repeat(3, 1), target[:2].repeat(3, 1)
    found = parts(driver.run(3, *same))
    torch.testing.assert_close(found[0], parts(model(*same))[0])
    torch.testing.assert_close(found[1], 3 * parts(model(*same))[1][:2])


class First(ChunkSpec):
    def merge(self, values):
        return values[0]


WRONG = [Sum(), Mean(), Replicate(), 0, torch.stack, First()]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_spec_for_the_loss_is_refused_before_anything_is_sent(threads, kind):
    _, pipe = made(threads, kind)
    specs = [PLACES[kind](wrong, 0) for wrong in WRONG] + [torch.stack, First()]
    for spec in specs:
        driver = PipelineDriver1F1B(pipe, threads, output_spec=spec)
        before = list(threads.session.counts)
        with pytest.raises(MicrobatchError, match=r"the loss, which is always merged by its weights.*None"):
            driver.run(3, torch.randn(7, 8), torch.randn(7, 8))
        assert threads.session.counts == before
        driver.close()


def test_a_spec_of_a_pipe_with_a_loss_function_is_for_the_outputs(threads):
    """Not for the loss, which is put together by its weights."""
    model, x, target = Chain(2), torch.randn(7, 8), torch.randn(7, 8)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads, output_spec=Stacked())
    expected = F.mse_loss(model(x), target)
    torch.testing.assert_close(driver.run(3, x, target), expected.detach())
    loss, outputs = driver.run(3, x, target, outputs=True)
    torch.testing.assert_close(loss, expected.detach())
    assert [len(each) for each in outputs] == [3, 2, 2]


class Stacked(ChunkSpec):
    def merge(self, values):
        return values
