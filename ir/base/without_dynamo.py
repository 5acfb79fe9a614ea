"""What of torch would import torch.compile at its first call, without that import: modes, optimizers, checkpointed functions.

torch keeps some of its own functions from being compiled, and imports torch._dynamo to do so: 330 modules, 0.6 seconds of
processor time and 70 MB in each worker. Where nothing has imported torch._dynamo, nothing is compiled, and the functions need
no protection. As soon as something has imported it, they are torch's own again.
"""

import functools
import sys
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

_DISABLED = "__dynamo_disable"  # where torch keeps what it calls in place of a function that is not to be compiled
_wrapped: Any = getattr(sys.modules[Optimizer.__module__], "_use_grad_for_differentiable", lambda step: step)
_IMPORTS = _wrapped(lambda _: None).__code__  # the code of the steps of torch's optimizers, which imports torch._dynamo


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` in which nothing is compiled. Its first operation imports nothing.

    A torch without ``_should_skip_dynamo`` works, and imports torch._dynamo.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def import_no_dynamo(function: Any) -> None:
    """Have a function that torch wraps in ``torch._disable_dynamo`` call what it wraps, until torch._dynamo is there.

    >>> import_no_dynamo(torch.optim.Optimizer.zero_grad)
    """
    plain: Any = getattr(function, "__wrapped__", function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return plain(*args, **kwargs)
        vars(plain).pop(_DISABLED, None)  # torch makes its own
        return function(*args, **kwargs)

    vars(plain).setdefault(_DISABLED, call)


def optimizers_import_no_dynamo() -> None:
    """Have torch's optimizers, and those that inherit from them, work without torch._dynamo until it is there.

    A class of which there was an optimizer before has imported it.
    """
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
        import_no_dynamo(method)
    for each in list[Any](Optimizer.__subclasses__()):
        if getattr(each.step, "__code__", None) is _IMPORTS:
            each.step = _step(each.step)


def _step(step: Any) -> Any:
    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step.__wrapped__(self, *args, **kwargs)

    return run
