"""Any loss, in any form, cut anyhow, with any padding: a driver gives the plain model's numbers, or advice that does."""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.ir.base.trees import leaves
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64")
CLASSES = 4


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(2) as cluster:
        yield cluster


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(CLASSES, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = torch.relu(self.a(x))
        pipe_split()
        return self.b(x)


class Returning(Net):
    """Returns its loss."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x, target):
        return self.loss(super().forward(x), target)


class Own(nn.Module):
    """A loss module that pippy cannot read."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output, target):
        return self.loss(output, target)


@dataclass(frozen=True)
class Loss:
    """A loss of torch's: its function, its module, its options, and targets. ``padded`` has padding where a mask says."""

    function: Callable[..., Any]
    module: type[nn.Module]
    targets: Callable[[torch.Tensor], Any]
    options: dict[str, st.SearchStrategy[Any]]


def labels(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(CLASSES, x.shape[:1])


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape).softmax(-1)


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(2, x.shape) * 2.0 - 1


IGNORED = st.sampled_from((-100, 0, 2))
CLASS_WEIGHTS = st.sampled_from(
    (None, torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64), torch.tensor([0.0, 2, 1, 0], dtype=torch.float64))
)
ENTROPY = {"weight": CLASS_WEIGHTS, "ignore_index": IGNORED, "label_smoothing": st.sampled_from((0.0, 0.2))}
SOFT = {"weight": CLASS_WEIGHTS, "label_smoothing": st.sampled_from((0.0, 0.2))}
LOSSES = {
    "cross entropy": Loss(F.cross_entropy, nn.CrossEntropyLoss, labels, ENTROPY),
    "cross entropy of probabilities": Loss(F.cross_entropy, nn.CrossEntropyLoss, probabilities, SOFT),
    "nll": Loss(F.nll_loss, nn.NLLLoss, labels, {"weight": CLASS_WEIGHTS, "ignore_index": IGNORED}),
    "mse": Loss(F.mse_loss, nn.MSELoss, torch.randn_like, {}),
    "l1": Loss(F.l1_loss, nn.L1Loss, torch.randn_like, {}),
    "huber": Loss(F.huber_loss, nn.HuberLoss, torch.randn_like, {"delta": st.sampled_from((0.5, 1.0))}),
    "smooth l1": Loss(F.smooth_l1_loss, nn.SmoothL1Loss, torch.randn_like, {"beta": st.sampled_from((0.5, 1.0))}),
    "binary": Loss(
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
        torch.rand_like,
        {"weight": CLASS_WEIGHTS, "pos_weight": CLASS_WEIGHTS},
    ),
    "kl": Loss(F.kl_div, nn.KLDivLoss, probabilities, {}),
    "poisson": Loss(F.poisson_nll_loss, nn.PoissonNLLLoss, torch.rand_like, {"full": st.booleans()}),
    "hinge": Loss(F.hinge_embedding_loss, nn.HingeEmbeddingLoss, signs, {}),
    "soft margin": Loss(F.soft_margin_loss, nn.SoftMarginLoss, signs, {}),
    "multi margin": Loss(F.multi_margin_loss, nn.MultiMarginLoss, labels, {"weight": CLASS_WEIGHTS}),
    "multilabel": Loss(
        F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, torch.rand_like, {"weight": CLASS_WEIGHTS}
    ),
}


def masked(value: float) -> Callable[[Any, Any], Any]:
    """A mean over the rows whose target is not this."""

    def loss(output, target):
        counts = target != value
        return (output.square().sum(-1) * counts).sum() / counts.sum()

    return loss


def two_terms(output, target):
    return F.cross_entropy(output, target) + 0.1 * output.square().mean()


def two_means(output, target):
    return F.cross_entropy(output, target, ignore_index=0) + 0.1 * output.square().mean()


