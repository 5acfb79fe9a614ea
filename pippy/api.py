"""The public names: what `import pippy` offers."""

import pippy.errors as errors
from pippy.drivers.batch.specs import ChunkSpec, Max, Mean, MicroBatches, Min, Replicate, Sum, TensorChunkSpec
from pippy.drivers.driver.data import IndexLoader
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.drivers import (
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    PipelineDriverInterleaved1F1B,
)
from pippy.drivers.engines.cluster import Cluster, current_cluster
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.engines.open_cluster import cluster
from pippy.drivers.files.contents import load_checkpoint
from pippy.ir.base.errors import PippyError, PippyWarning
from pippy.ir.base.marks import PipeSplitWrapper, SplitPoint, annotate_split_points, clear_split_points, pipe_split
from pippy.ir.cut.params import MultiUseParameterConfig
from pippy.ir.loss.loss_function import LossWrapper, TrivialLossWrapper
from pippy.ir.pipe import Pipe, verify
from pippy.ir.run.batch_norm import DeferredBatchNorm, convert_deferred_batch_norm
from pippy.ir.run.forward_state import is_checkpointing, is_recomputing
from pippy.ir.run.layers import LayerSpec, TiedLayerSpec
from pippy.ir.run.random_state import keyed_random
from pippy.ir.trace.tracer import PipeTracer
from pippy.pipeline import pipeline
from pippy.training.evaluation import evaluate
from pippy.training.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from pippy.training.reader import RepeatingLoader
from pippy.training.result import StepReport, TrainingResult
from pippy.training.train import train

__all__ = [
    "CSVLogger",
    "ChunkSpec",
    "Cluster",
    "DeferredBatchNorm",
    "IndexLoader",
    "LayerSpec",
    "Logger",
    "LossWrapper",
    "Max",
    "Mean",
    "MicroBatches",
    "Min",
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
    "RepeatingLoader",
    "Replicate",
    "SplitPoint",
    "StepReport",
    "Sum",
    "TensorBoardLogger",
    "TensorChunkSpec",
    "TiedLayerSpec",
    "TrainingResult",
    "TrivialLossWrapper",
    "WandbLogger",
    "annotate_split_points",
    "clear_split_points",
    "cluster",
    "convert_deferred_batch_norm",
    "current_cluster",
    "errors",
    "evaluate",
    "is_checkpointing",
    "is_recomputing",
    "keyed_random",
    "load_checkpoint",
    "local_cluster",
    "pipe_split",
    "pipeline",
    "train",
    "verify",
]
