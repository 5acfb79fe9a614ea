"""Models of Hugging Face called in the other way: the loss outside, the mask given where it was left out, in two stages."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from exps.tried_models.candidate import Candidate
from exps.tried_models.comparison import compare_modes
from tests.models.hugging_face import MODELS, ROWS


def of_logits(output, target):
    """The cross entropy of the logits, under their name in the output."""
    logits = output["logits_per_image" if "logits_per_image" in output else "logits"]
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def other_arguments(name):
    """Those of the model's call with its labels as the target, and a mask if there was none."""
    given = MODELS[name].arguments()
    target = given.pop("labels", torch.arange(ROWS))
    given.pop("return_loss", None)
    if name in ("t5", "whisper"):
        given["decoder_input_ids"] = target
    if "input_ids" in given and given.pop("attention_mask", None) is None:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, 6:] = 0
    return {**given, "target": target}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_plain_model(name):
    compare_modes(Candidate(MODELS[name].make, partial(other_arguments, name), of_logits), 2)
