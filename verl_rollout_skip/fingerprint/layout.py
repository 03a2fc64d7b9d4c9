"""The layout: where a rollout was generated. It is recorded and reported, but never causes a miss."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_rollout_skip._version import __version__
from verl_rollout_skip.fingerprint.fingerprint import flatten, resolve_config
from verl_rollout_skip.fingerprint.patterns import matches

_PARALLEL = {
    "tensor": ("tensor_model_parallel_size", "megatron.tensor_model_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size", "megatron.pipeline_model_parallel_size"),
    "sequence": ("ulysses_sequence_parallel_size", "megatron.context_parallel_size"),
    "data": ("data_parallel_size", "fsdp_config.fsdp_size", "fsdp.fsdp_size", "model.fsdp_config.fsdp_size"),
}
_ROLES = {
    "actor": "actor_rollout_ref.actor",
    "rollout": "actor_rollout_ref.rollout",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
}
_SPLITTING = tuple(
    f"{prefix}.*{name}*"
    for prefix in ("actor_rollout_ref", "critic")
    for name in (
        *("micro_batch_size", "max_token_len_per_gpu", "use_dynamic_bsz", "use_remove_padding", "fused_kernel"),
        *("use_liger", "use_torch_compile", "parallel_size", "fsdp_size", "offload", "strategy", "attn_implementation"),
        *("gradient_checkpointing", "entropy_from_logits", "dtype"),
    )
)
_ENGINES = ("vllm", "sglang", "tensorrt_llm")


def gpu_layout(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Nodes, devices and parallel sizes, from the configuration and, if Ray is running, from the cluster."""
    tree = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    nodes, per_node = (OmegaConf.select(tree, f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    layout: dict[str, Any] = {
        "nnodes": nodes,
        "n_gpus_per_node": per_node,
        "world_size": nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None,
        "accelerator": OmegaConf.select(tree, "trainer.device"),
    }
    for role, prefix in _ROLES.items():
        sizes = {}
        for name, keys in _PARALLEL.items():
            found = (OmegaConf.select(tree, f"{prefix}.{key}") for key in keys)
            sizes[name] = next((value for value in found if value is not None), None)
        layout[role] = sizes
    cluster = _ray_cluster()
    if cluster is not None:
        layout["cluster"] = cluster
    return layout


def layout_settings(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change how a batch is split or with which kernels it is computed, by dotted key.

    They make no difference to what is computed, except to its last bits.
    """
    flat = flatten(resolve_config(config))
    return {key: value for key, value in flat if value is not None and any(matches(key, item) for item in _SPLITTING)}


def _ray_cluster() -> dict[str, Any] | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    nodes = [node for node in ray.nodes() if node["Alive"]]
    resources: dict[str, float] = ray.cluster_resources()
    kinds = [name.split(":", 1)[1] for name in resources if name.startswith("accelerator_type:")]
    return {
        "nodes": len(nodes),
        "cpus": resources.get("CPU", 0),
        "gpus": resources.get("GPU", 0),
        "accelerators": kinds,
    }


def versions() -> dict[str, str]:
    """The versions of the packages that generate rollouts."""
    found = {"python": platform.python_version(), "verl_rollout_skip": __version__}
    for name in ("verl", "torch", "ray", "transformers", *_ENGINES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host() -> dict[str, Any]:
    """The host name and process id."""
    return {"name": socket.gethostname(), "pid": os.getpid()}


def layout_difference(recorded: Mapping[str, Any], current: Mapping[str, Any], path: str = "") -> list[str]:
    """One line for each number that differs: ``world_size: 16 → 8``."""
    lines = []
    for key in sorted({*recorded, *current} - {"cluster"}):
        old, new, here = recorded.get(key), current.get(key), f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += layout_difference(old, new, f"{here}.")
        elif old != new:
            lines.append(f"{here}: {old} → {new}")
    return lines
