"""A graph compiler for pipeline parallelism in PyTorch.

Mark where a model is cut, call `pipeline(model, loss_fn)`, print the Pipe, run it.
"""

from pippy.ir import errors
from pippy.ir.errors import PippyError, PippyWarning
from pippy.ir.loss import LossWrapper, TrivialLossWrapper
from pippy.ir.marks import PipeSplitWrapper, SplitPoint, annotate_split_points, clear_split_points, pipe_split
from pippy.ir.params import MultiUseParameterConfig
from pippy.ir.pipe import Pipe
from pippy.ir.trace import PipeTracer
from pippy.ir.verify import verify
from pippy.pipeline import pipeline

__all__ = [
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSplitWrapper",
    "PipeTracer",
    "PippyError",
    "PippyWarning",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "clear_split_points",
    "errors",
    "pipe_split",
    "pipeline",
    "verify",
]
