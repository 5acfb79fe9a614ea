"""Two networks that train against each other, each by a driver of its own: DCGAN and WGAN-GP, as their tutorials write them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.ir.base.errors import PippyError
from tests.comparisons import assert_same
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways, in_micro_batches

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
RATE = 0.05


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.ConvTranspose2d(3, 4, 2), nn.ConvTranspose2d(4, 1, 3)

    def forward(self, z):
        h = F.relu(self.first(z))
        pipe_split()
        return torch.tanh(self.second(h))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 1, 3)

    def forward(self, x):
        h = F.leaky_relu(self.first(x), 0.2)
        pipe_split()
        return self.second(h).flatten()


class Both(nn.Module):
    """The generator, judged by the discriminator: what the generator is trained through."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, z):
        x = self.generator(z)
        pipe_split()
        return self.discriminator(x)


def parts_of(state, name):
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


class OnWorkers:
    """A driver for each of the two; the generator's has a copy of the discriminator."""

    def __init__(self, model, workers, schedule, chunks, loss_fn):
        self.model, self.chunks = model, chunks
        make = {"schedule": schedule}
        self.of_both = PipelineDriver(pipeline(model, loss_fn), workers, **make)
        self.of_discriminator = PipelineDriver(pipeline(copy.deepcopy(model.discriminator), loss_fn), workers, **make)
        groups = [{"params": ["generator.*"]}]
        self.for_generator = self.of_both.instantiate_optimizer(torch.optim.SGD, lr=RATE, param_groups=groups)
        self.for_discriminator = self.of_discriminator.instantiate_optimizer(torch.optim.SGD, lr=RATE)

    def fake(self, z):
        self.of_both.copy_to(self.model)
        with torch.no_grad():
            return self.model.generator(z)

    def discriminate(self, x, labels):
        loss = self.of_discriminator.run(self.chunks, x, labels)
        self.for_discriminator.step()
        self.for_discriminator.zero_grad()
        return loss

    def generate(self, z, labels):
        judged = {f"discriminator.{name}": value for name, value in self.of_discriminator.state_dict().items()}
        self.of_both.load_state_dict({**self.of_both.state_dict(), **judged})
        loss = self.of_both.run(self.chunks, z, labels)
        self.for_generator.step()
        self.of_both.zero_grad()
        return loss

    def state(self):
        of_generator = parts_of(self.of_both.state_dict(), "generator")
        return {"generator": of_generator, "discriminator": dict(self.of_discriminator.state_dict())}


class Plain:
    """The tutorial's loop."""

    def __init__(self, model, loss_fn):
        self.model, self.loss_fn = model, loss_fn
        self.for_generator = torch.optim.SGD(model.generator.parameters(), lr=RATE)
        self.for_discriminator = torch.optim.SGD(model.discriminator.parameters(), lr=RATE)

    def fake(self, z):
        return self.model.generator(z).detach()

    def discriminate(self, x, labels):
        return self.step(self.model.discriminator(x), labels, self.for_discriminator)

    def generate(self, z, labels):
        return self.step(self.model(z), labels, self.for_generator)

    def step(self, output, labels, optimizer):
        self.model.zero_grad()
        loss = self.loss_fn(output, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state(self):
        state = self.model.state_dict()
        return {name: parts_of(state, name) for name in ("generator", "discriminator")}


def alternating(script, steps=2):
    """Discriminator on real images, then on fake ones; then the generator. All losses."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        real = torch.randn(ROWS, 1, 4, 4, generator=generator)
        z = torch.randn(ROWS, 3, 1, 1, generator=generator)
        yield script.discriminate(real, torch.ones(ROWS))
        yield script.discriminate(script.fake(z), torch.zeros(ROWS))
        yield script.generate(z, torch.ones(ROWS))


@in_all_ways
def test_dcgan(workers, schedule, chunks):
    model, loss_fn = Both(), nn.BCEWithLogitsLoss()
    plain = Plain(copy.deepcopy(model), loss_fn)
    on_workers = OnWorkers(model, workers, schedule, chunks, loss_fn)
    assert_same(list(alternating(on_workers)), list(alternating(plain)), "losses")
    assert_same(on_workers.state(), plain.state(), "what was trained")


class Critic(nn.Module):
    """Of WGAN-GP: returns its loss, the penalty on the gradient by an image between a real and a fake one included."""

    def __init__(self, cut):
        super().__init__()
        self.first, self.second, self.cut = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 1, 3), cut

    def judge(self, x):
        h = torch.tanh(self.first(x))
        if self.cut:
            pipe_split()
        return self.second(h).flatten(1).sum(1)

    def forward(self, real, fake, epsilon):
        between = (epsilon * real + (1 - epsilon) * fake).detach().requires_grad_()
        judged = self.judge(between)
        (gradient,) = torch.autograd.grad(
            judged, between, torch.ones_like(judged), create_graph=True, retain_graph=True
        )
        penalty = ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return self.judge(fake).mean() - self.judge(real).mean() + 10 * penalty


class Features(Critic):
    """Stages before the critic: what is differentiated by comes after them, and the penalty lies in the last stage."""

    def __init__(self):
        super().__init__(cut=False)
        self.features = nn.Conv2d(1, 1, 1)

    def forward(self, real, fake, epsilon):
        real, fake = torch.tanh(self.features(real)), torch.tanh(self.features(fake))
        pipe_split()
        return super().forward(real, fake, epsilon)


def real_and_fake(count=3):
    return [(*torch.randn(2, ROWS, 1, 4, 4), torch.rand(ROWS, 1, 1, 1)) for _ in range(count)]


@in_micro_batches
def test_a_penalty_over_a_cut_is_refused_by_the_mark(schedule, workers):
    with pytest.raises(PippyError, match=r"autograd\.grad[\s\S]*pipe_split") as found:
        pipe = pipeline(Critic(cut=True), output_loss_value_spec=True)
        PipelineDriver(pipe, workers, schedule=schedule).run(3, *real_and_fake()[0])
    assert "does not appear" not in str(found.value)
    assert "test_adversarial.py" in str(found.value)


@in_all_ways
def test_a_penalty_within_one_stage(workers, schedule, chunks):
    assert_same_steps(Features(), None, real_and_fake(), workers, schedule, chunks)
