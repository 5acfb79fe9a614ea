"""Refusals that advise a module of its own, which is called as a whole: with that, the Pipe gives the plain model's numbers.

Each row has what a model's own forward does, words of the refusal, and options of `pipeline`.
"""

import pytest
import torch

from pippy import PippyError, pipeline
from tests.ir.test_advice import X, in_second, mse, same, with_block

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
EXAMPLE = {"example_args": (X, X)}


def asks_for_bool(x):
    return x * 2 if x.sum() > 0 else x


def asks_for_float(x):
    return x * float(x.detach().sum())


def loops(x):
    return torch.stack([row * 2 for row in x])


def fills_numpy(x):
    return x + torch.from_numpy(x.detach().numpy() * 2)


def asks_for_type(x):
    return x * 2 if type(x.detach().sum().tolist()) is float else x


def in_inference_mode(x):
    with torch.inference_mode():
        shift = x.detach().sum()
    return x * float(shift)


def under_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T).to(x.dtype) @ x


def with_hook(x):
    y = x * 1
    y.register_hook(lambda gradient: gradient * 2)
    return y


def gradient_inside(x):
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(inner.pow(3).sum(), inner)
    return x * found


def default_dtype(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    made = torch.ones(4)
    torch.set_default_dtype(before)
    return x * made


ROWS = {
    "bool": (asks_for_bool, "of a module of its own, without a mark inside, which is called as a whole", {}),
    "bool, with an example": (asks_for_bool, "which is called as a whole", EXAMPLE),
    "float": (asks_for_float, "float() of a traced value", {}),
    "a loop": (loops, "a loop over a tensor", {}),
    "numpy": (fills_numpy, "which is called as a whole", {}),
    "a type": (asks_for_type, "which is called as a whole", {}),
    "inference mode": (in_inference_mode, "into the forward of a module of its own", {}),
    "autocast": (under_autocast, "into the forward of a module of its own", {}),
    "a default dtype": (default_dtype, "into the forward of a module of its own", {}),
    "a hook": (with_hook, "in a module of its own, which is kept whole", {}),
}


@pytest.mark.parametrize(("function", "words", "options"), ROWS.values(), ids=ROWS)
def test_a_module_of_its_own_that_is_kept_whole(function, words, options):
    with pytest.raises(PippyError) as caught:
        pipeline(in_second(lambda _, x: function(x)), mse, **options)
    assert words in str(caught.value)
    same(with_block(function), X, **options)


def test_a_gradient_in_forward_is_followed():
    same(in_second(lambda _, x: gradient_inside(x)), X)


def raises(self, x):
    if self.count.max() >= 3 or (x > 1e6).any():
        raise ValueError(f"{x.shape} is too large")
    return x * 2


@pytest.mark.parametrize("options", [{}, EXAMPLE], ids=["without an example", "with an example"])
def test_an_if_that_raises_is_an_assertion(options):
    """As models of Hugging Face check their labels; it was refused as control flow."""
    same(in_second(raises), X, **options)
    pipe = pipeline(in_second(raises))
    with pytest.raises(PippyError, match="forward raises a ValueError here"):
        pipe(X * 1e9)


def raises_elsewhere(self, x):
    if (x > 0).all():
        raises_always()
    return x


def raises_always():
    raise ValueError


def test_an_error_of_another_function_is_none():
    with pytest.raises(PippyError, match="control flow"):
        pipeline(in_second(raises_elsewhere))
