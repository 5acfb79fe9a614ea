"""Training runs, by a driver and in plain PyTorch, for tests that save them and go on; manifests as others write them."""

import copy
import hashlib
import json

import torch
from torch import nn
from torch.nn import functional as F

import pippy
from pippy import MultiUseParameterConfig, PipelineDriver, PipelineDriver1F1B, pipeline
from tests.drivers.models import TiedLanguage, cross_entropy

TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class Training:
    """A driver of a tied language model, with an optimizer and a scheduler, and the mini-batches of a run."""

    def __init__(self, cluster, config=REPLICATE, schedule="1f1b", model=None, driver_options=(), **options):
        self.model = model or TiedLanguage()
        pipe = pipeline(self.model, cross_entropy, multi_use_param_spec=config)
        self.driver = PipelineDriver(pipe, cluster, schedule=schedule, **dict(driver_options))
        groups = [{"params": ...}, {"params": ["*.bias", "norm.*"], "weight_decay": 0.0}]
        self.optimizer = self.driver.instantiate_optimizer(
            torch.optim.AdamW, lr=1e-2, weight_decay=0.1, param_groups=groups, **options
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=3e-2, total_steps=20)

    @property
    def parts(self):
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps):
        losses = []
        for step in steps:
            losses.append(self.driver.run(3, *batch(step)))
            for each in (self.optimizer, self.scheduler):
                each.step()
            self.optimizer.zero_grad()
        return torch.stack(losses)

    def everything(self):
        """All that a checkpoint has of it, in one flat dict of tensors and values."""
        found = dict(self.driver.state_dict())
        for name, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{name}/{key}": value for key, value in state.items()})
        found["groups"], found["scheduler"] = self.optimizer.named_groups(), self.scheduler.state_dict()
        return copy.deepcopy(found)


class Plain:
    """The same in plain PyTorch."""

    def __init__(self, model):
        self.model = model
        named = dict(model.named_parameters())
        bare = [name for name in named if name.endswith("bias") or name.startswith("norm.")]
        groups = [
            {"params": [named[name] for name in named if name not in bare]},
            {"params": [named[name] for name in bare], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=3e-2, total_steps=20)

    def train(self, steps):
        losses = []
        for step in steps:
            x, target = batch(step)
            loss = cross_entropy(self.model(x), target)
            loss.backward()
            for each in (self.optimizer, self.scheduler):
                each.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


def batch(step):
    numbers = torch.Generator().manual_seed(step)
    return tuple(torch.randint(13, (7, 5), generator=numbers) for _ in range(2))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class WithDropout(TiedLanguage):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.2)


class Many(nn.Module):
    """A tied parameter, buffers of both kinds, an unused parameter, an extra state, and scalars."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.note = "as it was"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        pippy.pipe_split()
        return self.last(x) * self.seen


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def many(threads):
    model = Many()
    driver = PipelineDriver1F1B(pipeline(model, Scaled()), threads)
    return model, driver, driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


# Manifests of checkpoints as earlier versions wrote them, and as whoever writes a file can write them.


def content_of(path):
    """What a checkpoint's manifest says, without the hash."""
    content = json.loads((path / "checkpoint.json").read_bytes())
    content.pop("hash", None)
    return content


def text_of(content, version=2, change=lambda text: text):
    """The bytes of a manifest; ``change`` makes others of them. That of version 2 has the right hash, whatever it says."""
    text = change(json.dumps({**content, "version": version} if version else content, indent=1).encode())
    if version == 1:
        return text
    return text.removesuffix(b"\n}") + f',\n "hash": "{hashlib.sha256(text).hexdigest()}"\n}}'.encode()


def rewrite(path, change, version=2):
    """Change what a manifest says. With ``version`` None, that is what the change makes of it."""
    content = content_of(path)
    change(content)
    (path / "checkpoint.json").write_bytes(text_of(content, version))
