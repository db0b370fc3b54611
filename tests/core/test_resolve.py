"""Configuration resolves alike from flags, environment and file, and says where each value came from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import ENVIRONMENT, option_fields, option_types, resolve, split_options
from ridgeline.core.slo import reader_pace

SAID = {
    "model": "some/model",
    "revision": "main",
    "load_format": "dummy",
    "dtype": "float16",
    "quantization": "fp8",
    "max_model_len": "8K",
    "kv_cache_dtype": "int8",
    "seed": "7",
    "device": "cpu",
    "enable_lora": "true",
    "lora_modules": "sql=/adapters/sql",
    "max_loras": "4",
    "max_lora_rank": "64",
    "max_num_seqs": "12",
    "max_num_batched_tokens": "2k",
    "gpu_memory_utilization": "0.5",
    "kv_cache_memory": "1.5G",
    "block_size": "32",
    "enable_prefix_caching": "false",
    "cache_pin_share": "0.5",
    "kv_retention": "window:keep=256",
    "kv_selection": "512",
    "expert_parallel": "true",
    "redundant_experts": "2",
    "expert_load": "load.txt",
    "cpu_offload_gb": "2.5",
    "kv_offload_gb": "4",
    "kv_disk": "blocks",
    "kv_disk_gb": "20",
    "kv_offload_ttl": "60",
    "batching": "dynamic:8,50",
    "reader_pace": "120ms",
    "steps_in_flight": "0",
    "speculate": "reference",
    "draft_tokens": "5",
    "enforce_eager": "true",
    "deterministic": "true",
    "threads": "3",
    "tensor_parallel_size": "2",
    "data_parallel_size": "2",
    "pipeline_parallel_size": "2",
    "context_parallel_size": "2",
    "sequence_parallel": "true",
    "nnodes": "2",
    "node_rank": "1",
    "master_addr": "10.0.0.1",
    "master_port": "29501",
    "calibration": "calibration.json",
    "host": "0.0.0.0",
    "port": "0",
    "api_key": "secret",
    "admin_api_key": "secret",
    "api_keys": "keys.yaml",
    "isolate_keys": "true",
    "usage_file": "usage.sqlite",
    "allowed_origins": "https://a.example",
    "allowed_hosts": "chat.example.org",
    "root_path": "/llm",
    "ssl_certfile": "cert.pem",
    "ssl_keyfile": "key.pem",
    "ssl_keyfile_password": "secret",
    "served_model_name": "name",
    "chat_template": "t.jinja",
    "allow_special_in_content": "true",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
    "max_queue": "9",
    "max_body_mb": "1.5",
    "batch_dir": "/var/batches",
    "batch_window": "22:00-06:00",
    "batch_impact": "10%",
    "batch_max_gb": "2.5",
    "keep_alive_s": "3",
    "drain_s": "4",
    "engine_restarts": "5",
    "engine_restart_minutes": "2.5",
    "moderation": "judges:strict",
    "moderation_mode": "window",
    "moderation_window": "300",
    "moderation_timeout_s": "2.5",
    "moderation_failure": "open",
    "moderation_api_key": "secret",
    "prefill_engines": "2",
    "decode_engines": "1",
    "hand_over": "tcp",
    "remote_engines": "prefill",
    "engine_address": "10.0.0.1:7000",
    "engine_secret": "secret",
    "join": "10.0.0.1:7000",
    "otlp_traces_endpoint": "http://collector:4318",
    "log_format": "json",
    "log_level": "info",
    "slo": "ttft=200ms",
    "keep_slo": True,
    "price_per_hour": "2.5",
    "warm_prefix": "prefixes.jsonl",
    "pooling": "mean",
    "response_store_mb": "16",
    "answer_cache_mb": "16",
    "enable_sleep_mode": "true",
    "idle_sleep_minutes": "15",
    "models": "models.yaml",
    "models_memory_gb": "64",
    "models_load_s": "90",
    "asleep_requests": "refuse",
    "token_prices": "input=0.2,output=0.6",
    "metrics_alias": "vllm",
    "shadow_rate": "0.01",
    "shadow_url": "http://reference:8000",
    "shadow_model": "big",
    "shadow_limit": "0.1",
}


def test_every_option_is_tried_here() -> None:
    assert set(SAID) == set(option_fields())


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
def test_flags_environment_and_file_resolve_alike(tmp_path: Path, form: str) -> None:
    """Test 9 of the design: the same words give the same values from every source."""
    file = tmp_path / f"options.{form}"
    lines = {
        "json": json.dumps(SAID),
        "toml": "\n".join(f'{name.replace("_", "-")} = "{value}"' for name, value in SAID.items()),
        "yaml": "\n".join(f"{name}: {value}" for name, value in SAID.items()),
    }
    file.write_text(lines[form])
    by_flag = resolve(SAID)
    by_environment = resolve({}, environ={ENVIRONMENT + name.upper(): value for name, value in SAID.items()})
    by_file = resolve({}, file=file)
    for other, origin in ((by_environment, "environment"), (by_file, f"file {file.name}")):
        assert (other.model, other.engine, other.service) == (by_flag.model, by_flag.engine, by_flag.service)
        assert set(other.origins.values()) == {origin}
    assert by_flag.model.max_model_len == 8192
    assert by_flag.engine.max_num_batched_tokens == 2000
    assert by_flag.engine.kv_cache_memory == 3 << 29
    assert by_flag.engine.enable_prefix_caching is False
    assert by_flag.engine.enforce_eager is True


def test_precedence_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"port": 1, "host": "file", "seed": 1, "threads": 1}))
    environ = {"RIDGELINE_PORT": "2", "RIDGELINE_HOST": "environment"}
    resolved = resolve({"port": 3}, environ=environ, file=file, hardware={"threads": 9, "max_num_seqs": 64})
    assert (resolved.service.port, resolved.origins["port"]) == (3, "flag")
    assert (resolved.service.host, resolved.origins["host"]) == ("environment", "environment")
    assert (resolved.model.seed, resolved.origins["seed"]) == (1, "file options.json")
    assert (resolved.engine.threads, resolved.origins["threads"]) == (1, "file options.json")
    assert (resolved.engine.max_num_seqs, resolved.origins["max_num_seqs"]) == (64, "model and hardware")
    assert (resolved.service.max_queue, resolved.origins["max_queue"]) == (1024, "default")


def test_nothing_said_is_the_defaults() -> None:
    resolved = resolve({})
    assert resolved.engine == EngineConfig() and resolved.model == ModelConfig()
    assert set(resolved.origins.values()) == {"default"}


def test_other_names_of_an_option(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("context-length = 512\nmem_fraction_static = 0.7\n")
    resolved = resolve({}, file=file)
    assert resolved.model.max_model_len == 512 and resolved.engine.gpu_memory_utilization == 0.7
    file.write_text("context-length = 512\nmax_model_len = 512\n")
    with pytest.raises(ConfigError, match="given twice"):
        resolve({}, file=file)


def test_auto_takes_an_option_back(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"max_num_seqs": 4}')
    assert resolve({"max_num_seqs": "auto"}, file=file).engine.max_num_seqs is None


def test_unknown_names_bring_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^Unknown option RIDGELINE_MAX_NUM_SEQ: did you mean RIDGELINE_MAX_NUM_SEQS\?$"
    ):
        resolve({}, environ={"RIDGELINE_MAX_NUM_SEQ": "4"})
    file = tmp_path / "a.json"
    file.write_text('{"max-model-length": 4}')
    with pytest.raises(ConfigError, match=r"option max-model-length \(file a.json\): did you mean max_model_len\?$"):
        resolve({}, file=file)
    with pytest.raises(ConfigError, match=r"^Unknown option dtyp: did you mean dtype\?$"):
        split_options({"dtyp": "auto"}, ModelConfig, EngineConfig)


def test_variables_of_kubernetes_are_no_options() -> None:
    environ = {
        "RIDGELINE_PORT": "tcp://10.0.0.1:8000",
        "RIDGELINE_SERVICE_HOST": "10.0.0.1",
        "RIDGELINE_SERVICE_PORT_HTTP": "8000",
        "RIDGELINE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "RIDGELINE_SEED": "",
    }
    assert resolve({}, environ=environ).service.port == 8000


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("port", "70000"), ("port", "eight"), ("port", True), ("max_num_seqs", 0), ("max_num_seqs", "1.0005k"),
        ("max_num_seqs", "nank"), ("max_num_seqs", 1.5), ("gpu_memory_utilization", "1.5"), ("drain_s", "nan"),
        ("kv_offload_gb", "-1"), ("kv_disk_gb", "inf"), ("kv_offload_ttl", -1), ("tensor_parallel_size", 0),
        ("enforce_eager", "perhaps"), ("dtype", "int3"), ("device", "tpu"), ("host", None), ("host", 1.5),
        ("load_format", "gguf"), ("metrics_alias", "tgi"), ("engine_restarts", -1), ("engine_restarts", "some"),
        ("engine_restart_minutes", 0),
    ],
)  # fmt: skip
def test_wrong_values_name_the_flag_and_the_remedy(name: str, raw: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({name: raw})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"--{name.replace('_', '-')} is ") and ": give " in caught.value.message


def test_wrong_values_name_the_option_as_its_user_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_num_seqs = 0")
    reads = {
        "RIDGELINE_MAX_NUM_SEQS is '0'": lambda: resolve({}, environ={"RIDGELINE_MAX_NUM_SEQS": "0"}),
        "max_num_seqs (file a.toml) is 0": lambda: resolve({}, file=file),
        "max_num_seqs is 0": lambda: split_options({"max_num_seqs": 0}, EngineConfig),
        "--max-num-seqs is '0'": lambda: split_options({"max_num_seqs": "0"}, EngineConfig, origin="flag"),
    }
    for begin, read in reads.items():
        with pytest.raises(ConfigError) as caught:
            read()
        assert caught.value.message == f"{begin}: give 1 to 65536."


@pytest.mark.parametrize("raw", ["int5", "fp9", "int4-g7", "FP8", "int8 "])
def test_an_unknown_number_format_names_the_known_ones(raw: str) -> None:
    for given in (
        lambda: resolve({}, environ={"RIDGELINE_QUANTIZATION": raw}),
        lambda: split_options({"quantization": raw}, ModelConfig),
    ):
        with pytest.raises(ConfigError, match=f"quantization '{raw}' is unknown: use fp8, w8a8, int8") as caught:
            given()
        assert caught.value.param == "quantization"


@pytest.mark.parametrize(
    "raw", ["", "fp8", "int4-g64", "int3-channel-zp", "llm-int8", "gptq", "awq", "compressed-tensors"]
)
def test_known_number_formats_pass(raw: str) -> None:
    assert resolve({"quantization": raw}).model.quantization == raw


def test_an_slo_is_read_with_the_options() -> None:
    with pytest.raises(ConfigError, match="--slo 'fast' is not a known limit: give ttft=200ms"):
        resolve({"slo": "fast"})


@pytest.mark.parametrize(("raw", "seconds"), [("", 0.0), ("120ms", 0.12), ("0.2 s", 0.2), ("90", 0.09)])
def test_a_reader_pace_is_a_duration_or_off(raw: str, seconds: float) -> None:
    assert reader_pace(resolve({"reader_pace": raw}).engine.reader_pace) == pytest.approx(seconds)


@pytest.mark.parametrize("raw", ["fast", "0", "-3ms", "120 m", "off", "1e999s", " "])
def test_other_reader_paces_are_refused(raw: str) -> None:
    with pytest.raises(
        ConfigError, match="--reader-pace is .*, not a positive duration: give .* as in 120ms"
    ) as caught:
        resolve({}, environ={"RIDGELINE_READER_PACE": raw})
    assert caught.value.param == "reader_pace"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.ini", "x"), ("a.json", "{"), ("a.toml", "="), ("a.yaml", "a: ["), ("a.json", "[1]"), ("a.yaml", "5: 6")],
)
def test_unreadable_files(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=name):
        resolve({}, file=file)
    with pytest.raises(ConfigError, match="Cannot read the configuration file .*nowhere.json"):
        resolve({}, file=tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "port: 1\nhost: x\nport: 2"), ("a.json", '{"port": 1, "port": 2}'), ("a.toml", "port = 1\nport = 2")],
)
def test_a_name_that_comes_twice(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="'port' appears twice: keep one|Cannot overwrite a value"):
        resolve({}, file=tmp_path / name)


def test_yaml_without_pyyaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("port: 1")
    program = (
        "import sys; sys.modules['yaml'] = None\n"
        "from pathlib import Path; from ridgeline.core.resolve import resolve\n"
        "resolve({}, file=Path('a.yaml'))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(ridgeline.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
    assert ended.returncode == 1
    assert re.search(r"ConfigError: .*pyyaml", ended.stderr)


def test_secrets_are_not_shown() -> None:
    rows = {name: shown for name, shown, _ in resolve({"api_key": "secret"}).rows()}
    assert rows["api_key"] == "***" and rows["max_num_seqs"] == "auto"
    assert list(rows) == list(option_types())


@pytest.mark.parametrize("key", ["", " ", "sesame\n", " sesame"])
def test_a_key_that_nobody_could_send_or_everybody_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"api_key": key}))
    for given in (lambda: resolve({"api_key": key}), lambda: resolve({}, file=file)):
        with pytest.raises(
            ConfigError, match=r"^(--api-key|api_key \(file options.json\)) is empty or has blanks"
        ) as error:
            given()
        assert "sesame" not in error.value.message
    assert resolve({}, environ={"RIDGELINE_API_KEY": ""}).service.api_key is None


def test_split_options() -> None:
    model, engine = split_options({"dtype": "float32", "max_num_seqs": 3}, ModelConfig, EngineConfig)
    assert (model, engine) == ({"dtype": "float32"}, {"max_num_seqs": 3})
