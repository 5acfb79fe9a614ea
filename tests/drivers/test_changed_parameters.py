"""A parameter that forward changes, as the averaged teacher of MoCo and BYOL: as in the plain model, or refused by name."""

import copy

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError
from pippy.ir.base.errors import SharedParameterError
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(2) as cluster:
        yield cluster


def by_data(teacher, student):
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)


@torch.no_grad()
def in_place(teacher, student):
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.mul_(0.9).add_(its, alpha=0.1)


@torch.no_grad()
def of_lists(teacher, student):
    torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 0.1)


UPDATES = {"data": by_data, "in place": in_place, "of lists": of_lists, "none": lambda teacher, student: None}


class Averaged(nn.Module):
    def __init__(self, update, late=False):
        super().__init__()
        self.update, self.late = update, late
        self.student, self.head, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        UPDATES[self.update](self.teacher, self.student)
        y, z = self.student(x), None if self.late else self.teacher(x)
        pipe_split()
        z = self.teacher(x) if self.late else z
        return (self.head(y.relu()) - z).square().mean()


@pytest.mark.parametrize("update", ["data", "in place", "of lists"])
def test_an_averaged_teacher(update, threads):
    model, x = Averaged(update), torch.randn(8, 4)
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    pipe = pipeline(model, output_loss_value_spec=True, example_args=(x[:2],))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    driver = PipelineDriver1F1B(pipe, threads)
    for _ in range(2):
        plain.zero_grad(), driver.zero_grad()
        expected = plain(x)
        expected.backward()
        torch.testing.assert_close(driver.run(1, x), expected.detach())
        torch.testing.assert_close(driver.get_grad("head.weight"), plain.head.weight.grad)
    torch.testing.assert_close(driver.state_dict(), plain.state_dict())
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(DriverError, match=r"(?s)'teacher.weight', 'teacher.bias'.*chunks=1"),
        ):
            driver.run(2, x)
    torch.testing.assert_close(driver.state_dict(), plain.state_dict())


def test_the_change_may_be_made_between_steps(threads):
    """As the errors say, those of several micro-batches and of a teacher in another stage than its student."""
    with pytest.raises(SharedParameterError, match=r"(?s)'teacher.weight' is changed in place.*driver.load_state_dict"):
        pipeline(Averaged("in place", late=True), output_loss_value_spec=True)
    model, plain, x = Averaged("none", late=True), Averaged("in place", late=True), torch.randn(8, 4)
    plain.load_state_dict(model.state_dict())
    driver = PipelineDriver1F1B(pipeline(model, output_loss_value_spec=True), threads)
    optimizer, own = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        driver.copy_to(model)
        in_place(model.teacher, model.student)
        driver.load_state_dict(model.state_dict())
        optimizer.zero_grad(), own.zero_grad()
        expected = plain(x)
        expected.backward()
        torch.testing.assert_close(driver.run(2, x), expected.detach())
        optimizer.step(), own.step()
    torch.testing.assert_close(driver.state_dict(), plain.state_dict())
