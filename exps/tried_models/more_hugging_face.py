"""Further architectures of transformers: mixtures of experts, state spaces, speech, vision, images with text."""

from typing import Any

import torch

from exps.tried_models.candidate import Candidate, numbers, words
from exps.tried_models.hugging_face import HuggingFace, transformers

WORDS = 61
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, **_TOKENS,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_SMALL,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}  # float64 has no grouped_mm
_DEEPSEEK: dict[str, Any] = {
    **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "first_k_dense_replace": 0, "topk_group": 1, "n_group": 1,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **_TOKENS,
}  # fmt: skip
_TWO_SIDES: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "decoder_start_token_id": 1, **_TOKENS,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_PICTURES: dict[str, Any] = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_hidden_layers": 4,
}  # fmt: skip
_QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
_WAVES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "apply_spec_augment": False, "num_labels": 3,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
    "final_dropout": 0.0, "classifier_proj_size": 8,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_d_state": 4,
    "mamba_chunk_size": 4,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
}


def _language() -> dict[str, Any]:
    return {"input_ids": words(4, 10, WORDS - 3) + 3, "labels": words(4, 10, WORDS - 3) + 3}


def _translation() -> dict[str, Any]:
    return {"input_ids": words(4, 10, WORDS - 3) + 3, "labels": words(4, 6, WORDS - 3) + 3}


def _classes() -> torch.Tensor:
    return torch.tensor([0, 1, 2, 0])


def _pictures() -> dict[str, Any]:
    return {"pixel_values": numbers(4, 3, 8, 8), "labels": _classes()}


def _large_pictures() -> dict[str, Any]:
    return {"pixel_values": numbers(4, 3, 32, 32), "labels": _classes()}


def _segments() -> dict[str, Any]:
    return {"pixel_values": numbers(4, 3, 32, 32), "labels": words(4, 1024, 3).view(4, 32, 32)}


def _waves() -> dict[str, Any]:
    return {"input_values": numbers(4, 400), "labels": _classes()}


def _images_and_text() -> dict[str, Any]:
    ids = torch.cat([torch.full((4, 4), 60), words(4, 10, 56) + 3], 1)
    kinds = torch.cat([torch.zeros(4, 6, dtype=torch.long), torch.ones(4, 8, dtype=torch.long)], 1)
    return {
        "input_ids": ids,
        "labels": words(4, 14, 56) + 3,
        "pixel_values": numbers(4, 3, 8, 8),
        "token_type_ids": kinds,
    }


def _without_kinds() -> dict[str, Any]:
    return {name: value for name, value in _images_and_text().items() if name != "token_type_ids"}


def _llava() -> Any:
    library = transformers()
    vision = library.CLIPVisionConfig(**_PICTURES, projection_dim=8)
    return library.LlavaConfig(text_config=library.LlamaConfig(**_SMALL), vision_config=vision, image_token_index=60)


def _paligemma() -> Any:
    library = transformers()
    text = library.GemmaConfig(**_SMALL, head_dim=4)
    vision = library.SiglipVisionConfig(**_PICTURES)
    return library.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=60, projection_dim=16, hidden_size=16
    )


def _captions() -> Any:
    library = transformers()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return library.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        library.ViTConfig(**_PICTURES),
        library.GPT2Config(vocab_size=WORDS, **sizes, **quiet),
        decoder_start_token_id=1,
        pad_token_id=0,
    )


