"""Losses that compare the rows of a batch: CLIP, SimCLR, InfoNCE, FixMatch. Micro-batches cannot see each other, so a step in
micro-batches is refused, and what the error advises gives the plain model's numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from tests.drivers.thread_cluster import thread_cluster
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways, in_micro_batches

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
LABELLED = 3


class CLIP(nn.Module):
    """An encoder of images and one of texts, which are stages; the temperature is a parameter."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.text, self.mix = nn.Embedding(9, 8), nn.Linear(8, 4)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        pipe_split()
        text = F.normalize(self.mix(self.text(text).mean(1)), dim=-1)
        return image, text, self.logit_scale.exp()


def clip_loss(outputs, target):
    image, text, scale = outputs
    logits = scale * image @ text.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class CLIPWithLogits(CLIP):
    """Returns the similarities of all images and texts, as that of Hugging Face."""

    def forward(self, image, text):
        image, text, scale = super().forward(image, text)
        return scale * image @ text.t()


def of_logits(logits, target):
    labels = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Encoder(nn.Module):
    """What two views of an image are encoded with."""

    def __init__(self):
        super().__init__()
        self.encoder, self.projection = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, first, second):
        views = torch.relu(self.encoder(torch.stack([first, second], 1)))
        pipe_split()
        return F.normalize(self.projection(views), dim=-1)


def nt_xent(views, target):
    """SimCLR's: each view is to find the other one among all."""
    z = torch.cat([views[:, 0], views[:, 1]])
    similar = (z @ z.t() / 0.5).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


def info_nce(views, target):
    logits = views[:, 0] @ views[:, 1].t() / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


def supervised(views, target):
    """Rows of the same class are positives."""
    z = views[:, 0]
    same = (target[:, None] == target[None]).double().fill_diagonal_(0)
    log_probability = (z @ z.t() / 0.5).fill_diagonal_(-1e9).log_softmax(1)
    return -(same * log_probability).sum(1).div(same.sum(1).clamp(min=1)).mean()


class BatchStatistics(nn.Module):
    """VICReg's: the variance of each feature over the batch, and how features go together."""

    def forward(self, views, target):
        first, second = views.unbind(1)
        centred = first - first.mean(0)
        covariance = centred.t() @ centred / (len(first) - 1)
        spread = F.relu(1 - (first.var(0) + 1e-4).sqrt()).mean()
        return F.mse_loss(first, second) + spread + (covariance.square().sum() - covariance.diagonal().square().sum())


def views(count=3):
    return [(*torch.randn(2, ROWS, 6), torch.arange(ROWS) % 3) for _ in range(count)]


def captions(count=3):
    return [(torch.randn(ROWS, 6), torch.randint(9, (ROWS, 5)), torch.zeros(ROWS)) for _ in range(count)]


