"""Reading of config.json: published forms are understood, everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.models.config import read_model, read_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}
# What the hub holds for Gemma 3 4B: the text part leaves most to the family's defaults.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
SMOLLM = {
    **{key: LLAMA[key] for key in ("architectures", "model_type", "hidden_act", "torch_dtype")},
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    "vocab_size": 49152,
}


def test_llama31_8b():
    spec = read_spec(LLAMA)
    assert (spec.d_model, len(spec.layers), spec.max_len, spec.tied) == (4096, 32, 131072, False)
    layer = spec.layers[0]
    assert (layer.n_heads, layer.n_kv_heads, layer.head_dim, layer.window) == (32, 8, 128, None)
    assert (layer.rope.scaling, layer.rope.theta, layer.rope.original_max_len) == ("llama3", 500000.0, 8192)
    assert spec.eos_ids == (128001, 128008, 128009)
    assert spec.params == 8_030_261_248


def test_smollm_135m():
    spec = read_spec(SMOLLM)
    assert spec.params == 134_515_008 and spec.tied


def test_qwen25_keeps_its_unused_window_out():
    spec = read_spec(QWEN25)
    assert spec.qkv_bias and not spec.out_bias
    assert all(layer.window is None for layer in spec.layers)
    assert spec.params == 494_032_768


def test_gemma3_inside_a_multimodal_config():
    spec = read_spec(GEMMA3_4B)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [None, 1024]
    assert spec.layers[5].rope.scaling == "linear" and spec.layers[5].rope.theta == 1_000_000.0
    assert spec.layers[0].rope.scaling == "none" and spec.layers[0].rope.theta == 10_000.0
    assert (spec.vocab_size, spec.tied, spec.dtype, spec.query_scale) == (262_208, True, "bfloat16", 256**-0.5)
    assert spec.eos_ids == (1, 106)
    assert spec.params == 3_880_263_168


GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "vocab_size": 50257,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": None,
    "sliding_window": 2047,
    "vocab_size": 32064,
}
PHI4 = {
    **PHI3,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "sliding_window": None,
    "vocab_size": 100352,
}


@pytest.mark.parametrize(
    ("config", "params"), [(GPT2, 124_439_808), (PHI3, 3_821_079_552), (PHI4, 14_659_507_200)], ids=["GPT-2", "3", "4"]
)
def test_published_sizes(config: dict[str, object], params: int):
    """As the model cards count them."""
    assert read_spec(config).params == params


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_embd": None}, "n_embd is None: it must be a positive integer"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"activation_function": "tanh"}, "activation 'tanh' is not supported"),
    ],
)
def test_keys_are_named_as_the_family_names_them(change: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        read_spec({**GPT2, **change})


def test_layers_without_rotary_embedding():
    """EXAONE 4: global layers, in a model with windows."""
    sizes = {key: PHI3[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    exaone = {**sizes, "model_type": "exaone4", "num_hidden_layers": 4, "max_position_embeddings": 8192}
    hybrid = read_spec({**exaone, "sliding_window": 1024, "sliding_window_pattern": "LLGL"}).layers
    assert [layer.window for layer in hybrid] == [1024, 1024, None, 1024]
    assert [layer.rope.scaling for layer in hybrid] == ["none", "none", "identity", "none"]
    whole = read_spec({**exaone, "sliding_window": None, "sliding_window_pattern": None}).layers
    assert {(layer.window, layer.rope.scaling) for layer in whole} == {(None, "none")}
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LLX'"):
        read_spec({**exaone, "sliding_window_pattern": "LLX"})


def test_window_as_wide_as_the_context_is_no_window():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_scaling": None}
    mistral.pop("pretraining_tp")
    assert read_spec({**mistral, "sliding_window": 4096}).layers[0].window == 4096
    assert read_spec({**mistral, "sliding_window": 131072}).layers[0].window is None
    assert read_spec({**mistral, "sliding_window": None}).layers[0].window is None


def test_yarn_stretches_the_context():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = read_spec({**QWEN25, "rope_scaling": rope})
    assert spec.max_len == 131072
    assert spec.layers[0].rope.attention_factor == pytest.approx(1.1386294)


SIBLING = {
    **{key: value for key, value in LLAMA.items() if key not in ("pretraining_tp", "rope_scaling")},
    "architectures": ["RidgelineForCausalLM"],
    "model_type": "ridgeline",
    "num_hidden_layers": 6,
}


def sources(**keys: object) -> list[int | None]:
    return [layer.share_from for layer in read_spec({**SIBLING, **keys}).layers]


def test_layers_that_share_keys_and_values():
    """Groups, and last layers that read the last layer of their kind before them."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    windows = {"sliding_window": 1024, "layer_types": kinds}
    assert sources() == [None] * 6
    assert sources(cla_share_factor=2) == [None, 0, None, 2, None, 4]
    assert sources(cla_share_factor=3, **windows) == [None, 0, None, 0, None, 2]
    assert sources(num_kv_shared_layers=3) == [None, None, None, 2, 2, 2]
    assert sources(num_kv_shared_layers=3, **windows) == [None, None, None, 1, 1, 2]
    assert sources(num_kv_shared_layers=2, cla_share_factor=2) == [None, 0, None, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6.*at most 5"),
        ({"cla_share_factor": 7}, "cla_share_factor 7.*at most 6"),
        ({"cla_share_factor": 0}, "cla_share_factor is 0"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers is True"),
        (
            {
                "num_kv_shared_layers": 3,
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
            },
            "Layer 5 with a window of 8 .*first 3 layers.*fewer layers share",
        ),
    ],
)
def test_sharing_that_no_layer_can_serve_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        read_spec({**SIBLING, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}, "gemma3n.*AltUp, LAuReL"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "gemma4_text.*norms of values"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (
            {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},
            "FalconForCausalLM.*Supported: Llama.*Gemma3",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, "Deepseek.*MLA.*latent"),
        ({"architectures": None, "model_type": None}, "model_type None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "only for Gemma 3"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.*aqlm"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
        ({"hidden_act": "relu"}, "relu"),
        ({"torch_dtype": "float64"}, "float64"),
    ],
)
def test_refused_by_name(change, said):
    with pytest.raises(UnsupportedModel, match=f"(?s){said}"):
        read_spec({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs the key 'factor'"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "'longrope' needs the key 'short_factor'"),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
            "'longrope' must list 64 numbers",
        ),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05: it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0: it must be a number above 0"),
        ({"rope_theta": True}, "rope_theta is True, which has the wrong type"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', which has the wrong type"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
            "rope_scaling give rotary frequencies that are not positive finite numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -2}},
            "rope_scaling give rotary frequencies that are not positive finite numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": float("inf")}},
            "rotary frequencies that are not positive finite numbers",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "abc"}}, "value of the wrong type: .*'abc'"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "value of the wrong type"),
        ({"architectures": 5}, "value of the wrong type"),
        ({"hidden_act": ["silu"]}, "value of the wrong type"),
        ({"bos_token_id": []}, "value of the wrong type"),
        ({"quantization_config": {"quant_method": ["x"]}}, "value of the wrong type"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_impossible_sizes_are_named(change, said):
    with pytest.raises(ConfigError, match=said):
        read_spec({**LLAMA, **change})
    short = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(ConfigError, match="lacks intermediate_size"):
        read_spec(short)


def test_odd_windows_are_refused():
    mixed = {**QWEN25, "layer_types": ["chunked_attention"] * 24}
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        read_spec(mixed)
    with pytest.raises(ConfigError, match="sliding_window"):
        read_spec({**QWEN25, "layer_types": ["sliding_attention"] * 24})


def test_generation_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    generation = {"eos_token_id": [151645, 151643], "temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec, defaults = read_model(tmp_path)
    assert spec.eos_ids == (151645, 151643)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.7, 20, 0.8, None)


@pytest.mark.parametrize(
    "odd",
    [{"temperature": -1}, {"top_p": 5}, {"min_p": -0.5}, {"repetition_penalty": 0.0}, {"top_k": -7}, {"top_k": 1e400}],
)
def test_defaults_that_no_request_could_have(odd: dict[str, float], tmp_path: Path):
    """Each would be laid to the requests that name none."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0, "top_p": 0, "top_k": 5.0}))
    assert read_model(tmp_path)[1].top_p == 0
    (tmp_path / "generation_config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match="generation_config.json: "):
        read_model(tmp_path)


def test_folder_without_or_with_broken_config(tmp_path: Path):
    with pytest.raises(ConfigError, match="no config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "warm"}))
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature is 'warm'"):
        read_model(tmp_path)
