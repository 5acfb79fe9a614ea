"""`convert_deferred_batch_norm`: the batch norms of a model become deferred ones."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from pippy.ir.base.errors import BatchNormError
from pippy.ir.base.public_calls import placing_words
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@placing_words()
def convert_deferred_batch_norm(model: nn.Module) -> nn.Module:
    """Make all batch norms of a model update their running statistics once for each mini-batch, and return the model.

    The modules stay the same objects, with their parameters, buffers, hooks and flags; their class becomes
    `DeferredBatchNorm`. Convert the model before the Pipe is made, or after. Batch norms of other classes than
    `nn.BatchNorm1d`, `2d` and `3d` are refused, if they have running statistics.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    >>> convert_deferred_batch_norm(model)
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
      (1): DeferredBatchNorm(4, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
      (2): ReLU()
    )
    """
    norms = {path: each for path, each in model.named_modules() if isinstance(each, _BatchNorm)}
    refused = [f"{path!r}: {reason}" for path, each in norms.items() if (reason := _reason_against(each))]
    if refused:
        raise BatchNormError(
            "batch norms that cannot be converted:\n  " + "\n  ".join(refused) + "\nNothing was converted. What to do "
            "without: convert the other parts of the model one by one, convert_deferred_batch_norm(model.part)"
        )
    for each in norms.values():
        if type(each) in _CONVERTED:
            each.replaced = type(each)  # type: ignore[assignment]
            each.__class__ = DeferredBatchNorm
    return model


def _reason_against(norm: _BatchNorm) -> str | None:
    """Why a batch norm cannot be converted; None if it can be, or need not be."""
    name = type(norm).__name__
    if isinstance(norm, LazyModuleMixin):
        return f"a {name} does not know its channels yet; call the model once before"
    if isinstance(norm, DeferredBatchNorm) or norm.running_mean is None:
        return None
    if is_parametrized(norm):
        return "it is parametrized; convert it before"
    if isinstance(norm, nn.SyncBatchNorm):
        return f"a {name} normalizes over several processes; take nn.BatchNorm1d, 2d or 3d"
    if type(norm) not in _CONVERTED:
        return (
            f"{name} is a class of its own, and may compute anything; derive it from pippy.DeferredBatchNorm, and let its "
            "forward call super().forward"
        )
    return "its forward was replaced by a function; put that back" if "forward" in vars(norm) else None
