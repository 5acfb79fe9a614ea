"""The running statistics of a `DeferredBatchNorm` change when a step ends: no operation may want those of the call before."""

from torch import fx, nn

from pippy.ir.base.errors import SharedParameterError
from pippy.ir.base.source import excerpt_of
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.cut.uses import TensorUses, operations, uses_of_tensors
from pippy.ir.record.traced import Traced


def check_deferred_statistics(traced: Traced) -> None:
    """Refuse operations that read running statistics after the norm was called, in training."""
    norms = [each for value in traced.attributes.values() for each in _training_norms(value)]
    if norms:
        uses, nodes = uses_of_tensors(traced), operations(traced)
        for buffer in (buffer for norm in norms for buffer in norm.buffers()):
            if id(buffer) in uses:
                _check(uses[id(buffer)], nodes)


def _training_norms(value: object) -> list[DeferredBatchNorm]:
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return [each for each in modules if isinstance(each, DeferredBatchNorm) and each.training]


def _check(uses: TensorUses, nodes: list[fx.Node]) -> None:
    late = [number for number in uses.by_name if uses.by_leaf and number > min(uses.by_leaf)]
    if late:
        raise SharedParameterError(
            f"{uses.name!r} is read after the call of its DeferredBatchNorm, but the norm changes it only after all "
            "micro-batches:\n"
            f"{excerpt_of(nodes[late[0]])}\n"
            "What to do: read it before the norm is called, or do not convert this norm"
        )
