"""Settings that are compared by the content of the files, code or model that they name, not by value."""

from __future__ import annotations

import functools
from collections.abc import Callable

from verl_rollout_skip.fingerprint.identity import (
    data_identity,
    file_identity,
    model_identity,
    processing_identity,
    tokenizer_identity,
)
from verl_rollout_skip.fingerprint.patterns import matches
from verl_rollout_skip.fingerprint.source_code import (
    class_name_identity,
    classes_identity,
    code_identity,
    module_identity,
)

_R = "actor_rollout_ref.rollout"
# Formats that load the weights unchanged, or load none. Others (bitsandbytes, gguf …) change the weights while loading.
_PLAIN_FORMATS = {
    *("auto", "hf", "pt", "safetensors", "npcache", "dummy", "fastsafetensors", "runai_streamer", "sharded_state"),
    *("runai_streamer_sharded", "tensorizer", "megatron", "dtensor", "layered"),
}
_TRAINERS_WEIGHTS = "the trainer's weights"
# verl turns a single value of this setting into a list, so one file and a list of one file are the same.
LIST_OF_ONE = ("data.train_files",)


def _whether_set(value: str) -> str:
    """Whether it is set."""
    return "set"


def base_mode(value: str) -> str:
    """The verl trainer it is based on: skip_sync counts as sync."""
    return value.removeprefix("skip_")


def _load_format(value: str) -> str:
    """Whether it quantizes the weights; the trainer's weights replace the loaded ones before the first rollout."""
    return _TRAINERS_WEIGHTS if value in _PLAIN_FORMATS or value.startswith("dummy_") else value


def _engine_class(name: str) -> str:
    """The source of the class, unless it is the engine's own: a replay runs where the engine is not installed."""
    name = name.replace(":", ".")  # vLLM also accepts module:Class
    return name if name.partition(".")[0] in ("vllm", "sglang") else class_name_identity(name)


# Each identity of a setting gets its own field in the fingerprint, with the part after "#" in its name.
IDENTITIES: dict[str, dict[str, Callable[[str], str]]] = {
    "actor_rollout_ref.model.path": {"": model_identity, "tokenizer": tokenizer_identity},
    "actor_rollout_ref.model.hf_config_path": {"": model_identity},
    "actor_rollout_ref.model.tokenizer_path": {"": processing_identity},
    "actor_rollout_ref.model.external_lib": {"": module_identity},
    "actor_rollout_ref.model.lora_adapter_path": {"": model_identity},
    "actor_rollout_ref.model.lora.adapter_path": {"": model_identity},
    "data.tokenizer": {"": processing_identity},
    "data.train_files": {"": data_identity},
    "data.custom_cls.path": {"": code_identity},
    "data.sampler.class_path": {"": code_identity},
    "data.tool_config_path": {"": classes_identity},
    "data.function_tool_path": {"": code_identity},
    "data.datagen.path": {"": code_identity},
    f"{_R}.multi_turn.tool_config_path": {"": classes_identity},
    f"{_R}.multi_turn.function_tool_path": {"": code_identity},
    f"{_R}.multi_turn.interaction_config_path": {"": classes_identity},
    f"{_R}.agent.agent_loop_config_path": {"": classes_identity},
    f"{_R}.agent.agent_loop_manager_class": {"": class_name_identity},
    f"{_R}.agent.custom_async_server.path": {"": code_identity},
    f"{_R}.engine_kwargs.vllm.worker_cls": {"": _engine_class},
    f"{_R}.engine_kwargs.vllm.worker_extension_cls": {"": _engine_class},
    f"{_R}.engine_kwargs.vllm.scheduler_cls": {"": _engine_class},
    f"{_R}.engine_kwargs.vllm.logits_processors": {"": _engine_class},
    f"{_R}.engine_kwargs.sglang.custom_weight_loader": {"": _engine_class},
    f"{_R}.load_format": {"": _load_format},
    f"{_R}.quantization_config_file": {"": file_identity},
    "reward.custom_reward_function.path": {"": code_identity},
    "reward.reward_manager.module.path": {"": code_identity},
    "reward.reward_model.model_path": {"": model_identity},
    "reward.reward_model.rollout.quantization_config_file": {"": file_identity},
    "custom_reward_function.path": {"": code_identity},
    "reward_model.model.path": {"": model_identity},
    "reward_model.reward_loop_module_path": {"": code_identity},
    "reward_model.model.input_tokenizer": {"": processing_identity},
    "reward_model.model.external_lib": {"": module_identity},
    "*sandbox_fusion.url": {"": _whether_set},
    "distillation.teacher_models.*.model_path": {"": model_identity},
    "trainer.v1.trainer_mode": {"": base_mode},
    "trainer.v1.sampler.custom_sampler.path": {"": code_identity},
    "*.dist_checkpointing_path": {"": model_identity},
    "*.load_checkpoint_path": {"": model_identity},
    "critic.model.path": {"": model_identity},
    "critic.model.hf_config_path": {"": model_identity},
    "critic.model.tokenizer_path": {"": processing_identity},
    "critic.model.lora_adapter_path": {"": model_identity},
    "critic.model.lora.adapter_path": {"": model_identity},
    "critic.model.external_lib": {"": module_identity},
    "*.qat.quantization_config_path": {"": file_identity},
}


@functools.lru_cache(maxsize=4096)
def identities_for(key: str) -> dict[str, Callable[[str], str]]:
    """How the content behind a setting is identified; empty if the setting is compared by value."""
    return next((identities for pattern, identities in IDENTITIES.items() if matches(key, pattern)), {})
