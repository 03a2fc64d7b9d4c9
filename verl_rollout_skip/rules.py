"""What each setting of a verl training means for a recorded rollout: the list that a reviewer can read.

The first pattern that matches a key decides; ``*`` matches anything, dots included. Keys that no pattern names fall to
the end of the list, where whatever could shape prompts, tokens or rewards is ROLLOUT: an unknown key makes a recorded
rollout unusable rather than wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from verl_rollout_skip.identity import data_identity, file_identity, model_identity, tokenizer_identity


class Effect(str, Enum):
    """What a changed setting does to recorded rollouts."""

    ROLLOUT = "rollout"
    """The tokens or the stored rewards depend on it: recorded rollouts are not used."""
    TRAINING = "training"
    """Only what is learned from the rollouts depends on it: they are used, and the change is reported."""
    NEITHER = "neither"
    """Where and how fast things run, or what is logged: no difference."""


@dataclass(frozen=True)
class Rule:
    """One line of the list. ``part`` is "reward" for what only the stored rewards depend on."""

    pattern: str
    effect: Effect
    reason: str
    part: str = "tokens"


def _rules(effect: Effect, reason: str, *patterns: str, part: str = "tokens") -> list[Rule]:
    return [Rule(pattern, effect, reason, part) for pattern in patterns]


_R = "actor_rollout_ref.rollout"
_NEITHER, _TRAINING, _ROLLOUT = Effect.NEITHER, Effect.TRAINING, Effect.ROLLOUT

# Layout and memory of an inference engine, wherever one is configured.
_ENGINE_KNOBS = (
    *("nnodes", "n_gpus_per_node", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes"),
    *("free_cache_engine", "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("pipeline_model_parallel_size", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill"),
    *("enable_prefix_caching", "scheduling_policy", "load_format", "layered_summon", "disable_log_stats"),
    *("multi_stage_wake_up", "skip_tokenizer_init", "disaggregation.*", "update_weights_bucket_megabytes"),
)
_POOL_KNOBS = ("nnodes", "n_gpus_per_node", "enable_resource_pool")
# Layout, memory and speed of a training engine (FSDP, Megatron, VeOmni, TorchTitan).
_TRAIN_KNOBS = (
    *(
        "*offload*",
        "*reshard_after_forward*",
        "*fsdp_size*",
        "*forward_prefetch*",
        "*wrap_policy*",
        "*use_orig_params*",
    ),
    *("*parallel_size*", "*use_torch_compile*", "*micro_batch_size*", "*max_token_len_per_gpu*", "*use_dynamic_bsz*"),
    *("*turbo_config*", "*checkpoint*", "*entropy_from_logits*", "*pad_to_length*", "*use_remove_padding*"),
    *("*use_fused_kernels*", "*use_no_sync_for_gradient_accumulation*", "*enable_gradient_checkpointing*"),
    *("*enable_activation_offload*", "*use_liger*", "*use_shm*", "*tiled_mlp*", "*fused_kernel_options*"),
    *("*load_weight", "*nccl_timeout*", "*sequence_parallel*", "*use_dist_checkpointing*", "*dist_checkpointing_*"),
)

RULES: list[Rule] = [
    *_rules(_NEITHER, "names a class of verl, not a setting", "_target_", "*._target_"),
    *_rules(_NEITHER, "this package, and the skip that it replaces", "rollout_skip.*", "skip.*", f"{_R}.skip.*"),
    *_rules(_NEITHER, "settings of this package by their old names", f"{_R}.skip_rollout", f"{_R}.skip_dump_dir"),
    *_rules(_NEITHER, "profiling and tracing", "*.profiler.*", "global_profiler.*", f"{_R}.trace.*"),
    *_rules(_NEITHER, "monitoring", f"{_R}.prometheus.*", f"{_R}.moe_load_balance_metrics_interval"),
    *_rules(_NEITHER, "how Ray and the transport are started", "ray_kwargs.*", "ray_init.*", "transfer_queue.*"),
    *_rules(_NEITHER, "how many processes do the work", "*num_workers", "data.filter_overlong_prompts_workers"),
    *_rules(_NEITHER, "validation is never recorded", "data.val_*", "data.validation_*", f"{_R}.val_kwargs.*"),
    *_rules(_NEITHER, "a copy of the same files in memory", "data.use_shm"),
    *_rules(_NEITHER, "layout and memory of the rollout engine", *(f"{_R}.{knob}" for knob in _ENGINE_KNOBS)),
    *_rules(_NEITHER, "batch sizes of the log-prob pass of the trainer", f"{_R}.log_prob_*"),
    *_rules(_NEITHER, "how weights travel, where servers run", f"{_R}.checkpoint_engine.*", f"{_R}.router_config_path"),
    *_rules(_NEITHER, "own classes that move weights", f"{_R}.checkpoint_manager_class"),
    *_rules(
        _NEITHER,
        "layout and memory of the reward model's engine",
        *(f"{root}.rollout.{knob}" for root in ("reward.reward_model", "reward_model") for knob in _ENGINE_KNOBS),
        *(
            f"{root}.{knob}"
            for root in ("reward.reward_model", "reward_model")
            for knob in ("nnodes", "n_gpus_per_node")
        ),
        *(f"{root}.enable_resource_pool" for root in ("reward.reward_model", "reward_model")),
        *("reward_model.micro_batch_size*", "reward_model.model.fsdp_config.*", "reward_model.strategy"),
        *("reward_model.forward_max_token_len_per_gpu", "reward_model.use_dynamic_bsz"),
        "reward_model.ulysses_sequence_parallel_size",
        part="reward",
    ),
    *_rules(
        _NEITHER,
        "where a sandbox runs and how many calls it takes",
        "*sandbox_fusion.url",
        "*sandbox_fusion.max_concurrent",
    ),
    *_rules(
        _NEITHER,
        "layout and memory of the teacher's engine",
        *(f"distillation.teacher_models.*.inference.{knob}" for knob in _ENGINE_KNOBS),
        *("distillation.n_gpus_per_node", "distillation.nnodes", "distillation.teacher_models.*.num_replicas"),
    ),
    *_rules(_TRAINING, "how the teacher's answers are learned from", "distillation.distillation_loss.*coef"),
    *_rules(
        _TRAINING,
        "how the teacher's answers are learned from",
        *(f"distillation.distillation_loss.{key}" for key in ("*clamp", "use_*", "policy_loss_mode", "clip_ratio*")),
    ),
    # The trainer's own block.
    *_rules(_ROLLOUT, "V0 and V1 trainers record batches of another shape", "trainer.use_v1"),
    *_rules(_ROLLOUT, "which weights generate which trajectory, and which trajectories are kept", "trainer.v1.*"),
    *_rules(_TRAINING, "length of the schedule", "trainer.total_epochs", "trainer.total_training_steps"),
    *_rules(_TRAINING, "when the actor starts to learn", "trainer.critic_warmup"),
    *_rules(_TRAINING, "the weights the training starts from", "trainer.resume_from_path"),
    *_rules(_NEITHER, "layout, logging and checkpoints of the trainer", "trainer.*"),
    # Learning.
    *_rules(_ROLLOUT, "dynamic sampling decides which prompts are generated", "algorithm.filter_groups.*"),
    *_rules(_TRAINING, "advantage and loss (REMAX, which adds rollouts, is compared apart)", "algorithm.*"),
    *_rules(
        _NEITHER, "layout, memory and speed of the actor", *(f"actor_rollout_ref.actor.{knob}" for knob in _TRAIN_KNOBS)
    ),
    *_rules(_TRAINING, "how the actor learns", "actor_rollout_ref.actor.*"),
    *_rules(
        _NEITHER,
        "layout, memory and speed of the reference",
        *(f"actor_rollout_ref.ref.{knob}" for knob in _TRAIN_KNOBS),
    ),
    *_rules(_NEITHER, "batch sizes of the reference's log-prob pass", "actor_rollout_ref.ref.log_prob_*"),
    *_rules(_TRAINING, "the reference enters the loss", "actor_rollout_ref.ref.*"),
    *_rules(_NEITHER, "layout and memory of the critic", *(f"critic.{knob}" for knob in _TRAIN_KNOBS)),
    *_rules(_TRAINING, "how the critic learns", "critic.*"),
    *_rules(_TRAINING, "which training engine", "model_engine", "actor_rollout_ref.hybrid_engine"),
    *_rules(_NEITHER, "a time-out", "actor_rollout_ref.nccl_timeout"),
    *_rules(
        _NEITHER,
        "memory and speed of the model in training",
        *(f"actor_rollout_ref.model.{knob}" for knob in _TRAIN_KNOBS),
        *("actor_rollout_ref.model.use_shm", "actor_rollout_ref.model.trust_remote_code"),
    ),
    *_rules(_TRAINING, "how adapters are trained", "actor_rollout_ref.model.lora.dropout*"),
    # What is left shapes prompts, tokens or rewards, known or not.
    *_rules(
        _ROLLOUT,
        "the reward function and its settings",
        "reward.*",
        "reward_model.*",
        "custom_reward_function.*",
        part="reward",
    ),
    *_rules(_ROLLOUT, "what the sandbox of the reward allows", "sandbox_fusion.*", part="reward"),
    *_rules(_ROLLOUT, "chooses or shapes the prompts", "data.*"),
    *_rules(_ROLLOUT, "changes the tokens", f"{_R}.*"),
    *_rules(_ROLLOUT, "the model that generates", "actor_rollout_ref.model.*"),
    *_rules(_ROLLOUT, "the teacher's answers are stored with the rollout", "distillation.*"),
    *_rules(_ROLLOUT, "unknown to this package, so it may matter", "*"),
]


@functools.lru_cache(maxsize=4096)
def rule_for(key: str) -> Rule:
    """The rule that decides about a setting."""
    for rule in RULES:
        if _compiled(rule.pattern).fullmatch(key):
            return rule
    raise AssertionError(f"no rule matches {key!r}, although the last one matches everything")


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL)


# Settings that name files: what counts is what is in them, not where they are. Several names under one key are digested
# as several identities.
IDENTITIES: dict[str, dict[str, Callable[[str], str]]] = {
    "actor_rollout_ref.model.path": {"": model_identity, "tokenizer": tokenizer_identity},
    "actor_rollout_ref.model.hf_config_path": {"": model_identity},
    "actor_rollout_ref.model.tokenizer_path": {"": tokenizer_identity},
    "actor_rollout_ref.model.lora_adapter_path": {"": model_identity},
    "actor_rollout_ref.model.lora.adapter_path": {"": model_identity},
    "data.tokenizer": {"": tokenizer_identity},
    "data.train_files": {"": data_identity},
    "data.custom_cls.path": {"": file_identity},
    "data.sampler.class_path": {"": file_identity},
    "data.tool_config_path": {"": file_identity},
    "data.function_tool_path": {"": file_identity},
    "data.datagen.path": {"": file_identity},
    f"{_R}.multi_turn.tool_config_path": {"": file_identity},
    f"{_R}.multi_turn.function_tool_path": {"": file_identity},
    f"{_R}.multi_turn.interaction_config_path": {"": file_identity},
    f"{_R}.agent.agent_loop_config_path": {"": file_identity},
    f"{_R}.agent.custom_async_server.path": {"": file_identity},
    f"{_R}.quantization_config_file": {"": file_identity},
    "reward.custom_reward_function.path": {"": file_identity},
    "reward.reward_manager.module.path": {"": file_identity},
    "reward.reward_model.model_path": {"": model_identity},
    "reward.reward_model.rollout.quantization_config_file": {"": file_identity},
    "custom_reward_function.path": {"": file_identity},
    "reward_model.model.path": {"": model_identity},
    "reward_model.reward_loop_module_path": {"": file_identity},
}
