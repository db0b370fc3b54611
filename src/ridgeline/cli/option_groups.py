"""Groups of options in help texts, by purpose."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, str] = {
    "model": "model revision load_format dtype quantization max_model_len seed",
    "address of the API": "host port served_model_name root_path ssl_certfile ssl_keyfile ssl_keyfile_password",
    "who may use it": "api_key admin_api_key api_keys isolate_keys usage_file token_prices allowed_origins allowed_hosts",
    "prompts and answers": """chat_template allow_special_in_content reasoning_parser tool_call_parser pooling
        max_queue max_body_mb keep_alive_s response_store_mb""",
    "device and memory": "device threads gpu_memory_utilization kv_cache_memory cpu_offload_gb enforce_eager",
    "batching and latency": """max_num_seqs max_num_batched_tokens batching steps_in_flight deterministic reader_pace
        slo keep_slo calibration""",
    "KV cache and prefixes": """kv_cache_dtype block_size enable_prefix_caching cache_pin_share warm_prefix answer_cache_mb
        kv_retention kv_selection kv_offload_gb kv_offload_ttl kv_disk kv_disk_gb""",
    "speculative decoding": "speculate draft_tokens",
    "LoRA adapters": "enable_lora lora_modules max_loras max_lora_rank",
    "several GPUs, processes or hosts": """tensor_parallel_size pipeline_parallel_size context_parallel_size
        sequence_parallel data_parallel_size expert_parallel redundant_experts expert_load nnodes node_rank master_addr
        master_port""",
    "prefill apart from decode": """prefill_engines decode_engines hand_over remote_engines engine_address engine_secret
        join""",
    "several models, sleep": """models models_memory_gb models_load_s enable_sleep_mode idle_sleep_minutes
        asleep_requests""",
    "files and batches": "batch_dir batch_window batch_impact batch_max_gb",
    "failures and shutdown": "drain_s engine_restarts engine_restart_minutes",
    "logs, metrics, quality": """log_level log_format metrics_alias otlp_traces_endpoint price_per_hour shadow_rate
        shadow_url shadow_model shadow_limit""",
    "moderation": """moderation moderation_mode moderation_window moderation_timeout_s moderation_failure
        moderation_api_key""",
}
"""Title -> names of configuration fields, in the order of the help. Each field of a server's configuration is in one group."""
