"""Transfer learning and Siamese networks, as PyTorch's tutorials write them: layers that are frozen, and layers that are called
for several inputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, pipe_split, pipeline
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Backbone(nn.Module):
    """A small convolutional network in two stages, whose last layer is called fc, as in torchvision."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        pipe_split()
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def images(count=3):
    return [(torch.randn(ROWS, 1, 7, 7), torch.randint(2, (ROWS,))) for _ in range(count)]


def pretrained():
    """Its batch norms have seen something."""
    model = Backbone()
    with torch.no_grad():
        model(3 * torch.randn(50, 1, 7, 7) + 1)
    return model


class Frozen(nn.Module):
    """The backbone stays in evaluation mode, whatever mode the model is in."""

    def __init__(self):
        super().__init__()
        self.backbone = pretrained().requires_grad_(False)
        self.backbone.fc = nn.Identity()
        self.head = nn.Linear(4, 2)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        pipe_split()
        return self.head(x)


@in_all_ways
def test_a_new_head_on_a_frozen_backbone(workers, schedule, chunks):
    """A fixed feature extractor: only the new layer is trained."""
    model = pretrained().eval()
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 2)
    assert_same_steps(model, nn.CrossEntropyLoss(), images(), workers, schedule, chunks, trained="fc.")


@in_all_ways
def test_a_backbone_that_stays_in_evaluation_mode(workers, schedule, chunks):
    assert_same_steps(Frozen().train(), nn.CrossEntropyLoss(), images(), workers, schedule, chunks, trained="head.")


@in_all_ways
def test_fine_tuning_of_all_layers(workers, schedule, chunks):
    model = pretrained().eval()  # batch norms as they are
    model.fc = nn.Linear(4, 2)
    assert_same_steps(model, nn.CrossEntropyLoss(), images(), workers, schedule, chunks)


@in_all_ways
def test_fine_tuning_of_the_last_stage_only(workers, schedule, chunks):
    model = pretrained().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(("conv2", "fc"))
    assert_same_steps(model, nn.CrossEntropyLoss(), images(), workers, schedule, chunks, trained="conv2")


class Siamese(nn.Module):
    """One network, called for both images, in two stages; the distance is learnt in a third."""

    def __init__(self):
        super().__init__()
        self.cnn, self.fc = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU()), nn.Linear(3, 4)
        self.distance = nn.Linear(4, 1)

    def embed(self, x):
        return self.fc(self.cnn(x).mean((2, 3)))

    def forward(self, first, second):
        first, second = self.embed(first), self.embed(second)
        pipe_split()
        return self.distance((first - second).abs()).squeeze(1)


class SiameseOverCuts(Siamese):
    """Each image has a stage of its own, which share the network."""

    def forward(self, first, second):
        first = self.embed(first)
        pipe_split()
        second = self.embed(second)
        pipe_split()
        return self.distance((first - second).abs()).squeeze(1)


class Triplets(Siamese):
    def forward(self, anchor, positive, negative):
        anchor = self.embed(anchor)
        pipe_split()
        positive = self.embed(positive)
        return anchor, positive, self.embed(negative)


class Pairs(Siamese):
    def forward(self, first, second):
        first, second = self.cnn(first).mean((2, 3)), self.cnn(second).mean((2, 3))
        pipe_split()
        return self.fc(first), self.fc(second)


def pairs(count=3):
    return [
        (torch.randn(ROWS, 1, 5, 5), torch.randn(ROWS, 1, 5, 5), torch.randint(2, (ROWS,)).double())
        for _ in range(count)
    ]


def contrastive(outputs, label, margin=2.0):
    """Hadsell's: similar pairs are pulled together, others pushed apart up to a margin."""
    distance = F.pairwise_distance(*outputs)
    return ((1 - label) * distance.pow(2) + label * torch.clamp(margin - distance, min=0.0).pow(2)).mean()


class TripletLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.TripletMarginLoss(margin=1.0)

    def forward(self, outputs, target):
        return self.loss(*outputs)


def shared_by(config):
    return lambda model, loss_fn: pipeline(model, loss_fn, multi_use_param_spec=config)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
@pytest.mark.parametrize("model", [Siamese, SiameseOverCuts])
@in_all_ways
def test_a_siamese_network(model, config, workers, schedule, chunks):
    pipe = shared_by(config)
    assert_same_steps(model(), nn.BCEWithLogitsLoss(), pairs(), workers, schedule, chunks, pipe=pipe)


@in_all_ways
def test_the_contrastive_loss(workers, schedule, chunks):
    assert_same_steps(Pairs(), contrastive, pairs(), workers, schedule, chunks)


@in_all_ways
def test_the_triplet_loss(workers, schedule, chunks):
    batches = [(*torch.randn(3, ROWS, 1, 5, 5), torch.zeros(ROWS)) for _ in range(3)]
    assert_same_steps(Triplets(), TripletLoss(), batches, workers, schedule, chunks)


@in_all_ways
def test_mined_triplets_with_a_hinge_by_hand(workers, schedule, chunks):
    """The hinge is a mean over the triplets, those that lie apart already included."""

    def loss_fn(outputs, target):
        anchor, positive, negative = outputs
        near, far = (anchor - positive).pow(2).sum(1), (anchor - negative).pow(2).sum(1)
        return F.relu(near - far + 0.5).mean()

    batches = [(*torch.randn(3, ROWS, 1, 5, 5), torch.zeros(ROWS)) for _ in range(3)]
    assert_same_steps(Triplets(), loss_fn, batches, workers, schedule, chunks)