def words(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(CLASSES, x.shape[:2])


def words_and_mask(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"words": words(x), "mask": torch.ones(x.shape[:2], dtype=torch.bool)}


def words_and_weights(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return words(x), torch.ones(x.shape[0])


def masked_words(output, target):
    losses = F.cross_entropy(output.transpose(1, 2), target["words"], reduction="none")
    return (losses * target["mask"]).sum() / target["mask"].sum()


def weighted_words(output, target):
    losses = F.cross_entropy(output.transpose(1, 2), target[0], reduction="none").mean(1)
    return (losses * target[1]).sum() / target[1].sum()


SEQUENCES = {
    "words": (lambda o, t: F.cross_entropy(o.transpose(1, 2), t, ignore_index=0), words),
    "flat words": (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), words),
    "flat words, a sum": (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"), words),
    "next words": (lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten(), ignore_index=0), words),
    "masked words": (masked_words, words_and_mask),
    "weighted words": (weighted_words, words_and_weights),
}
OWN = {
    "masked": masked(3),
    "masked, a value out of range": masked(7),
    "two terms": two_terms,
    "two means": two_means,
    "a sum divided by a number": lambda o, t: F.cross_entropy(o, t, reduction="sum") / 8,
    "a sum divided by the rows": lambda o, t: F.cross_entropy(o, t, reduction="sum") / t.size(0),
    "root": lambda o, t: (o - t[:, None]).square().mean().sqrt(),
    "all rows": lambda o, t: (o - o.mean(0)).square().mean() + t.sum() * 0,
    "target counts": lambda o, t: (o.square().sum(1) * t).sum() / t.sum(),
    "large ones": lambda o, t: (o.square().sum(1) * (t > 2)).sum() / (t > 2).sum(),
}
FORMS = ("module", "function", "lambda", "own module", "returned")


@dataclass
class Case:
    """What is given to ``pipeline``, and the same in one function."""

    form: str
    given: Any
    plain: Callable[[Any, Any], Any]
    targets: Callable[[torch.Tensor], Any]
    pad: int | None
    words: tuple[int, ...] = ()

    def batch(self, rows: list[bool]) -> tuple[torch.Tensor, Any]:
        """An input and a target, which is padded in some rows: of the first tensor in it, and of the last."""
        x = torch.randn(len(rows), *self.words, CLASSES)
        target, padded = self.targets(x), torch.tensor(rows)
        tensors = list(leaves(target))
        if self.pad is not None:
            tensors[0][padded] = self.pad
        if len(tensors) > 1:
            tensors[-1][padded] = 0
        return x, target


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from((*LOSSES, *OWN, *SEQUENCES)))
    if name in SEQUENCES:
        (own, targets), form = SEQUENCES[name], draw(st.sampled_from(FORMS[2:]))
        pad = -100 if name.startswith("flat") else draw(st.sampled_from((None, 0)))
        return Case(form, given_as(form, own), own, targets, pad, words=(3,))
    if name in OWN:
        form, own = draw(st.sampled_from(FORMS[2:])), OWN[name]
        pad = draw(st.sampled_from((-100, 0, 3, 7))) if "masked" in name else draw(st.sampled_from((None, 0, 3)))
        return Case(form, given_as(form, own), own, labels, pad)
    loss, form = LOSSES[name], draw(st.sampled_from(FORMS))
    options = {key: draw(values) for key, values in loss.options.items()}
    options["reduction"] = draw(st.sampled_from(("mean", "sum", *(("batchmean",) * (name == "kl")))))
    plain = functools.partial(loss.function, **options)
    given = loss.module(**options) if form == "module" else given_as(form, plain)
    return Case(form, given, plain, loss.targets, options.get("ignore_index"))


def given_as(form: str, loss: Callable[[Any, Any], Any]) -> Any:
    return {
        "function": loss,
        "lambda": lambda output, target: loss(output, target),
        "own module": Own(loss),
        "returned": None,
    }[form]


class Checked:
    """A driver that is held to the plain model. Where it refuses a step, the next driver is made as the error says."""

    def __init__(self, case: Case, workers) -> None:
        self.case, self.workers = case, workers
        self.advice: str | None = None
        self.plain = Returning(case.plain) if case.form == "returned" else Net()
        self.driver = self.made(PipelineDriver1F1B)

    def made(self, kind, **options):
        model = copy.deepcopy(self.plain)
        if self.case.form == "returned":
            return kind(pipeline(model, output_loss_value_spec=True), self.workers, **options)
        return kind(pipeline(model, self.case.given), self.workers, **options)

    def step(self, chunks: int, x: torch.Tensor, target: Any) -> None:
        self.plain.zero_grad()
        returns = self.case.form == "returned"
        expected = self.plain(x, target) if returns else self.case.plain(self.plain(x), target)
        expected.backward()
        chunks = 1 if self.advice == "chunks=1" else chunks
        try:
            self.driver.zero_grad()
            loss = self.driver.run(chunks, x, target)
        except MicrobatchError as error:
            assert self.advice is None, f"{self.advice} was advised, and then {error}"
            assert all(gradient is None for gradient in self.driver.gradients().values()), "nothing is adopted"
            self.follow(str(error))
            loss = self.driver.run(1 if self.advice == "chunks=1" else chunks, x, target)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12, equal_nan=True)
        for name, gradient in self.driver.gradients().items():
            torch.testing.assert_close(
                gradient, self.plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12, equal_nan=True
            )

    def follow(self, error: str) -> None:
        found = re.search(r"loss_reduction=(.*)$", error)
        self.driver.close()
        if found is not None:
            self.advice = found[1]
            self.driver = self.made(PipelineDriver1F1B, loss_reduction=eval(found[1]))
        elif "single_loss=True" in error:
            self.advice = "single_loss"
            self.driver = self.made(PipelineDriverFillDrain, single_loss=True)
        else:
            assert "chunks=1" in error
            self.advice, self.driver = "chunks=1", self.made(PipelineDriver1F1B)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    case=cases(),
    padding=st.lists(st.lists(st.booleans(), min_size=4, max_size=9), min_size=2, max_size=2),
    chunks=st.integers(2, 4),
    seed=st.integers(0, 3),
)
def test_any_loss_gives_the_plain_numbers_or_advice_that_does(workers, case, padding, chunks, seed):
    torch.manual_seed(seed)
    checked = Checked(case, workers)
    for rows in padding:
        checked.step(chunks, *case.batch(rows))
    checked.driver.close()
