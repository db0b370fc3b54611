"""Model families whose layers, names of keys or names of tensors differ from Llama's; see models.family.

models/tensor_names.py has the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ridgeline.models.family import REQUIRED, SHAPE, ExpertKeys, Family

_CODE = {"auto_map": None}
"""Published checkpoints name Python files. They are not run: this repository has the code of the family."""
_PARTIAL = {**SHAPE, "partial_rotary_factor": 1.0}
_LAYER_NORM = {"layer_norm_eps": "rms_norm_eps"}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LEARNED = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": None,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_GLM = {
    **_PARTIAL,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.00000015625,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}
_EXAONE_NAMES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
_OPT_FIXED: dict[str, tuple[Any, ...]] = {
    "do_layer_norm_before": (True,),
    "enable_bias": (True,),
    "layer_norm_elementwise_affine": (True,),
}
_TRAINING = dict.fromkeys(("dropout", "attn_pdrop", "layerdrop", "init_std"))

MORE_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mimo": Family(
            "MiMo-7B (Xiaomi)",
            ("MiMoForCausalLM",),
            {
                **SHAPE,
                **_CODE,
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": 28,
                "layer_types": None,
            },
            {"qkv_bias": True},
            fixed={"attention_bias": (True, None), "use_mrope": (False, None)},
            windows="listed",
        ),
        "phi3": Family(
            "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini",
            ("Phi3ForCausalLM",),
            {
                **_PARTIAL,
                **_CODE,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
                "original_max_position_embeddings": 4096,
            },
            fixed={"lm_head_bias": (False, None), "full_attn_mod": (1, None), "interpolate_factor": (1, None)},
            windows="all",
        ),
        "olmo2": Family(
            "OLMo 2",
            ("Olmo2ForCausalLM",),
            {**SHAPE, "rms_norm_eps": 1e-5, "attention_bias": False},
            {"qk_norm": "all", "pre_norms": False, "post_norms": True},
        ),
        "granite": Family(
            "Granite 3",
            ("GraniteForCausalLM",),
            {
                **SHAPE,
                "attention_bias": False,
                "mlp_bias": False,
                "embedding_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
            numbers={
                "embed_scale": ("embedding_multiplier", 1),
                "query_scale": ("attention_multiplier", 1),
                "residual_scale": ("residual_multiplier", 1),
                "logit_scale": ("logits_scaling", -1),
            },
        ),
        "stablelm": Family(
            "StableLM 2 (1.6B) and StableLM 3B",
            ("StableLmForCausalLM",),
            {
                **_PARTIAL,
                **_CODE,
                "partial_rotary_factor": 0.25,
                "rms_norm_eps": 1e-5,
                "use_qkv_bias": False,
                "use_parallel_residual": False,
            },
            {"norm": "layer_bias"},
            fixed={"qk_layernorm": (False, None), "use_norm_bias": (True, None), "rotary_scaling_factor": (1.0, None)},
            renamed=_LAYER_NORM,
            switches={"qkv_bias": "use_qkv_bias", "parallel": "use_parallel_residual"},
        ),
        "glm": Family(
            "GLM-4 (9B, 2024)",
            ("GlmForCausalLM",),
            _GLM,
            {"out_bias": False, "interleaved": True},
        ),
        "glm4": Family(
            "GLM-4 (0414)",
            ("Glm4ForCausalLM",),
            _GLM,
            {"out_bias": False, "interleaved": True, "post_norms": True},
        ),
        "cohere2": Family(
            "Cohere 2 (Command R7B, Command A)",
            ("Cohere2ForCausalLM",),
            {
                **SHAPE,
                **_CODE,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "attention_bias": False,
                "logit_scale": 0.0625,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "layer_types": None,
            },
            {"norm": "layer", "parallel": True, "interleaved": True},
            fixed={
                "cache_implementation": ("hybrid", "static", None),
                "layer_switch": (4,),
                "order_of_interleaved_layers": ("local_attn_first",),
                "position_embedding_type": ("rope_gptj",),
                "rotary_pct": (1.0,),
                "use_qk_norm": (False, None),
                "use_embedding_sharing": (True,),
                "use_gated_activation": (True,),
                "use_parallel_block": (True,),
                "use_parallel_embedding": (True, False),
            },
            windows="listed",
            pattern=4,
            renamed=_LAYER_NORM,
            numbers={"logit_scale": ("logit_scale", 1)},
            rotated="windowed",
        ),
        "exaone": Family(
            "EXAONE 3 and 3.5",
            ("ExaoneForCausalLM", "LlamaForCausalLM"),
            {
                **SHAPE,
                **_CODE,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "embed_dropout": 0.0,
                "attention_bias": False,
            },
            renamed=_EXAONE_NAMES,
        ),
        "exaone4": Family(
            "EXAONE 4",
            ("Exaone4ForCausalLM",),
            {
                **SHAPE,
                **_CODE,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "layer_types": None,
            },
            {"qk_norm": "head", "pre_norms": False, "post_norms": True},
            fixed={"cache_implementation": ("hybrid", "static", None)},
            windows="listed",
            pattern=4,
            rotated="windowed",
        ),
        "gpt_oss": Family(
            "gpt-oss (20b, 120b)",
            ("GptOssForCausalLM",),
            {
                **SHAPE,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0,
                "attention_bias": True,
                "sliding_window": 128,
                "layer_types": None,
                "num_local_experts": REQUIRED,
                "num_experts_per_tok": REQUIRED,
            },
            {"sinks": True, "activation": "swiglu_clamped"},
            # The published files state some keys twice, by OpenAI's name and by that of transformers.
            fixed={
                "experts_per_token": (4,),
                "initial_context_length": (4096,),
                "swiglu_alpha": (1.702, None),
                "swiglu_limit": (7.0, None),
            },
            experts=ExpertKeys(("num_local_experts",), "intermediate_size", True, bias=True),
            windows="listed",
            pattern=2,
        ),
        "opt": Family(
            "OPT (125M, and 1.3B to 66B)",
            ("OPTForCausalLM",),
            {**_LEARNED, **_TRAINING, "intermediate_size": REQUIRED, "hidden_act": "relu", "word_embed_proj_dim": None},
            {"norm": "layer_bias", "gated": False, **_BIASES},
            fixed=_OPT_FIXED,
            renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
            rotated="none",
        ),
        "gpt2": Family(
            "GPT-2",
            ("GPT2LMHeadModel",),
            {**_LEARNED, **_TRAINING, "hidden_act": "gelu_new", "n_ctx": None},
            {"norm": "layer_bias", "gated": False, **_BIASES},
            fixed={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "reorder_and_upcast_attn": (False, True),
            },
            renamed=_GPT2_NAMES,
            rotated="none",
        ),
    }
)
