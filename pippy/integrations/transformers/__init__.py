"""Hugging Face's Trainer, with the model on workers."""

import importlib

try:
    for _name in ("transformers", "accelerate"):
        importlib.import_module(_name)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed, and PipelineTrainer is a Trainer of transformers; install the extra: "
        'pip install -e ".[transformers]" in a clone of pippy'
    ) from error

from pippy.integrations.transformers.arguments import PipelineArguments
from pippy.integrations.transformers.trainer import PipelineTrainer

__all__ = ["PipelineArguments", "PipelineTrainer"]
