"""An argument of forward whose default is an object of the user's own, for which forward asks by `is`."""

import enum

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.errors import InputError, PippyError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
X, MASK, TARGET = torch.randn(6, 4).double(), torch.rand(6, 4).double(), torch.randn(6, 4).double()


class Missing:
    """A class whose objects say that nothing is given."""


class Token(enum.Enum):
    MISSING = 0


def net(missing):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, mask=missing):
            x = self.first(x)
            pipe_split()
            return self.last(x * 2 if mask is missing else x + 1)  # no operation on the mask would fail

    return Net()


EXAMPLES = {
    "no example": {},
    "an example without it": {"example_args": (X, TARGET)},
    "an example with it": {"example_args": (X, TARGET), "example_kwargs": {"mask": MASK}},
}


@pytest.mark.parametrize("missing", [object(), Missing(), Token.MISSING], ids=["object", "class", "enum"])
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_it_is_the_default_or_refused(missing, example, threads):
    """The Pipe refuses the other; a driver goes by another graph."""
    model = net(missing)
    pipe = pipeline(model, nn.MSELoss(), **example)
    driver = PipelineDriver1F1B(pipe, threads)
    fits = {"mask": MASK} if "example_kwargs" in example else {}
    for given in ({}, {"mask": missing}, {"mask": MASK}):
        expected = nn.functional.mse_loss(model(X, **given), TARGET).detach()
        torch.testing.assert_close(driver.run(2, X, target=TARGET, **given), expected)
        if ("mask" in given and given["mask"] is MASK) is bool(fits):
            torch.testing.assert_close(pipe(X, target=TARGET, **given), expected)
        else:
            with pytest.raises(InputError, match=r"'mask'|mask is"):
                pipe(X, target=TARGET, **given)
    assert len(driver.graphs) == 2


def test_the_advice_to_give_it_in_the_example_works():
    """`an example with it` above follows the advice."""
    with pytest.raises(PippyError, match=r"give it in the example, too: example_kwargs=\{..., 'mask': ...\}"):
        pipeline(net(object()), nn.MSELoss())(X, target=TARGET, mask=MASK)


@pytest.mark.parametrize(
    "missing", [..., torch.float32, Missing, torch.relu], ids=["ellipsis", "dtype", "class", "function"]
)
def test_other_defaults_that_exist_once(missing):
    """With `...` or a dtype for its default, the Pipe computed as if the mask were given."""
    model = net(missing)
    pipe = pipeline(model)
    torch.testing.assert_close(pipe(X), model(X))
    with pytest.raises(PippyError, match=r"mask|now it is float64") as caught:
        pipe(X, MASK)
    assert "example" in str(caught.value)


def test_an_argument_after_such_a_default():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, mask=Token.MISSING, scale=2.0):
            x = x.relu()
            pipe_split()
            return self.layer(x) * (scale if mask is Token.MISSING else 0)

    model = Net()
    torch.testing.assert_close(pipeline(model)(X, scale=3.0), model(X, scale=3.0))


def test_a_default_before_one_that_no_graph_can_have():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, scale=2.0, mask=Missing, other=Missing(), *, shift=1.0):  # noqa: B008
            x = x.relu() + other
            pipe_split()
            return self.layer(x) * scale * mask + shift

    model = Net()
    pipe = pipeline(model, example_args=(X,), example_kwargs={"mask": MASK, "other": MASK})
    torch.testing.assert_close(pipe(X, mask=MASK, other=MASK + 1), model(X, mask=MASK, other=MASK + 1))
    pipe = pipeline(model, example_args=(X, MASK, MASK, MASK), example_kwargs={"shift": MASK})
    given = {"mask": MASK, "other": MASK + 1, "shift": MASK + 2}
    torch.testing.assert_close(pipe(X, MASK, **given), model(X, MASK, **given))