MORE = {
    "qwen3 moe": HuggingFace(
        "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4}, _language
    ),
    "deepseek v3": HuggingFace("DeepseekV3ForCausalLM", _DEEPSEEK, _language),
    "gpt oss": HuggingFace("GptOssForCausalLM", {**_EXPERTS, "num_local_experts": 4, "head_dim": 4}, _language),
    "granite moe": HuggingFace("GraniteMoeForCausalLM", {**_EXPERTS, "num_local_experts": 4}, _language),
    "llama 4": HuggingFace(
        "Llama4ForCausalLM",
        {
            **_SMALL, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 24, "head_dim": 4,
            "attention_chunk_size": 32,
        },
        _language,
    ),
    "mamba 2": HuggingFace(
        "Mamba2ForCausalLM",
        {
            "vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4, "head_dim": 4, "num_heads": 8,
            "n_groups": 1, "chunk_size": 4, **_TOKENS,
        },
        _language,
    ),
    "rwkv": HuggingFace(
        "RwkvForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "context_length": 32, "attention_hidden_size": 16},
        _language,
    ),
    "recurrent gemma": HuggingFace(
        "RecurrentGemmaForCausalLM", {**_SMALL, "head_dim": 4, "lru_width": 16, "attention_window_size": 8}, _language
    ),
    "bamba": HuggingFace("BambaForCausalLM", {**_SMALL, **_MAMBA, "attn_layer_indices": [1]}, _language),
    "falcon h1": HuggingFace("FalconH1ForCausalLM", {**_SMALL, **_MAMBA, "mamba_d_ssm": 32}, _language),
    "lfm 2": HuggingFace("Lfm2ForCausalLM", {**_SMALL, "layer_types": ["conv", "full_attention"] * 2}, _language),
    "gemma 3": HuggingFace("Gemma3ForCausalLM", {**_SMALL, "head_dim": 4, "sliding_window": 4}, _language),
    "diff llama": HuggingFace("DiffLlamaForCausalLM", _SMALL, _language),
    "xlnet": HuggingFace(
        "XLNetLMHeadModel",
        {"vocab_size": WORDS, "d_model": 16, "n_layer": 4, "n_head": 4, "d_inner": 24, "dropout": 0.0},
        _language,
    ),
    "fnet": HuggingFace("FNetForMaskedLM", _ENCODER, _language),
    "modern bert": HuggingFace(
        "ModernBertForMaskedLM", {**_ENCODER, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, _language
    ),
    "longformer": HuggingFace("LongformerForMaskedLM", {**_ENCODER, "attention_window": 4, "sep_token_id": 3}, _language),
    "marian": HuggingFace("MarianMTModel", {**_TWO_SIDES, "max_position_embeddings": 32}, _translation),
    "m2m 100": HuggingFace("M2M100ForConditionalGeneration", {**_TWO_SIDES, "max_position_embeddings": 32}, _translation),
    "led": HuggingFace(
        "LEDForConditionalGeneration",
        {**_TWO_SIDES, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "attention_window": 4},
        _translation,
    ),
    "long t5": HuggingFace("LongT5ForConditionalGeneration", {**_T5, "local_radius": 3}, _translation),
    "switch": HuggingFace(
        "SwitchTransformersForConditionalGeneration",
        {
            **_T5, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
        _translation,
        fixed_batch=True,  # an expert has room for some tokens of the batch
    ),
    "wavlm": HuggingFace(
        "WavLMForSequenceClassification", {**_WAVES, "num_buckets": 8, "max_bucket_distance": 16}, _waves
    ),
    "ast": HuggingFace(
        "ASTForAudioClassification",
        {
            **_PICTURES, **_QUIET, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4,
        },
        lambda: {"input_values": numbers(4, 16, 8), "labels": _classes()},
    ),
    "beit": HuggingFace("BeitForImageClassification", {**_PICTURES, **_QUIET, "drop_path_rate": 0.0}, _pictures),
    "dino v2": HuggingFace("Dinov2ForImageClassification", {**_PICTURES, **_QUIET, "drop_path_rate": 0.0}, _pictures),
    "segformer": HuggingFace(
        "SegformerForSemanticSegmentation",
        {
            "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 2],
            "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 8, "num_labels": 3, "hidden_dropout_prob": 0.0,
            "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0,
        },
        _segments,
    ),
    "regnet": HuggingFace(
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16], "depths": [1, 1, 1], "groups_width": 4, "num_labels": 3},
        _large_pictures,
    ),
    "video mae": HuggingFace(
        "VideoMAEForVideoClassification",
        {**_PICTURES, **_QUIET, "num_frames": 2, "tubelet_size": 2},
        lambda: {"pixel_values": numbers(4, 2, 3, 8, 8), "labels": _classes()},
    ),
    "vit and gpt2": HuggingFace(
        "VisionEncoderDecoderModel",
        _captions,
        lambda: {"pixel_values": numbers(4, 3, 8, 8), "labels": words(4, 6, WORDS - 3) + 3},
    ),
    "llava": HuggingFace("LlavaForConditionalGeneration", _llava, _without_kinds),
    "paligemma": HuggingFace("PaliGemmaForConditionalGeneration", _paligemma, _images_and_text),
    "forecast by patches": HuggingFace(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
            "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 24, "prediction_length": 4, "head_dropout": 0.0,
            "ff_dropout": 0.0, "loss": "mse",
        },
        lambda: {"past_values": numbers(4, 16, 2), "future_values": numbers(4, 4, 2)},
    ),
}  # fmt: skip


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    return {name: Candidate(each.make, each.arguments, fixed_batch=each.fixed_batch) for name, each in MORE.items()}
