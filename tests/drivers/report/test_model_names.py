"""The names that a report calls stages and values by."""

import torch
from torch import nn

from pippy import Pipe, pipe_split, pipeline
from pippy.drivers.report.model_names import model_names
from pippy.ir.pipe import compiled_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.blocks, self.head, self.cut = nn.ModuleList(Block() for _ in range(6)), nn.Linear(4, 2), cut

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number == self.cut:
                pipe_split()
            x = block(x)
        return self.head(x)


def test_a_stage_is_called_by_the_outermost_modules_that_are_all_in_it():
    names = model_names(compiled_of(pipeline(Model(4), nn.MSELoss())))
    assert names.stages == ("blocks.0 to blocks.3", "blocks.4, blocks.5, head")
    assert names.values["add_3"] == "blocks.3"


class Between(Block):
    def forward(self, x):
        up = self.up(x)
        pipe_split()
        return x + self.down(torch.relu(up))


def test_a_module_that_is_cut_is_named_by_its_parts():
    model = nn.Sequential(Between(), Block())
    names = model_names(compiled_of(pipeline(model, nn.MSELoss())))
    assert names.stages == ("0.up", "0, 0.down, 1")
    assert names.value("_0_up") == "_0_up (0.up)"
    assert names.value("_0_up_grad_from_submod_1") == "gradient of _0_up (0.up)"


def test_layers_of_a_sequential_are_called_by_their_numbers():
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))))
    assert model_names(compiled_of(pipe)).stage(1) == "stage 1 (module 1)"