CASES = {
    "CLIP": (CLIP, clip_loss, captions),
    "SimCLR": (Encoder, nt_xent, views),
    "InfoNCE": (Encoder, info_nce, views),
    "supervised contrastive": (Encoder, supervised, views),
    "VICReg": (Encoder, BatchStatistics(), views),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
@in_micro_batches
def test_micro_batches_are_refused_with_two_ways_that_work(name, schedule, workers):
    model, loss_fn, batches = CASES[name]
    with pytest.raises(MicrobatchError, match=r"PipelineDriverFillDrain\(pipe, single_loss=True\).*chunks=1") as found:
        PipelineDriver(pipeline(model(), loss_fn), workers, schedule=schedule).run(3, *batches()[0])
    assert "check=False" not in str(found.value)


@cases
def test_one_loss_over_all_rows_is_equal(name, workers):
    model, loss_fn, batches = CASES[name]
    assert_same_steps(model(), loss_fn, batches(), workers, "fill_drain", chunks=3, single_loss=True)


@cases
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zb_h1"])
def test_one_micro_batch_is_equal(name, schedule, workers):
    model, loss_fn, batches = CASES[name]
    assert_same_steps(model(), loss_fn, batches(), workers, schedule, chunks=1)


@in_micro_batches
def test_similarities_that_the_model_returns_need_one_micro_batch(schedule, workers):
    """Rows of the output have as many columns as the batch has rows, so outputs of micro-batches cannot be put together."""
    with pytest.raises(MicrobatchError, match="chunks=1"):
        PipelineDriver(pipeline(CLIPWithLogits(), of_logits), workers, schedule=schedule).run(3, *captions()[0])
    assert_same_steps(CLIPWithLogits(), of_logits, captions(), workers, schedule, chunks=1)


class Classifier(nn.Module):
    """Sees labelled images, and both views of others, in one batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.first(x))
        pipe_split()
        return self.last(h)


def fix_match(logits, target):
    """The first rows are labelled; then come weak views, then as many strong views of the same images."""
    labelled, (weak, strong) = logits[:LABELLED], logits[LABELLED:].chunk(2)
    confidence, pseudo = weak.detach().softmax(-1).max(-1)
    sure = (confidence >= 0.4).double()
    unlabelled = (F.cross_entropy(strong, pseudo, reduction="none") * sure).mean()
    return F.cross_entropy(labelled, target[:LABELLED]) + unlabelled


def half_labelled(count=3, rows=ROWS):
    return [(2 * torch.randn(rows, 6), torch.randint(3, (rows,))) for _ in range(count)]


@pytest.mark.parametrize("rows", [ROWS, 11])
@in_micro_batches
def test_fixmatch_in_one_batch_is_refused_in_micro_batches(schedule, rows, workers):
    with pytest.raises(MicrobatchError, match=r"chunks=1"):
        PipelineDriver(pipeline(Classifier(), fix_match), workers, schedule=schedule).run(3, *half_labelled(1, rows)[0])


@in_micro_batches
def test_fixmatch_is_told_of_one_loss_over_all_rows(schedule, workers):
    with pytest.raises(MicrobatchError, match=r"PipelineDriverFillDrain\(pipe, single_loss=True\)"):
        PipelineDriver(pipeline(Classifier(), fix_match), workers, schedule=schedule).run(3, *half_labelled()[0])


def test_fixmatch_with_one_loss_over_all_rows(workers):
    assert_same_steps(Classifier(), fix_match, half_labelled(), workers, "fill_drain", chunks=3, single_loss=True)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zb_h1"])
def test_fixmatch_in_one_micro_batch(schedule, workers):
    assert_same_steps(Classifier(), fix_match, half_labelled(), workers, schedule, chunks=1)


class SideBySide(Classifier):
    """A row holds a labelled image and both views of another one, so that rows do not mix."""

    def forward(self, labelled, weak, strong):
        h = torch.relu(self.first(torch.stack([labelled, weak, strong], 1)))
        pipe_split()
        return self.last(h)


def fix_match_by_rows(logits, target):
    labelled, weak, strong = logits.unbind(1)
    confidence, pseudo = weak.detach().softmax(-1).max(-1)
    unlabelled = F.cross_entropy(strong, pseudo, reduction="none") * (confidence >= 0.4)
    return F.cross_entropy(labelled, target) + unlabelled.mean()


@in_all_ways
def test_fixmatch_side_by_side(workers, schedule, chunks):
    batches = [(*2 * torch.randn(3, ROWS, 6), torch.randint(3, (ROWS,))) for _ in range(3)]
    assert_same_steps(SideBySide(), fix_match_by_rows, batches, workers, schedule, chunks)


def of_the_sure_ones(logits, target):
    """A mean over the rows of which the model is sure: their number differs by micro-batch, and is known to the model alone."""
    probability, pseudo = logits.detach().softmax(-1).max(-1)
    keep = probability >= 0.4
    return F.cross_entropy(logits[keep], pseudo[keep])


@in_micro_batches
def test_a_mean_over_sure_rows_is_told_of_one_loss_over_all_rows(schedule, workers):
    for batch in half_labelled():
        driver = PipelineDriver(pipeline(Classifier(), of_the_sure_ones), workers, schedule=schedule)
        with pytest.raises(MicrobatchError, match=r"PipelineDriverFillDrain\(pipe, single_loss=True\)"):
            driver.run(3, *batch)


def test_a_mean_over_sure_rows_as_one_loss(workers):
    assert_same_steps(
        Classifier(), of_the_sure_ones, half_labelled(), workers, "fill_drain", chunks=3, single_loss=True
    )


def test_the_class_of_the_advice_takes_the_option(workers):
    """The error names a class and an option: they are written as it says."""
    pipe, batch = pipeline(CLIP(), clip_loss), captions()[0]
    driver = PipelineDriverFillDrain(pipe, workers, single_loss=True)
    assert driver.run(3, *batch).isfinite()


def by_kind(output, target):
    """A mean for each of two kinds of rows; in some mini-batches all are of one kind."""
    losses, even = nn.functional.cross_entropy(output, target, reduction="none"), target % 2 == 0
    return losses[even].sum() / even.sum().clamp(min=1) + losses[~even].sum() / (~even).sum().clamp(min=1)


def test_a_mask_that_chooses_all_and_another_that_chooses_none_show_nothing():
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 2, 2, 0, 2, 0])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    with thread_cluster(2) as threads:
        driver = PipelineDriver1F1B(pipeline(model, by_kind, num_stages=2, split="parameters"), threads)
        with pytest.raises(MicrobatchError, match="chunks=1"):
            driver.run(2, x, target)
        right = by_kind(model(x), target)
        torch.testing.assert_close(driver.run(1, x, target), right.detach())
