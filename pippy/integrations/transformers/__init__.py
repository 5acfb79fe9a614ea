"""Hugging Face's Trainer, with the model on workers."""

from pippy.integrations.transformers.arguments import PipelineArguments
from pippy.integrations.transformers.trainer import PipelineTrainer

__all__ = ["PipelineArguments", "PipelineTrainer"]
