"""Models of Hugging Face in tiny sizes, with random weights and no dropout, and arguments for them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

WORDS, ROWS, LENGTH = 61, 4, 10
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def transformers() -> Any:
    """The library, imported by the first test that needs it: it takes a second of each process that collects the tests."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("transformers", reason="transformers is in the extra 'dev'")
    library.logging.set_verbosity_error()
    return library


@dataclass(frozen=True)
class HuggingFace:
    """A class of model, how it is configured, and what it is called with beside token ids."""

    name: str
    options: dict[str, Any]
    arguments: Callable[[], dict[str, Any]]
    fixed_batch: bool = False

    def make(self) -> torch.nn.Module:
        """The model, in float64."""
        torch.manual_seed(0)
        kind = getattr(transformers(), self.name)
        config = kind.config_class(**self.options)
        return kind(config).double()


def _words(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))


def _mask() -> torch.Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 7:] = 0
    return mask


def _causal() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": _words()}


def _masked() -> dict[str, Any]:
    return {**_causal(), "attention_mask": _mask()}


def _classes() -> dict[str, Any]:
    return {"input_ids": _words(), "attention_mask": _mask(), "labels": torch.tensor([0, 1, 2, 0])}


def _pictures() -> dict[str, Any]:
    pixels = torch.randn(ROWS, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 0])}


def _translation() -> dict[str, Any]:
    return {"input_ids": _words(), "attention_mask": _mask(), "labels": _words(length=6)}


def _speech() -> dict[str, Any]:
    heard = torch.randn(ROWS, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return {"input_features": heard, "labels": _words(length=6)}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _words(), "pixel_values": _pictures()["pixel_values"], "return_loss": True}


_GROUPED = {**_SMALL, "num_key_value_heads": 2, "use_cache": False, **_TOKENS}
_PICTURES = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}

MODELS = {
    "gpt2": HuggingFace(
        "GPT2LMHeadModel",
        {
            "vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32, "use_cache": False,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TOKENS,
        },
        _causal,
    ),
    "llama": HuggingFace("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": False}, _masked),
    "llama, tied": HuggingFace("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}, _causal),
    "mistral": HuggingFace("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, _masked),
    "qwen2": HuggingFace("Qwen2ForCausalLM", _GROUPED, _causal),
    "mixtral": HuggingFace(
        "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 3, "experts_implementation": "eager"}, _causal
    ),
    "bert, masked": HuggingFace("BertForMaskedLM", {**_SMALL, **_QUIET}, _masked),
    "bert, classes": HuggingFace("BertForSequenceClassification", {**_SMALL, **_QUIET, "num_labels": 3}, _classes),
    "t5": HuggingFace(
        "T5ForConditionalGeneration",
        {
            "vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
            "use_cache": False, "decoder_start_token_id": 0,
        },
        _translation,
    ),
    "whisper": HuggingFace(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8,
            "max_source_positions": 8, "max_target_positions": 16, "dropout": 0.0, "use_cache": False,
            "decoder_start_token_id": 1, **_TOKENS,
        },
        _speech,
    ),
    "vit": HuggingFace(
        "ViTForImageClassification", {**_PICTURES, **_QUIET, "num_hidden_layers": 4, "num_labels": 3}, _pictures
    ),
    "clip": HuggingFace(
        "CLIPModel",
        {
            "text_config": {**_SMALL, "num_hidden_layers": 2, "eos_token_id": 2},
            "vision_config": {**_PICTURES, "num_hidden_layers": 2},
            "projection_dim": 8,
        },
        _pairs,
        fixed_batch=True,  # its loss compares the rows of a batch with one another, in a loop over them
    ),
}  # fmt: skip
