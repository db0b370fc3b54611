"""The supported model families as data, see models.family; and keys of config.json that are known in every family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ridgeline.models.family import REQUIRED, SHAPE, ExpertKeys, Family
from ridgeline.models.more_families import MORE_FAMILIES

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    **SHAPE,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA_NUMBERS = {"query_scale": ("query_pre_attn_scalar", -0.5)}
_GEMMA_TRAITS = {"norm_offset": True, "post_norms": True}
_GEMMA_FIXED = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (None, False),
    "cache_implementation": ("hybrid", "static", None),
}
_QWEN_EXPERTS = {
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": REQUIRED,
    "moe_intermediate_size": REQUIRED,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_COUNT = ("num_experts", "num_local_experts")
"""Files of new transformers versions have the second key instead of the first."""

# Families whose layers share keys and values, but that need more than that: model_type -> what is missing.
_GEMMA_3N = "AltUp, LAuReL, embeddings of each layer and sparse activations"
_GEMMA_4 = "embeddings of each layer, norms of values, and heads and rotary embeddings of two kinds"
WITHOUT_PARTS: Mapping[str, str] = MappingProxyType(
    {"gemma3n": _GEMMA_3N, "gemma3n_text": _GEMMA_3N, "gemma4": _GEMMA_4, "gemma4_text": _GEMMA_4}
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "Llama 2, 3, 3.1, 3.2 and models of its layout (SmolLM, Falcon 3)",
            ("LlamaForCausalLM",),
            {**SHAPE, "attention_bias": False, "mlp_bias": False},
            fixed={"rope_interleaved": (False, None), "pretraining_tp": (1, None), "layer_types": (None,)},
        ),
        "mistral": Family(
            "Mistral",
            ("MistralForCausalLM",),
            {**SHAPE, "sliding_window": 4096},
            fixed={"layer_types": (None,)},
            windows="all",
        ),
        "qwen2": Family(
            "Qwen2 and Qwen2.5",
            ("Qwen2ForCausalLM",),
            {**SHAPE, **_QWEN_WINDOW},
            {"qkv_bias": True},
            fixed={"use_mrope": (False, None)},
            windows="listed",
        ),
        "qwen3": Family(
            "Qwen3",
            ("Qwen3ForCausalLM",),
            {**SHAPE, **_QWEN_WINDOW, "head_dim": 128, "attention_bias": False},
            {"qk_norm": "head"},
            windows="listed",
        ),
        "mixtral": Family(
            "Mixtral",
            ("MixtralForCausalLM",),
            {**SHAPE, "sliding_window": None, "num_local_experts": REQUIRED, "num_experts_per_tok": REQUIRED},
            fixed={"layer_types": (None,)},
            experts=ExpertKeys(("num_local_experts",), "intermediate_size", True),
            windows="all",
        ),
        "qwen3_moe": Family(
            "Qwen3 with experts (Qwen3-30B-A3B)",
            ("Qwen3MoeForCausalLM",),
            {**SHAPE, **_QWEN_WINDOW, **_QWEN_EXPERTS, "attention_bias": False},
            {"qk_norm": "head"},
            fixed={"layer_types": (None,)},
            experts=ExpertKeys(_COUNT, "moe_intermediate_size", "norm_topk_prob"),
            windows="all",
        ),
        "qwen2_moe": Family(
            "Qwen2 with experts (Qwen1.5-MoE-A2.7B)",
            ("Qwen2MoeForCausalLM",),
            {**SHAPE, **_QWEN_WINDOW, **_QWEN_EXPERTS, "shared_expert_intermediate_size": REQUIRED},
            {"qkv_bias": True},
            fixed={"qkv_bias": (True,)},
            experts=ExpertKeys(_COUNT, "moe_intermediate_size", "norm_topk_prob", "shared_expert_intermediate_size"),
            windows="listed",
        ),
        "olmoe": Family(
            "OLMoE",
            ("OlmoeForCausalLM",),
            {
                **SHAPE,
                "num_experts": None,
                "num_local_experts": None,
                "num_experts_per_tok": REQUIRED,
                "norm_topk_prob": False,
                "attention_bias": False,
            },
            {"qk_norm": "all"},
            fixed={"clip_qkv": (None,)},
            experts=ExpertKeys(_COUNT, "intermediate_size", "norm_topk_prob"),
        ),
        "gemma2": Family(
            "Gemma 2",
            ("Gemma2ForCausalLM",),
            {
                **_GEMMA,
                "vocab_size": 256_000,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            _GEMMA_TRAITS,
            fixed=_GEMMA_FIXED,
            numbers=_GEMMA_NUMBERS,
            scaled_embedding=True,
            windows="listed",
            pattern=2,
        ),
        "gemma3_text": Family(
            "Gemma 3 (text)",
            ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            {
                **_GEMMA,
                "vocab_size": 262_208,
                "max_position_embeddings": 131_072,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "sliding_window_pattern": 6,
            },
            {**_GEMMA_TRAITS, "qk_norm": "head"},
            fixed=_GEMMA_FIXED,
            numbers=_GEMMA_NUMBERS,
            scaled_embedding=True,
            windows="listed",
            pattern=6,
        ),
        **MORE_FAMILIES,
        # num_kv_shared_layers: as in Gemma 3n. cla_share_factor: as in Hunyuan-Large, counted among layers of one kind.
        "ridgeline": Family(
            "models of Llama's layout with windows and shared caches",
            ("RidgelineForCausalLM",),
            {
                **SHAPE,
                "attention_bias": False,
                "mlp_bias": False,
                "sliding_window": None,
                "max_window_layers": 0,
                "layer_types": None,
                "num_kv_shared_layers": 0,
                "cla_share_factor": 1,
            },
            windows="listed",
        ),
    }
)

MTP = "num_nextn_predict_layers"
"""Key of config.json: layers for multi-token prediction in the checkpoint."""

# Keys of config.json that do not affect a text decoder: bookkeeping, training, other tools.
HARMLESS = frozenset(
    (
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "draft_vocabulary",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "id2label",
        "label2id",
        "problem_type",
        "chunk_size_feed_forward",
        "torchscript",
        "bad_words_ids",
        "name_or_path",
        "task_specific_params",
        "finetuning_task",
        "tokenizer_class",
        "prefix",
        "is_llama_config",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
        MTP,
    )
)
HARMLESS_PREFIXES = ("_", "unsloth", "transformers", "summary_")

# Families with experts whose attention or routing is another one: model_type -> the reason for the refusal.
_LATENT = (
    "its attention caches latent vectors (MLA, multi-head latent attention), which the paged KV cache does not store"
)
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "cohere": "its norms of each head, which other heads do not share, are not built (Cohere 2 is supported)",
    }
)

# Multimodal models whose text decoder is supported: model_type -> (key of the text part, keys of the other parts).
WRAPPERS: Mapping[str, tuple[str, frozenset[str]]] = MappingProxyType(
    {
        "gemma3": (
            "text_config",
            frozenset(
                (
                    "vision_config",
                    "boi_token_index",
                    "eoi_token_index",
                    "image_token_index",
                    "mm_tokens_per_image",
                    "boi_token_id",
                    "eoi_token_id",
                    "image_token_id",
                    "tie_word_embeddings",
                )
            ),
        )
    }
)

# Keys that may be present in any family, with their supported values.
FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "quantization_config": (None,),
        "compression_config": (None,),
        "partial_rotary_factor": (None, 1, 1.0),
        "is_encoder_decoder": (None, False),
        "add_cross_attention": (None, False),
        "cross_attention_hidden_size": (None,),
        "is_decoder": (None, False, True),
        "tie_encoder_decoder": (None, False),
        "pruned_heads": (None, {}),
        "sliding_window": (None,),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "auto_map": (None, {}),
    }
)


def supported() -> str:
    """The labels and architectures of all families, for messages."""
    return "; ".join(f"{family.label} ({', '.join(family.architectures)})" for family in FAMILIES.values())
