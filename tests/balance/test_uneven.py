"""`pipeline()` warns where one stage has most of the work; what the warning says to do makes the stages alike."""

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pippy import Pipe, PippyWarning, pipe_split, pipeline
from pippy.balance.balancer import Balancer
from pippy.balance.policies import read_split
from pippy.balance.profile import OperationCost, Profile
from pippy.balance.weighing import Weighing, figures_of
from pippy.ir.trace.trace import trace

X, TARGET = torch.randint(0, 50, (4, 8)), torch.randint(0, 10, (4,))
EXAMPLE = {"example_args": (X, TARGET)}


class Classifier(nn.Module):
    """Words, something in the middle, and a head."""

    def __init__(self, *middle, words=50):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(words, 32), nn.Sequential(*middle), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.middle(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, layers, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def transformer():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return Classifier(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), words=1000)


def linears():
    """The words have as many parameters as all that computes: without an example they become a stage."""
    return Classifier(*(nn.Linear(32, 32) for _ in range(12)), words=12 * 33)


def tied():
    """The head computes with the words, too."""
    model = Classifier(*(nn.Linear(32, 32) for _ in range(12)), words=12 * 33)
    model.head = nn.Linear(32, 12 * 33)
    model.head.weight = model.embed.weight
    return model


BY_PARAMETERS = {"split": "parameters", "num_stages": 2}
ALONE = r"No cut can be inside of 'middle.0.*' \({}\). What to do: {}"
WARNED = {
    "a transformer": (
        (transformer, BY_PARAMETERS),
        r"submod_1 has 100% of the parameters that compute \(.*?\). "
        + ALONE.format(
            "TransformerEncoder", r"give example_args, .* leave out split=, .* cut between its layers by .*$"
        ),
        (transformer, {"num_stages": 2} | EXAMPLE),
    ),
    "a transformer, in four": (
        (transformer, BY_PARAMETERS | {"num_stages": 3}),
        r"the 3 stages are uneven: submod_1 has 9\d% of the parameters that compute \(.*?\). No cut",
        (transformer, {"num_stages": 4} | EXAMPLE),
    ),
    "a transformer, without split=": ((transformer, {"num_stages": 2}), "the 2 stages are uneven", None),
    "a recurrent layer": (
        (lambda: Classifier(Recurrent(3)), BY_PARAMETERS),
        ALONE.format("LSTM", r"if it has several layers, make a module of each$"),
        (lambda: Classifier(Recurrent(), Recurrent(), Recurrent()), BY_PARAMETERS),
    ),
    "words": (
        (linears, BY_PARAMETERS),
        r"submod_1 has 100% of .*\. What to do: give example_args, .* leave out split=, so that the measured time",
        (linears, {"num_stages": 2} | EXAMPLE),
    ),
    "words that a head computes with, too": (
        (tied, BY_PARAMETERS),
        r"submod_1 has 100% of .*\. What to do: give example_args",
        (tied, {"num_stages": 2} | EXAMPLE),
    ),
    "words, with an example": (
        (linears, BY_PARAMETERS | EXAMPLE),
        r"What to do: leave out split=, so that the measured time is balanced$",
        (linears, {"num_stages": 2} | EXAMPLE),
    ),
}


def flops_of_stages(pipe: Pipe) -> list[int]:
    """The FLOPs of a forward of each stage, as torch counts them, which counts none of an LSTM: these are known."""
    totals, recurrent = [0], []
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for _, stage in pipe.stages():
            weights = [each for lstm in stage.modules() if isinstance(lstm, nn.LSTM) for each in lstm.parameters()]
            recurrent.append(2 * X.numel() * sum(each.numel() for each in weights if each.dim() == 2))
            stage.register_forward_hook(lambda *_: totals.append(counter.get_total_flops()))
        pipe(X, TARGET)
    return [after - before + more for (before, after), more in zip(pairwise(totals), recurrent)]


@pytest.mark.parametrize(("given", "said", "advised"), WARNED.values(), ids=WARNED)
def test_what_the_warning_says_to_do_makes_the_stages_alike(given, said, advised):
    make, how = given
    with pytest.warns(PippyWarning, match=said) as caught:
        uneven = flops_of_stages(pipeline(make(), F.cross_entropy, **how))
    assert len(caught) == 1 and max(uneven) > 0.75 * sum(uneven)
    if advised is not None:
        make, how = advised
        even = flops_of_stages(pipeline(make(), F.cross_entropy, **how))
        assert max(even) < 0.75 * sum(even) and min(even) > 0


class Marked(Classifier):
    def forward(self, x):
        x = self.embed(x)
        pipe_split()
        return self.head(self.middle(x).mean(1))


SILENT = {
    "marks": lambda: pipeline(Marked(nn.Linear(32, 1024), nn.Linear(1024, 32)), F.cross_entropy),
    "names": lambda: pipeline(linears(), split=["head"]),
    "numbers of layers": lambda: pipeline(linears(), split=[1, 13]),
    "one stage": lambda: pipeline(linears(), split="parameters", num_stages=1),
    "a small model": lambda: pipeline(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), num_stages=2, split="uniform"),
}


@pytest.mark.parametrize("make", SILENT.values(), ids=SILENT)
def test_nothing_is_said_of(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PippyWarning)
        make()


@pytest.mark.parametrize(
    ("times", "uncertain", "said"),
    [
        ([1, 1, 90, 1], 0.0, "submod_1 has 98% of the measured time. No cut can be inside of '2' "),
        ([1, 1, 90, 1], 0.5, ""),  # it may be chance
        ([9, 9, 9, 9], 0.0, ""),
    ],
)
def test_of_measured_times_only_what_they_tell_is_said(times, uncertain, said):
    traced = trace(nn.Sequential(*(nn.Linear(64, 64) for _ in times)))
    profile = Profile([OperationCost(each) for each in times], uncertain=uncertain)
    weighing = Weighing(traced, figures_of(traced), profile, read_split("time", 2, with_examples=True), None)
    told = weighing.unevenness(weighing.best_cuts())
    assert said in told if said else not told


def test_layers_of_a_sequential_are_balanced_the_same_way():
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.LSTM(64, 128), nn.Identity()]
    with pytest.warns(PippyWarning, match="'2' .LSTM."):
        Pipe.from_sequential(layers, cut=Balancer("parameters", 2))
