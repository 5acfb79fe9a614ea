"""What errors about rows and about changes in forward say to do gives the plain model's numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.errors import DriverError, MicrobatchError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Bag(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(20, 4, padding_idx=padding_idx), nn.Linear(4, 3)

    def forward(self, text, offsets=None):
        x = self.bag(text, offsets)
        pipe_split()
        return self.last(x)


def test_a_flat_text_with_offsets(threads):
    """A Replicate() was advised for the text."""
    text, offsets, target = torch.randint(1, 20, (12,)), torch.tensor([0, 3, 5, 9]), torch.tensor([0, 1, 2, 0])
    plain = Bag()
    pipe = pipeline(copy.deepcopy(plain), nn.CrossEntropyLoss(), example_args=(text, offsets, target))
    with pytest.raises(MicrobatchError, match="a tensor of two dimensions, padded") as caught:
        PipelineDriver1F1B(pipe, threads).run(2, text, offsets, target)
    assert "Replicate()" not in str(caught.value)
    padded = nn.utils.rnn.pad_sequence(text.tensor_split(offsets[1:]), batch_first=True, padding_value=0)
    model = Bag(padding_idx=0)
    model.load_state_dict(plain.state_dict())
    F.cross_entropy(plain(text, offsets), target).backward()
    driver = PipelineDriver1F1B(pipeline(model, nn.CrossEntropyLoss(), example_args=(padded, target)), threads)
    driver.run(2, padded, target)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(driver.get_grad(name), parameter.grad)


class Taught(nn.Module):
    def __init__(self, updates):
        super().__init__()
        self.student, self.last, self.updates = nn.Linear(4, 4), nn.Linear(4, 4), updates
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def update(self):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)

    def forward(self, x):
        if self.updates:
            self.update()
        with torch.no_grad():
            aim = self.teacher(x)
        x = self.student(x) - aim
        pipe_split()
        return self.last(x)


def test_an_averaged_teacher(threads):
    """The change is made between steps, as the error says."""
    plain, model = Taught(True), Taught(False)
    model.load_state_dict(plain.state_dict())
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    with pytest.raises(DriverError, match=r"driver.copy_to\(model\), the change, driver.load_state_dict\(model.state"):
        PipelineDriver1F1B(pipeline(copy.deepcopy(plain), nn.MSELoss()), threads).run(2, x, target)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    optimizer, expected = (
        driver.instantiate_optimizer(torch.optim.SGD, lr=0.1),
        torch.optim.SGD(plain.parameters(), 0.1),
    )
    for _ in range(3):
        expected.zero_grad()
        nn.functional.mse_loss(plain(x), target).backward()
        expected.step()
        driver.copy_to(model)
        model.update()
        driver.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        driver.run(2, x, target)
        optimizer.step()
    for name, value in driver.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
