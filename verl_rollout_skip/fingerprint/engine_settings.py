"""Arguments of vLLM and SGLang that are not part of the fingerprint, grouped by reason.

verl passes ``engine_kwargs.vllm`` and ``engine_kwargs.sglang`` to the engine. The names are those of vLLM's
``EngineArgs`` up to 0.27 and SGLang's ``ServerArgs`` up to 0.5. An argument is listed only if all it affects is memory,
batching, compilation, placement, weight loading or logging: beyond rounding, the engine generates the same tokens.
Everything else is part of the fingerprint: kernels and attention backends, data types, quantization, speculative
decoding, context length, LoRA, templates, parsers, and every unknown name.
"""

from __future__ import annotations

_OFFLOAD = ("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step")

VLLM: dict[str, tuple[str, ...]] = {
    "engine memory": (
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "watermark", "swap_space"),
        *("enable_sleep_mode", "enable_cumem_allocator", "preemption_mode", "kv_offloading_size"),
        *(*_OFFLOAD, "cpu_offload_params", "offload_backend", "offload_params"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_ipc_gpu_memory_gb", "mm_tensor_ipc", "skip_mm_profiling", "disable_mm_preprocessor_cache"),
    ),
    "how the engine batches requests": (
        *("max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_partial_prefills"),
        *("max_long_partial_prefills", "long_prefill_token_threshold", "enable_chunked_prefill"),
        *("disable_chunked_mm_input", "scheduling_policy", "async_scheduling", "stream_interval"),
        *("scheduler_reserve_full_isl", "prefill_schedule_interval", "scheduler_delay_factor"),
        *("num_scheduler_steps", "multi_step_stream_outputs", "disable_async_output_proc", "use_v2_block_manager"),
        *("enable_prefix_caching", "prefix_caching_hash_algo", "enable_dbo", "ubatch_size"),
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
    ),
    "CUDA graphs and compilation": (
        *("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cuda_graph_sizes"),
        *("max_seq_len_to_capture", "compilation_config.cudagraph_*", "compilation_config.*_cudagraph_capture_size"),
        *(
            f"compilation_config.{name}"
            for name in ("mode", "level", "use_cudagraph", "full_cuda_graph", "compile_sizes", "cache_dir")
        ),
        *("compilation_config.debug_dump_path", "compilation_config.use_inductor_graph_partition"),
    ),
    "engine layout": (
        *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "data_parallel_*"),
        *("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port", "device_ids"),
        *("worker_use_ray", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "api_server_count"),
        *("renderer_num_workers", "disable_frontend_multiprocessing", "disable_custom_all_reduce"),
        *("disable_nccl_for_dp_synchronization", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
        "shutdown_timeout",
    ),
    "loading of the initial weights, which the trainer's weights replace": (
        *("download_dir", "safetensors_load_strategy", "safetensors_prefetch_*", "max_parallel_loading_workers"),
        *("use_tqdm_on_load", "hf_token"),
    ),
    "logging, metrics and the server address": (
        *("disable_log_stats", "disable_log_requests", "enable_log_requests", "max_log_len"),
        *("aggregate_engine_logging", "otlp_traces_endpoint", "collect_detailed_traces", "kv_cache_metrics"),
        *("kv_cache_metrics_sample", "cudagraph_metrics", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics"),
        *("enable_logging_iteration_details", "enable_mm_processor_stats", "show_hidden_metrics_for_version"),
        *("jit_monitor_mode", "jit_monitor_verbose", "ray_workers_use_nsight", "profiler_config.*"),
        *("fail_on_environ_validation", "served_model_name", "host", "port", "api_key", "ssl_*"),
        *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_fastapi_docs"),
    ),
}

SGLANG: dict[str, tuple[str, ...]] = {
    "engine memory": (
        *("mem_fraction_static", "enable_memory_saver", "enable_weights_cpu_backup", *_OFFLOAD),
        *("swa_full_tokens_ratio", "mamba_full_memory_ratio", "max_mamba_cache_size", "radix_eviction_policy"),
        *("hicache_ratio", "hicache_size", "mm_preprocess_cache_size_mb"),
    ),
    "how the engine batches requests": (
        *("max_running_requests", "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests"),
        *("schedule_policy", "schedule_conservativeness", "enable_mixed_chunk", "enable_dynamic_chunking"),
        *("disable_overlap_schedule", "num_continuous_decode_steps", "scheduler_recv_interval", "stream_interval"),
        *("disable_radix_cache", "enable_prefill_delayer", "prefill_delayer_*", "prefill_decode_interval"),
        *("prefill_decode_interval_min_bs", "enable_two_batch_overlap", "enable_single_batch_overlap"),
        "tbo_token_distribution_threshold",
    ),
    "CUDA graphs and compilation": (
        *("disable_cuda_graph", "disable_cuda_graph_padding", "cuda_graph_max_bs", "cuda_graph_max_bs_*"),
        *("cuda_graph_bs", "cuda_graph_bs_*", "cuda_graph_max_seq_len_prefill", "disable_prefill_cuda_graph"),
        *("disable_decode_cuda_graph", "enable_profile_cuda_graph", "enable_cudagraph_gc"),
        *("enable_torch_compile", "torch_compile_max_bs"),
    ),
    "engine layout": (
        *("tp_size", "dp_size", "pp_size", "ep_size", "nnodes", "node_rank", "dist_init_addr", "dist_timeout"),
        *("nccl_port", "base_gpu_id", "gpu_id_step", "numa_node", "use_ray", "load_balance_method"),
        *("pp_max_micro_batch_size", "pp_async_batch_depth", "tokenizer_worker_num", "detokenizer_worker_num"),
        *("mm_processor_worker_num", "mm_io_worker_num", "disable_custom_all_reduce", "enable_nccl_nvls"),
        *("enable_symm_mem", "enable_torch_symm_mem", "enable_mscclpp", "pre_warm_nccl", "enable_p2p_check"),
        *("watchdog_timeout", "soft_watchdog_timeout", "sleep_on_idle", "gc_threshold"),
    ),
    "loading of the initial weights, which the trainer's weights replace": (
        *("download_dir", "weight_loader_disable_mmap", "weight_loader_prefetch_*"),
        "weight_loader_drop_cache_after_load",
    ),
    "logging, metrics and the server address": (
        *("log_level", "log_level_http", "log_requests", "log_requests_*", "show_time_cost", "crash_dump_folder"),
        *("enable_metrics", "enable_metrics_for_all_schedulers", "enable_mfu_metrics", "extra_metric_labels"),
        *("tokenizer_metrics_*", "bucket_*", "prompt_tokens_buckets", "generation_tokens_buckets"),
        *("decode_log_interval", "enable_request_time_stats_logging", "gc_warning_threshold_secs"),
        *("enable_trace", "trace_modules", "otlp_traces_endpoint", "otlp_service_name", "export_metrics_to_file"),
        *("export_metrics_to_file_dir", "enable_layerwise_nvtx_marker", "served_model_name", "host", "port"),
        *("api_key", "admin_api_key", "ssl_*", "skip_server_warmup", "enable_cache_report"),
    ),
}

ENGINES = {"vllm": VLLM, "sglang": SGLANG}
