"""Models of torchvision and timm have the loss, the gradients and the buffers of the plain models.

The packages stay outside of the environment of the tests: exps/models.md says why, and how they are installed beside it.
"""

import pytest

from exps import models
from exps.tried_models.installed_vision import TIMM, TORCHVISION


@pytest.fixture(scope="module")
def found():
    """The models of a kind, by name."""
    kinds = {}

    def of(kind):
        if kind not in kinds:
            try:
                kinds[kind] = models.KINDS[kind]()
            except Exception as error:  # a wheel for another torch fails in its own ways
                kinds[kind] = error
        if isinstance(kinds[kind], Exception):
            pytest.skip(f"{kind} cannot be imported here")
        return kinds[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "name"), [("torchvision", name) for name in TORCHVISION] + [("timm", name) for name in TIMM]
)
def test_it_computes_what_the_plain_model_computes(found, kind, name):
    outcome = models.try_model(found(kind)[name], models.Outcome(kind, name))
    assert not outcome.reason
    assert outcome.works[:2] == ["training", "evaluation"] and outcome.stages >= 2
