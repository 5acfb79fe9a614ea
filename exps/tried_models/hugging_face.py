"""Models of Hugging Face in tiny sizes, with random weights and no dropout, and arguments for them."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from exps.tried_models.candidate import Candidate

WORDS, ROWS, LENGTH = 61, 4, 10
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def transformers() -> Any:
    """The library, imported by the first model that needs it: that takes a second."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    return library


@dataclass(frozen=True)
class HuggingFace:
    """A class of model, how it is configured (by what, or by a config), and what it is called with."""

    name: str
    options: dict[str, Any] | Callable[[], Any]
    arguments: Callable[[], dict[str, Any]]
    fixed_batch: bool = False

    def make(self) -> torch.nn.Module:
        """The model, in float64."""
        torch.manual_seed(0)
        kind = getattr(transformers(), self.name)
        config = self.options() if callable(self.options) else kind.config_class(**self.options)
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

_GPT: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "use_cache": False,
    **_TOKENS,
}
_DECODER: dict[str, Any] = {**_GROUPED, "pad_token_id": 0}
_TWO_SIDES: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "dropout": 0.0, "use_cache": False, "decoder_start_token_id": 1, **_TOKENS,
}  # fmt: skip


def _heard() -> dict[str, Any]:
    waves = torch.randn(ROWS, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return {"input_values": waves, "labels": torch.tensor([0, 1, 2, 0])}


def _spans() -> dict[str, Any]:
    ends = torch.tensor([3, 4, 5, 6])
    return {"input_ids": _words(), "attention_mask": _mask(), "start_positions": ends - 2, "end_positions": ends}


def _tags() -> dict[str, Any]:
    return {"input_ids": _words(), "attention_mask": _mask(), "labels": _words() % 3}


def _choices() -> dict[str, Any]:
    words = torch.stack([_words(), _words().flip(1)], 1)
    return {"input_ids": words, "labels": torch.tensor([0, 1, 1, 0])}


_WAVES: dict[str, Any] = {
    **_SMALL, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "apply_spec_augment": False, "num_labels": 3,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
    "final_dropout": 0.0, "classifier_proj_size": 8,
}  # fmt: skip

# Tried beside those above; these are not in the tests.
OTHERS = {
    "gpt2, mask": HuggingFace("GPT2LMHeadModel", MODELS["gpt2"].options, _masked),
    "gpt2, dropout": HuggingFace("GPT2LMHeadModel", _GPT, _causal),
    "gpt neo x": HuggingFace("GPTNeoXForCausalLM", {**_SMALL, "use_cache": False, **_TOKENS}, _masked),
    "gpt j": HuggingFace("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}, _causal),
    "opt": HuggingFace(
        "OPTForCausalLM",
        {
            **_SMALL,
            "ffn_dim": 24,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
            "layerdrop": 0.0,
            "use_cache": False,
            **_TOKENS,
        },
        _masked,
    ),
    "bloom": HuggingFace(
        "BloomForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 4, "use_cache": False, **_TOKENS},
        _masked,
    ),
    "falcon": HuggingFace("FalconForCausalLM", {**_DECODER, "multi_query": True}, _causal),
    "phi": HuggingFace("PhiForCausalLM", _DECODER, _masked),
    "phi 3": HuggingFace("Phi3ForCausalLM", _DECODER, _masked),
    "gemma": HuggingFace("GemmaForCausalLM", {**_DECODER, "head_dim": 4}, _masked),
    "gemma 2": HuggingFace("Gemma2ForCausalLM", {**_DECODER, "head_dim": 4, "sliding_window": 4}, _masked),
    "qwen3": HuggingFace("Qwen3ForCausalLM", {**_DECODER, "head_dim": 4}, _masked),
    "stable lm": HuggingFace("StableLmForCausalLM", _DECODER, _causal),
    "mamba": HuggingFace(
        "MambaForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 4, "use_cache": False, **_TOKENS},
        _causal,
    ),
    "bert, question": HuggingFace("BertForQuestionAnswering", {**_SMALL, **_QUIET}, _spans),
    "bert, tags": HuggingFace("BertForTokenClassification", {**_SMALL, **_QUIET, "num_labels": 3}, _tags),
    "bert, choices": HuggingFace("BertForMultipleChoice", {**_SMALL, **_QUIET}, _choices),
    "roberta": HuggingFace("RobertaForMaskedLM", {**_SMALL, **_QUIET, **_TOKENS}, _masked),
    "distilbert": HuggingFace(
        "DistilBertForSequenceClassification",
        {"vocab_size": WORDS, "dim": 16, "hidden_dim": 24, "n_layers": 4, "n_heads": 4, "num_labels": 3},
        _classes,
    ),
    "albert": HuggingFace("AlbertForMaskedLM", {**_SMALL, "embedding_size": 8}, _masked),
    "electra": HuggingFace(
        "ElectraForSequenceClassification", {**_SMALL, **_QUIET, "embedding_size": 8, "num_labels": 3}, _classes
    ),
    "deberta v2": HuggingFace(
        "DebertaV2ForMaskedLM",
        {**_SMALL, **_QUIET, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _masked,
    ),
    "bart": HuggingFace("BartForConditionalGeneration", _TWO_SIDES, _translation),
    "pegasus": HuggingFace("PegasusForConditionalGeneration", _TWO_SIDES, _translation),
    "wav2vec 2": HuggingFace("Wav2Vec2ForSequenceClassification", _WAVES, _heard),
    "hubert": HuggingFace("HubertForSequenceClassification", _WAVES, _heard),
    "deit": HuggingFace(
        "DeiTForImageClassification", {**_PICTURES, **_QUIET, "num_hidden_layers": 4, "num_labels": 3}, _pictures
    ),
    "convnext": HuggingFace(
        "ConvNextForImageClassification",
        {"hidden_sizes": [4, 8, 8], "depths": [1, 1, 2], "num_stages": 3, "patch_size": 2, "num_labels": 3},
        _pictures,
    ),
    "resnet": HuggingFace(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16], "depths": [1, 1, 1], "num_labels": 3},
        _pictures,
    ),
    "swin": HuggingFace(
        "SwinForImageClassification",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "num_labels": 3,
        },
        _pictures,
    ),
}


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    return {
        name: Candidate(each.make, each.arguments, fixed_batch=each.fixed_batch)
        for name, each in {**MODELS, **OTHERS}.items()
    }
