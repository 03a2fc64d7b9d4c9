"""The environment variables that a rollout may depend on.

Workers inherit the driver's variables, so a variable counts as the setting ``environment.NAME`` whether it is set in
the shell or in Ray's ``runtime_env``. All variables of the ``runtime_env`` count, because they were set for this
training; of the driver's own, only those that inference engines and verl read. ``HARMLESS`` lists the exceptions with a
reason.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

PREFIX = "environment."
RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env.env_vars."

# Variables that engines read, and verl where it controls them.
READ_BY_ENGINES = (
    *("VLLM_*", "SGLANG_*", "SGL_*", "TRTLLM_*", "TLLM_*", "TRT_LLM_*", "FLASHINFER_*"),
    *("VERL_FULL_DETERMINISM", "VERL_SEED", "VERL_VLLM_FP8_QUANT_ENABLED", "VERL_DISABLE_TRITON_FP8"),
    *("VERL_USE_GPT_OSS", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "AITER_*"),
    *("Q_SCALE_CONSTANT", "K_SCALE_CONSTANT", "V_SCALE_CONSTANT"),
)


def _of_engines(*ends: str) -> list[str]:
    """Patterns for engine variables only: a user's own JUDGE_HOST or JUDGE_TIMEOUT may change rewards."""
    return [f"{engine}{end}" for engine in ("VLLM_*", "SGL*_*") for end in ends]


HARMLESS: dict[str, tuple[str, ...]] = {
    "logging, tracing and statistics": (
        *("*LOGGING*", "*_LOG_LEVEL", "*_LOG_DIR", "*_LOG_FILE", "*_LOG_PATH", "VLLM_LOG_*", "SGLANG_LOG_*"),
        *("VLLM_*USAGE_*", "VLLM_DO_NOT_TRACK", "VLLM_TRACE_FUNCTION", "VLLM_DEBUG_*", "VLLM_GC_DEBUG"),
        *("VLLM_DISABLE_LOG_LOGO", "VLLM_NO_DEPRECATION_WARNING", "VLLM_RINGBUFFER_WARNING_INTERVAL"),
        *("VLLM_PROCESS_NAME_PREFIX", "*_PROFILER_*", "*_FOR_PROFILING", "SGLANG_PROFILE_*", "*_NVTX_*"),
        *("*COREDUMP*", "*_DUMP_BEFORE_CRASH", "SGLANG_OTLP_*", "SGLANG_TRACE_*", "SGLANG_RECORD_STEP_TIME"),
        *("SGLANG_ENABLE_METRICS_*", "WANDB_*", "SWANLAB_*", "MLFLOW_*", "PYTHONUNBUFFERED", "HYDRA_FULL_ERROR"),
    ),
    "credentials": ("*_API_KEY", "HF_TOKEN", "AWS_*"),
    "addresses, ports and proxies, different on every node": (
        *_of_engines("_IP", "_IPS", "_HOST", "_PORT", "_PORT_*", "_ADDR", "_SERVICE_*"),
        *("VLLM_PORT", "VLLM_PORT_*", "VLLM_SERVICE_*", "SGLANG_PORT", "SGLANG_PORT_*", "SGLANG_SERVICE_*"),
        *("VLLM_RPC_BASE_PATH", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_ZBAL_BOOTSTRAP_URL"),
        *("*_PROXY", "*_proxy"),
    ),
    "transport between processes and devices": (
        *("NCCL_*", "TORCH_NCCL_*", "HCCL_*", "GLOO_*", "UCX_*", "RAY_*", "VLLM_NCCL_*", "VLLM_RAY_*"),
        *("VLLM_USE_RAY_*", "VLLM_SKIP_P2P_CHECK", "VLLM_MQ_MAX_CHUNK_BYTES_MB", "VLLM_MSGPACK_ZERO_COPY_THRESHOLD"),
        *("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_NIC_*", "VLLM_GPU_NIC_*"),
        *("SGLANG_RAY_*", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "SGLANG_USE_PICKLE_IPC"),
        "SGLANG_USE_CUDA_IPC_TRANSPORT",
    ),
    "processes, threads and devices": (
        *("CUDA_*", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "VLLM_DP_RANK*", "VLLM_WORKER_MULTIPROC_METHOD"),
        *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        *("VLLM_MEDIA_LOADING_THREAD_COUNT", "VLLM_CUDART_SO_PATH", "SGLANG_*NUMA*", "SGLANG_SET_CPU_AFFINITY"),
        *("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "SGLANG_GRPC_WORKER_THREADS"),
    ),
    "memory": (
        *("PYTORCH_*ALLOC_CONF", "VLLM_CPU_KVCACHE_SPACE", "*_PIN_MEMORY", "SGL*_TP_MEMORY_INBALANCE_CHECK"),
        *("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_EMPTY_CACHE_INTERVAL"),
        *("VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE", "VLLM_FASTSAFETENSORS_QUEUE_SIZE", "VLLM_ENABLE_CUDAGRAPH_GC"),
    ),
    "where compiled kernels and downloads are kept": (
        *_of_engines("CACHE_DIR", "CACHE_ROOT", "_CACHE_PATH"),
        *("VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE*", "VLLM_MEDIA_CACHE*", "VLLM_DISABLE_COMPILE_CACHE"),
        *("VLLM_COMPILE_CACHE_*", "VLLM_XGRAMMAR_CACHE_MB", "*_OUTLINES_*CACHE", "FLASHINFER_WORKSPACE_BASE"),
        "FLASHINFER_*CUBIN*",
    ),
    "timeouts": (*_of_engines("TIMEOUT*", "_HEARTBEAT_*"),),
    "the engine's own server, which verl does not expose": (
        *("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
        *("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_EXPOSE_OWN_ENV_VARS"),
    ),
    "how the engine was built or is tested": (
        *("VLLM_BUILD_*", "VLLM_IMAGE_TAG", "VLLM_DOCKER_BUILD_CONTEXT", "VLLM_MAIN_CUDA_VERSION"),
        *("VLLM_TARGET_DEVICE", "VLLM_USE_PRECOMPILED*", "VLLM_SYSTEM_START_DATE", "VLLM_CPU_CI_ENV"),
        "SGLANG_IS_IN_CI*",
    ),
}

# verl sets both from the configuration, and passes 0 to its workers if they are not set.
_DETERMINISM = ("VERL_FULL_DETERMINISM", "VLLM_BATCH_INVARIANT")
_FROM_CONFIG = ("actor_rollout_ref.rollout.full_determinism", "reward.reward_model.rollout.full_determinism")


def environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The variables that engines or reward functions may read, under their names in a fingerprint.

    ``config`` is flat. Variables that it sets for Ray's workers take precedence over those of this process.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in READ_BY_ENGINES)
    }
    for key, value in config.items():
        if key.startswith(RUNTIME_ENV) and value is not None:
            found[key.removeprefix(RUNTIME_ENV)] = str(value)
    for name in _DETERMINISM:
        if found.get(name) in ("", "0") or any(config.get(key) for key in _FROM_CONFIG):
            found.pop(name, None)
    return {f"{PREFIX}{name}": value for name, value in found.items()}
