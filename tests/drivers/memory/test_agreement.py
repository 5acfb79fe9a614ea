"""What is counted before anything runs is what workers hold: live storages in a recorded step, to 5 %."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver, pipe_split, pipeline

STAGES = 4


class InStages(nn.Module):
    """Modules of which each is a stage; ``last`` is in the last one."""

    def __init__(self, modules, last=None):
        super().__init__()
        self.parts, self.last = nn.ModuleList(modules), last or nn.Identity()

    def forward(self, x):
        for number, part in enumerate(self.parts):
            if number:
                pipe_split()
            x = part(x)
            x = x[0] if isinstance(part, nn.LSTM) else x
        return self.last(x)


def linear(dropout):
    parts = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 32)) for _ in range(STAGES)]
    return InStages(parts), torch.randn(16, 32), torch.randn(16, 32), F.mse_loss


def convolutions(dropout):
    channels = [3, 8, 8, 8, 8]
    parts = [
        nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(), nn.Dropout(dropout))
        for one, other in pairwise(channels)
    ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 4))
    return InStages(parts, head), torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,)), F.cross_entropy


def attention(dropout):
    parts = [nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(STAGES)]
    parts[0] = nn.Sequential(nn.Embedding(50, 16), parts[0])
    return InStages(parts), torch.randint(0, 50, (8, 12)), torch.randn(8, 12, 16), F.smooth_l1_loss


def recurrent(dropout):
    parts = [nn.LSTM(16, 16, batch_first=True) for _ in range(STAGES)]
    return InStages(parts), torch.randn(8, 6, 16), torch.randn(8, 6, 16), F.mse_loss


def errors(driver, chunks, *args, optimizer_class=torch.optim.AdamW, **kwargs):
    """By which share the counted peak of each worker is off, in a step after an optimizer's."""
    optimizer = driver.instantiate_optimizer(optimizer_class, lr=0.01)
    for _ in range(2):  # the first step looks at more than others do
        driver.run(chunks, *args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
    with driver.record(memory=True) as recording:
        driver.run(chunks, *args, **kwargs)
    counted = driver.memory(chunks, *args, **kwargs)
    driver.close()
    measured = [max(each.held[0]) for each in recording.steps[-1].noted]
    return [one / other - 1 for one, other in zip(counted.peaks, measured, strict=True)]


@pytest.mark.parametrize(
    ("model", "schedule", "checkpoint"),
    [
        (linear, "fill_drain", "never"),
        (linear, "1f1b", "always"),
        (linear, "interleaved_1f1b", "never"),
        (convolutions, "1f1b", "never"),
        (convolutions, "zb_h1", "except_last"),
        (convolutions, "interleaved_1f1b", {1: "always", 2: "always"}),
        (attention, "fill_drain", "always"),
        (attention, "zb_h1", "never"),
        (attention, "interleaved_1f1b", "always"),
        (recurrent, "1f1b", "except_last"),
        (recurrent, "fill_drain", "never"),
    ],
)
def test_counted_and_measured_peaks_agree(threads, model, schedule, checkpoint):
    """Workers that are threads share their random numbers, so there is no dropout where forwards are computed again."""
    torch.manual_seed(0)
    module, x, target, loss_fn = model(0.1 if checkpoint == "never" else 0.0)
    workers = 2 if schedule == "interleaved_1f1b" else STAGES
    driver = PipelineDriver(
        pipeline(module, loss_fn), threads, schedule=schedule, world_size=workers, checkpoint=checkpoint
    )
    assert max(map(abs, errors(driver, 4, x, target))) < 0.05
