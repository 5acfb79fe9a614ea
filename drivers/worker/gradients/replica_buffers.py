"""The buffers of stages that other replicas of the pipeline hold, too: a step leaves them alike, or fails.

Each replica sees a part of the mini-batch. A `DeferredBatchNorm` counts all of it: the replicas tell one another what
their norms have noted, and at the end of a step each counts the same. Other buffers must not change in a step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from pippy.ir.base.errors import StageError
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.in_place import snapshot_of_buffers


class ReplicaBuffers:
    """The buffers of some stages, but those that deferred batch norms count in, by the name of the stage and of the buffer.

    >>> stages = {"submod_0": nn.BatchNorm1d(2)}
    >>> with ReplicaBuffers(stages).unchanged():
    ...     stages["submod_0"](torch.ones(2, 2))
    Traceback (most recent call last):
    pippy.ir.base.errors.StageError: submod_0 changed the buffers 'running_mean', 'running_var', 'num_batches_tracked', ...
    """

    def __init__(self, stages: Mapping[str, nn.Module]) -> None:
        self.modules = [
            (stage, f"{path}.".lstrip("."), module)
            for stage, root in stages.items()
            for path, module in root.named_modules()
            if module._buffers and not isinstance(module, DeferredBatchNorm)
        ]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context that raises at its end if a buffer was changed, or replaced by another tensor."""
        before = snapshot_of_buffers(dict(self._buffers()))
        yield
        changed = before.changed(dict(self._buffers()))
        if changed:
            stage = changed[0][0]
            names = ", ".join(repr(name) for other, name in changed if other == stage)
            raise StageError(
                f"{stage} changed the buffers {names}, so each replica of the pipeline would change its own copy by "
                "its part of the mini-batch; do not change buffers in forward, or leave replicas= out (for batch "
                "norms, use convert_deferred_batch_norm)"
            )

    def _buffers(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for stage, path, module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (stage, f"{path}{name}"), buffer
