"""The models of Hugging Face that are tested: those of exps/tried_models, where transformers is installed."""

import importlib.util

import pytest

from exps.tried_models.hugging_face import MODELS, ROWS, WORDS, transformers

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is in the extra 'dev'", allow_module_level=True)

__all__ = ["MODELS", "ROWS", "WORDS", "transformers"]
