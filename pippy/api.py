"""The public names: what `import pippy` offers."""

from pippy.drivers.chunk_specs import ChunkSpec, Mean, MicroBatches, Replicate, Sum, TensorChunkSpec
from pippy.drivers.cluster import Cluster, current_cluster, local_cluster
from pippy.drivers.driver import (
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    PipelineDriverInterleaved1F1B,
)
from pippy.drivers.driver_base import PipelineDriverBase
from pippy.drivers.torchrun import cluster
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
    "ChunkSpec",
    "Cluster",
    "LossWrapper",
    "Mean",
    "MicroBatches",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSplitWrapper",
    "PipeTracer",
    "PipelineDriver",
    "PipelineDriver1F1B",
    "PipelineDriverBase",
    "PipelineDriverFillDrain",
    "PipelineDriverInterleaved1F1B",
    "PippyError",
    "PippyWarning",
    "Replicate",
    "SplitPoint",
    "Sum",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "annotate_split_points",
    "clear_split_points",
    "cluster",
    "current_cluster",
    "errors",
    "local_cluster",
    "pipe_split",
    "pipeline",
    "verify",
]
