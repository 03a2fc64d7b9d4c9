"""What each setting of a verl training means for a recorded rollout: the list that a reviewer can read.

The first pattern that matches a key decides; ``*`` matches anything, dots included. Keys that no pattern names fall to
the end of the list, where whatever could shape prompts, tokens or rewards is ROLLOUT: an unknown key makes a recorded
rollout unusable rather than wrong. ``python -m verl_rollout_skip.rules`` prints the list as docs/settings.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from verl_rollout_skip.contents import IDENTITIES, base_mode
from verl_rollout_skip.environment import HARMLESS, PREFIX, READ_BY_ENGINES
from verl_rollout_skip.identity import NOT_OF_THE_MODEL
from verl_rollout_skip.patterns import matches


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
    *("enable_prefix_caching", "scheduling_policy", "layered_summon", "disable_log_stats"),
    *("multi_stage_wake_up", "disaggregation.*", "update_weights_bucket_megabytes", "enable_sleep_mode"),
)
# Layout, memory and speed of a training engine (FSDP, Megatron, VeOmni, TorchTitan). What loads weights is not here.
_TRAIN_KNOBS = (
    *("*offload*", "*reshard_after_forward*", "*fsdp_size*", "*forward_prefetch*", "*wrap_policy*"),
    *("*use_orig_params*", "*parallel_size*", "*parallel_replicate_size*", "*parallel_shard_size*"),
    *("*use_torch_compile*", "*micro_batch_size*", "*max_token_len_per_gpu*", "*use_dynamic_bsz*", "*turbo_config*"),
    *("*gradient_checkpointing", "*entropy_checkpointing", "*sum_pi_squared_checkpointing", "*activation_checkpoint"),
    *("checkpoint.save_contents", "checkpoint.async_save", "checkpoint.strict", "checkpoint.mbridge_config*"),
    *("*entropy_from_logits*", "*pad_to_length*", "*use_remove_padding*", "*use_fused_kernels*", "*use_liger*"),
    *("*use_no_sync_for_gradient_accumulation*", "*use_shm*", "*tiled_mlp*", "*fused_kernel_options*"),
    *("*nccl_timeout*", "*sequence_parallel*", "*dynamic_context_parallel", "*override_transformer_config.recompute_*"),
)
_OLD_AND_NEW_REWARD_MODEL = ("reward.reward_model", "reward_model")

RULES: list[Rule] = [
    # What verl hands on as it is, to code that it does not know: nothing below may except a part of it.
    *_rules(
        _ROLLOUT,
        "handed on as it is to the engine, the dataset or the model",
        *(f"{_R}.engine_kwargs.*", f"{_R}.agent.*_kwargs.*", "data.custom_cls.*", "data.*kwargs", "data.*kwargs.*"),
        *("actor_rollout_ref.model.override_config.*", "distillation.*.engine_kwargs.*"),
    ),
    *_rules(
        _ROLLOUT,
        "handed on as it is to the reward function or the reward model",
        *("reward.*kwargs", "reward.*kwargs.*", "reward_model.*kwargs", "reward_model.*kwargs.*"),
        part="reward",
    ),
    *_rules(_NEITHER, "names a class of verl, not a setting", "_target_", "*._target_"),
    *_rules(_NEITHER, "this package, and the skip that it replaces", "rollout_skip.*", "skip.*", f"{_R}.skip.*"),
    *_rules(_NEITHER, "settings of this package by their old names", f"{_R}.skip_rollout", f"{_R}.skip_dump_dir"),
    *_rules(
        _NEITHER,
        "profiling and tracing",
        *("actor_rollout_ref.*.profiler.*", "critic.profiler.*", "reward_model.profiler.*", "global_profiler.*"),
        f"{_R}.trace.*",
    ),
    *_rules(_NEITHER, "monitoring", f"{_R}.prometheus.*", f"{_R}.moe_load_balance_metrics_interval"),
    # Environment variables, of Ray's runtime_env or of the driver: what is not known to be harmless may matter.
    *(
        Rule(f"{PREFIX}{name}", _NEITHER, f"environment: {reason}")
        for reason, names in HARMLESS.items()
        for name in names
    ),
    *_rules(_ROLLOUT, "an environment variable that engine or reward function may read", f"{PREFIX}*"),
    *_rules(
        _NEITHER,
        "how Ray and the transport are started (env_vars: see environment.*)",
        "ray_kwargs.*",
        "ray_init.*",
        "transfer_queue.*",
    ),
    *_rules(
        _NEITHER,
        "how many processes do the work",
        *("data.dataloader_num_workers", "data.filter_overlong_prompts_workers", f"{_R}.agent.num_workers"),
        *("reward.num_workers", "reward_model.num_workers"),
    ),
    *_rules(_NEITHER, "validation is never recorded", "data.val_*", "data.validation_*", f"{_R}.val_kwargs.*"),
    *_rules(_NEITHER, "a copy of the same files in memory", "data.use_shm"),
    *_rules(_NEITHER, "layout and memory of the rollout engine", *(f"{_R}.{knob}" for knob in _ENGINE_KNOBS)),
    *_rules(
        _NEITHER,
        "batch sizes of the log-prob pass of the trainer",
        *(f"{_R}.log_prob_micro_batch_size*", f"{_R}.log_prob_use_dynamic_bsz", f"{_R}.log_prob_max_token_len_per_gpu"),
    ),
    *_rules(_NEITHER, "how weights travel, where servers run", f"{_R}.checkpoint_engine.*", f"{_R}.router_config_path"),
    *_rules(
        _NEITHER,
        "only logs where a conversation, tokenized whole, differs from what was generated turn by turn",
        f"{_R}.multi_turn.tokenization_sanity_check_mode",
    ),
    *_rules(
        _ROLLOUT,
        "only a format that changes weights, e.g. bitsandbytes: verl gives the engine the trainer's weights before the "
        "first rollout, so what it has loaded before that, or made up (dummy), is never used",
        f"{_R}.load_format",
    ),
    *_rules(_NEITHER, "own classes that move weights", f"{_R}.checkpoint_manager_class"),
    *_rules(
        _NEITHER,
        "layout and memory of the reward model",
        *(f"{root}.rollout.{knob}" for root in _OLD_AND_NEW_REWARD_MODEL for knob in _ENGINE_KNOBS),
        *(f"{root}.{knob}" for root in _OLD_AND_NEW_REWARD_MODEL for knob in ("nnodes", "n_gpus_per_node")),
        *("reward_model.micro_batch_size*", "reward_model.model.fsdp_config.*", "reward_model.strategy"),
        *("reward_model.forward_max_token_len_per_gpu", "reward_model.use_dynamic_bsz"),
        *("reward_model.ulysses_sequence_parallel_size", "reward_model.model.use_shm"),
        *("reward_model.model.use_remove_padding", "reward_model.model.use_fused_kernels", "reward_model.nccl_timeout"),
        *(f"reward_model.megatron.{knob}" for knob in ("*parallel_size", "sequence_parallel", "*offload")),
        "reward_model.megatron.override_transformer_config.recompute_*",
        part="reward",
    ),
    *_rules(
        _ROLLOUT,
        "whether scores are part of the rollout or made after it",
        *(f"{root}.enable_resource_pool" for root in _OLD_AND_NEW_REWARD_MODEL),
        part="reward",
    ),
    *_rules(_NEITHER, "how many calls the sandbox takes at once", "*sandbox_fusion.max_concurrent", part="reward"),
    *_rules(_ROLLOUT, "whether a sandbox runs the code (not where it is)", "*sandbox_fusion.url", part="reward"),
    *_rules(
        _NEITHER,
        "layout and memory of the teacher's engine",
        *(f"distillation.teacher_models.*.inference.{knob}" for knob in _ENGINE_KNOBS),
        *("distillation.n_gpus_per_node", "distillation.nnodes", "distillation.teacher_models.*.num_replicas"),
    ),
    *_rules(
        _TRAINING,
        "how the teacher's answers are learned from",
        *(
            f"distillation.distillation_loss.{key}"
            for key in ("*coef", "*clamp", "use_*", "policy_loss_mode", "clip_ratio*")
        ),
    ),
    # The trainer's own block.
    *_rules(_ROLLOUT, "V0 and V1 trainers record batches of another shape", "trainer.use_v1"),
    *_rules(_ROLLOUT, "which weights generate which trajectory, and which trajectories are kept", "trainer.v1.*"),
    *_rules(
        _TRAINING,
        "length of the schedule, if the learning rate follows one; no difference otherwise",
        *("trainer.total_epochs", "trainer.total_training_steps"),
    ),
    *_rules(_TRAINING, "when the actor starts to learn", "trainer.critic_warmup"),
    *_rules(
        _TRAINING, "the weights the training starts from, if not one of its own checkpoints", "trainer.resume_from_path"
    ),
    *_rules(_TRAINING, "which rows make up a mini-batch", "trainer.balance_batch"),
    *_rules(_TRAINING, "which training engine", "trainer.use_legacy_worker_impl"),
    *_rules(
        _NEITHER,
        "names of the run: they are part of the folder's name",
        *("trainer.project_name", "trainer.experiment_name"),
    ),
    *_rules(
        _NEITHER,
        "layout of the trainer",
        *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.ray_wait_register_center_timeout"),
    ),
    *_rules(
        _NEITHER,
        "logging and validation",
        *("trainer.logger", "trainer.log_*", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
        *("trainer.val_before_train", "trainer.val_only", "trainer.test_freq"),
    ),
    *_rules(
        _NEITHER,
        "checkpoints of the same training",
        *("trainer.save_freq", "trainer.esi_redundant_time", "trainer.resume_mode", "trainer.default_hdfs_dir"),
        *("trainer.checkpoint_callback_class", "trainer.del_local_ckpt_after_load", "trainer.default_local_dir"),
        *("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    ),
    *_rules(
        _TRAINING,
        "unknown to this package; what is in this block reaches the trainer, and neither engine nor reward function",
        "trainer.*",
    ),
    # Learning.
    *_rules(
        _NEITHER,
        "after how many generation batches a step gives up with an error; those it has generated are the same",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    *_rules(_ROLLOUT, "dynamic sampling decides which prompts are generated", "algorithm.filter_groups.*"),
    *_rules(_TRAINING, "advantage and loss (REMAX, which adds rollouts, is compared apart)", "algorithm.*"),
    *_rules(
        _ROLLOUT,
        "the weights that the first rollout is generated with",
        *(
            f"actor_rollout_ref.actor.{key}"
            for key in ("*dist_checkpointing*", "*load_checkpoint_path", "*load_weight")
        ),
    ),
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
    *_rules(_TRAINING, "the reference enters the loss", "actor_rollout_ref.ref", "actor_rollout_ref.ref.*"),
    *_rules(_NEITHER, "layout and memory of the critic", *(f"critic.{knob}" for knob in _TRAIN_KNOBS)),
    *_rules(_TRAINING, "how the critic learns", "critic.*"),
    *_rules(_TRAINING, "which training engine", "model_engine", "actor_rollout_ref.hybrid_engine"),
    *_rules(_NEITHER, "a time-out", "actor_rollout_ref.nccl_timeout"),
    *_rules(
        _NEITHER,
        "memory and speed of the model in training",
        *(
            f"actor_rollout_ref.model.{knob}"
            for knob in (
                "enable_gradient_checkpointing",
                "enable_activation_offload",
                "use_remove_padding",
                "use_liger",
            )
        ),
        *(f"actor_rollout_ref.model.{knob}" for knob in ("use_fused_kernels", "fused_kernel_options.*", "tiled_mlp.*")),
        "actor_rollout_ref.model.use_shm",
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


@dataclass(frozen=True)
class Unused:
    """Settings that nothing reads in some trainings, whatever their rule says."""

    pattern: str
    reason: str
    applies: Callable[[Mapping[str, Any]], bool]


_V1_MODES = ("sync", "colocate_async", "separate_async")


def _mode(config: Mapping[str, Any]) -> str:
    return base_mode(str(config.get("trainer.v1.trainer_mode")))


def _is_another_mode(mode: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: _mode(config) in _V1_MODES and _mode(config) != mode


UNUSED: list[Unused] = [
    Unused(
        "trainer.v1.*",
        "`trainer.use_v1` is false: the V0 trainer reads nothing of it",
        lambda config: config.get("trainer.use_v1") is False,
    ),
    *(
        Unused(f"trainer.v1.{mode}.*", f"`trainer.v1.trainer_mode` is another of verl's modes than {mode}", applies)
        for mode in _V1_MODES
        for applies in (_is_another_mode(mode),)
    ),
    Unused(
        "trainer.v1.sampler.max_off_policy_*",
        "`trainer.v1.trainer_mode` is sync with verl's own sampler, where every trajectory is on-policy",
        lambda config: _mode(config) == "sync" and not config.get("trainer.v1.sampler.custom_sampler.path"),
    ),
]


@functools.lru_cache(maxsize=4096)
def rule_for(key: str) -> Rule:
    """The rule that decides about a setting."""
    return next(rule for rule in RULES if matches(key, rule.pattern))


def unused(key: str, config: Mapping[str, Any]) -> Unused | None:
    """Why nothing reads a setting in a training with this (flat) configuration; None if it counts as its rule says."""
    return next((item for item in UNUSED if matches(key, item.pattern) and item.applies(config)), None)


def rules_as_markdown() -> str:
    """The list for people, as docs/settings.md has it."""
    meanings = "\n".join(f"- **{effect.value}**: {_MEANINGS[effect]}" for effect in Effect)
    lines = [_INTRODUCTION.format(meanings=meanings), "| setting | effect | why |", "|---|---|---|"]
    for (effect, reason), rules in itertools.groupby(RULES, lambda rule: (rule.effect, rule.reason)):
        patterns = ", ".join(f"`{rule.pattern}`" for rule in rules)
        lines.append(f"| {patterns} | {effect.value} | {reason} |")
    lines += ["", _SOMETIMES, "| setting | if |", "|---|---|"]
    lines += [f"| `{item.pattern}` | {item.reason} |" for item in UNUSED]
    lines += ["", _CONTENT, "| setting | what counts |", "|---|---|"]
    for pattern, identities in IDENTITIES.items():
        kinds = ", ".join((identify.__doc__ or "").partition(". ")[0].rstrip(".") for identify in identities.values())
        lines.append(f"| `{pattern}` | {kinds} |")
    lines += ["", _FOLDERS, "| file | what it is |", "|---|---|"]
    lines += [f"| `{pattern}` | {reason} |" for pattern, reason in NOT_OF_THE_MODEL.items()]
    return "\n".join(lines) + "\n"


_MEANINGS = {
    Effect.ROLLOUT: "the tokens or the stored rewards depend on it. Recorded rollouts are not used after a change.",
    Effect.TRAINING: "only what is learned from the rollouts depends on it. They are used, and the change is reported.",
    Effect.NEITHER: "where and how fast things run, or what is logged. No difference.",
}
_INTRODUCTION = """# What each setting means for recorded rollouts

<!-- Made by `python -m verl_rollout_skip.rules > docs/settings.md`; edit verl_rollout_skip/rules.py instead. -->

The first line whose pattern matches a setting decides; `*` stands for anything, dots included.

{meanings}

The estimator `remax` generates a greedy answer beside the sampled ones, so a change from or to it is a change of the
rollout, although `algorithm.adv_estimator` is otherwise a matter of the training.
"""
_SOMETIMES = """## Settings that are not read

Whatever the list above says of them, these make no difference in some trainings.
"""
_CONTENT = f"""## Settings that name files

Of these the content counts, not the path: the same files under another path are the same, and changed files under the
same path are not. `data.train_files` may be one file or a list of one. Image, video and audio files that its rows name
by path are compared by path, size and modification time.

`environment.*` stands for environment variables: all of `ray_kwargs.ray_init.runtime_env.env_vars`, and those of the
driver that engines read: {", ".join(f"`{name}`" for name in READ_BY_ENGINES)}.
"""
_FOLDERS = """Files of a model folder that make no difference:
"""


if __name__ == "__main__":
    print(rules_as_markdown(), end="")
