"""`alike`: what is computed in it depends on the rows alone, and not on how they are divided or in which order they come.

Two things of a model differ from one division to another though nothing is wrong: random numbers, and batch norms, which
normalize the rows that they get. To compare two divisions, each is replaced by something that is the same for every row:

    a random operation     gives a fixed number: no dropout, the middle of a distribution, the most likely sample
    a permutation          turns the order
    a batch norm           normalizes by its running statistics, and leaves them as they are

Random operations are replaced where torch dispatches, below autograd. So all callers are covered: functions of Python, layers
of C++, a forward that is run again in the backward. Forward and backward must both run inside.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pippy.ir.base.operations import RATES, draws, name_of
from pippy.ir.base.without_dynamo import DispatchMode

FixedDraw = Callable[[Mapping[str, Any]], Any]


@contextmanager
def alike(batch_norms: bool = True) -> Iterator[None]:
    """Inside, every random operation gives the same for each row, and batch norms normalize by their running statistics.

    With ``batch_norms=False`` batch norms normalize as always. A batch norm still counts its calls (``num_batches_tracked``).

    >>> dropout, norm = torch.nn.Dropout(), torch.nn.BatchNorm1d(2, affine=False)
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> with alike():
    ...     print(dropout(x), torch.rand(2), norm(x).round())
    tensor([[2., 4.],
            [6., 8.]]) tensor([0.5000, 0.5000]) tensor([[1., 2.],
            [3., 4.]])
    """
    if batch_norms:
        with _StillBatchNorms(), _functions_replaced(), _DrawnAlike(stills_norms=True):
            yield
    else:
        with _DrawnAlike():
            yield


class _StillBatchNorms(TorchFunctionMode):
    """Batch norms normalize by their running statistics; those that have none change nothing but scale and shift."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _BATCH_NORM:
            return _still(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_BATCH_NORM = F.batch_norm
_replacing = [0]  # how many contexts replace the function
_lock = threading.Lock()


@contextmanager
def _functions_replaced() -> Iterator[None]:
    """Inside, batch norms are still in a forward that a backward runs again, too: there a mode for functions has no effect."""
    with _lock:
        _replacing[0] += 1
        F.batch_norm = _batch_norm
    try:
        yield
    finally:
        with _lock:
            _replacing[0] -= 1
            if not _replacing[0]:
                F.batch_norm = _BATCH_NORM


def norms_are_still() -> bool:
    """Whether batch norms are still: also in a backward, where modes for functions have no effect."""
    return any(isinstance(each, _DrawnAlike) and each.stills_norms for each in _get_current_dispatch_mode_stack())


def _batch_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    return (_still if norms_are_still() else _BATCH_NORM)(*args, **kwargs)


def _still(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is None or running_var is None:
        like = input if weight is None else weight
        running_mean, running_var = like.new_zeros(input.shape[1]), like.new_ones(input.shape[1])
    return _BATCH_NORM(input, running_mean, running_var, weight, bias, False, momentum, eps)


class _DrawnAlike(DispatchMode):
    def __init__(self, stills_norms: bool = False) -> None:
        super().__init__()
        self.stills_norms = stills_norms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names, dropped = _arguments_if_random(func)
        if not names:
            return func(*args, **kwargs)
        by_name = {**dict(zip(names, args)), **kwargs}
        if dropped is not None:  # attention and recurrent layers, and their backwards
            return func(**{**by_name, dropped: 0.0})
        left_out = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
        return _drawn(func, by_name, {**left_out, **by_name})


_STATES = frozenset({"_cudnn_init_dropout_state"})  # make the state of a generator; an operation that is given it draws


@cache
def _arguments_if_random(func: Any) -> tuple[tuple[str, ...], str | None]:
    """The names of an operation's arguments, and that of its rate of dropout; no names if it draws nothing."""
    names = tuple(each.name for each in func._schema.arguments)
    if name_of(func) in _STATES:
        return (), None
    dropped = next((name for name in names if name in RATES), None)
    return (names if dropped is not None or draws(func) else ()), dropped


def _drawn(func: Any, given: Mapping[str, Any], every: Mapping[str, Any]) -> Any:
    """The fixed result of a random operation, the same for each row. ``every`` adds the defaults to ``given``."""
    name = name_of(func)
    if name in _DRAWN:
        return _DRAWN[name](every)
    result = func(**given)  # its shape, dtype and device
    middle = _MIDDLES.get(name.rstrip("_"), lambda given: 0.5)(every)
    if isinstance(middle, torch.Tensor):
        return result.copy_(middle)
    return result.fill_(middle if result.is_floating_point() or result.is_complex() else int(middle))


def _without_dropout(given: Mapping[str, Any]) -> Any:
    """Dropout that drops nothing."""
    x = given.get("input", given.get("self"))
    assert isinstance(x, torch.Tensor)
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _most_likely(given: Mapping[str, Any]) -> torch.Tensor:
    """The sample of a multinomial distribution that is most likely."""
    probabilities, samples = given["self"], given["num_samples"]
    if given.get("replacement"):
        return probabilities.argmax(-1, keepdim=True).expand(*probabilities.shape[:-1], samples).clone()
    return probabilities.topk(samples, -1).indices


def _turned(given: Mapping[str, Any]) -> torch.Tensor:
    """A permutation that moves all: one that moves nothing would hide that rows are mixed."""
    options = {
        key: given[key] for key in ("dtype", "device") if isinstance(given.get(key), (torch.dtype, torch.device))
    }
    return torch.arange(given["n"] - 1, -1, -1, **options)


def _with_middle_slope(given: Mapping[str, Any]) -> torch.Tensor:
    """A leaky ReLU whose slope is the middle of those that may be drawn; the backward reads it in ``noise``."""
    x, slope = given["self"], (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
    given["noise"].copy_(torch.where(x > 0, 1.0, slope))
    return x * given["noise"]


def _of_bernoulli(given: Mapping[str, Any]) -> Any:
    p = given.get("p", given["self"])
    return (p >= 0.5).to(p.dtype) if isinstance(p, torch.Tensor) else 1.0


_DRAWN: Mapping[str, FixedDraw] = {
    "native_dropout": _without_dropout,
    "_fused_dropout": _without_dropout,
    "multinomial": _most_likely,
    "randperm": _turned,
    "rrelu_with_noise": _with_middle_slope,
    "rrelu_with_noise_": lambda given: given["self"].copy_(_with_middle_slope(given)),
}
# What the samples of other operations are filled with: 0.5, if nothing is said.
_MIDDLES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "bernoulli": _of_bernoulli,
    "normal": lambda given: given.get("mean", 0.0) + 0.5 * given.get("std", 1.0),
    "uniform": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "exponential": lambda given: 1 / given.get("lambd", 1.0),
    "log_normal": lambda given: 1.0,
    "geometric": lambda given: 1,
    "cauchy": lambda given: given.get("median", 0.0),
    "random": lambda given: given.get("from", 0),
    "randint": lambda given: given.get("low", 0),
    "randint_like": lambda given: given.get("low", 0),
    "poisson": lambda given: given["self"].round(),
    "binomial": lambda given: (given["count"] * given["prob"]).round(),
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
}
