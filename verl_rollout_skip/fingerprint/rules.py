"""The effect of each verl setting on recorded rollouts, as one reviewable list.

The first pattern that matches a key decides; ``*`` matches anything, including dots. The last patterns catch every
other key and treat whatever could affect prompts, tokens or rewards as ROLLOUT: an unknown key causes a miss, never a
wrong rollout. ``python -m verl_rollout_skip.fingerprint.rules`` prints the list as docs/settings.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from verl_rollout_skip.fingerprint.contents import IDENTITIES, base_mode
from verl_rollout_skip.fingerprint.engine_settings import ENGINES
from verl_rollout_skip.fingerprint.environment import HARMLESS, PREFIX, READ_BY_ENGINES
from verl_rollout_skip.fingerprint.identity import NON_MODEL_FILES
from verl_rollout_skip.fingerprint.patterns import matches


class Effect(str, Enum):
    """How a changed setting affects recorded rollouts."""

    ROLLOUT = "rollout"
    """The tokens or the stored rewards depend on it: recorded rollouts are not used."""
    TRAINING = "training"
    """Only what is learned from the rollouts depends on it: they are used and the change is reported."""
    NEITHER = "neither"
    """It only changes where and how fast things run, or what is logged."""


@dataclass(frozen=True)
class Rule:
    """One line of the list. ``part`` is "reward" if only the stored rewards depend on the setting."""

    pattern: str
    effect: Effect
    reason: str
    part: str = "tokens"


def _rules(effect: Effect, reason: str, *patterns: str, part: str = "tokens") -> list[Rule]:
    return [Rule(pattern, effect, reason, part) for pattern in patterns]


_R = "actor_rollout_ref.rollout"
_NEITHER, _TRAINING, _ROLLOUT = Effect.NEITHER, Effect.TRAINING, Effect.ROLLOUT

# Layout and memory of an inference engine, in every block that configures one.
_ENGINE_KNOBS = (
    *("nnodes", "n_gpus_per_node", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes"),
    *("free_cache_engine", "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("pipeline_model_parallel_size", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill"),
    *("enable_prefix_caching", "scheduling_policy", "layered_summon", "disable_log_stats"),
    *("multi_stage_wake_up", "disaggregation.*", "update_weights_bucket_megabytes", "enable_sleep_mode"),
)
# Layout, memory and speed of a training engine (FSDP, Megatron, VeOmni, TorchTitan), except settings that load weights.
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
    # Arguments of the engines of policy and reward model that are known to make no difference.
    *(
        Rule(f"*.rollout.engine_kwargs.{engine}.{name}", _NEITHER, reason)
        for engine, arguments in ENGINES.items()
        for reason, names in arguments.items()
        for name in names
    ),
    # verl passes these unchanged to code that it does not know, so no rule below may exempt any of them.
    *_rules(
        _ROLLOUT,
        "passed unchanged to the engine, the dataset or the model",
        *(f"{_R}.engine_kwargs.*", f"{_R}.agent.*_kwargs.*", "data.custom_cls.*", "data.*kwargs", "data.*kwargs.*"),
        *("actor_rollout_ref.model.override_config.*", "distillation.*.engine_kwargs.*"),
    ),
    *_rules(
        _ROLLOUT,
        "passed unchanged to the reward function or the reward model",
        *("reward.*kwargs", "reward.*kwargs.*", "reward_model.*kwargs", "reward_model.*kwargs.*"),
        part="reward",
    ),
    *_rules(_NEITHER, "the name of a verl class, not a setting", "_target_", "*._target_"),
    *_rules(_NEITHER, "this package and verl's own skip", "rollout_skip.*", "skip.*", f"{_R}.skip.*"),
    *_rules(_NEITHER, "old names of settings of this package", f"{_R}.skip_rollout", f"{_R}.skip_dump_dir"),
    *_rules(
        _NEITHER,
        "profiling and tracing",
        *("actor_rollout_ref.*.profiler.*", "critic.profiler.*", "reward_model.profiler.*", "global_profiler.*"),
        f"{_R}.trace.*",
    ),
    *_rules(_NEITHER, "monitoring", f"{_R}.prometheus.*", f"{_R}.moe_load_balance_metrics_interval"),
    # Environment variables from Ray's runtime_env or the driver. A variable not listed as harmless counts.
    *(
        Rule(f"{PREFIX}{name}", _NEITHER, f"environment: {reason}")
        for reason, names in HARMLESS.items()
        for name in names
    ),
    *_rules(_ROLLOUT, "an environment variable that the engine or the reward function may read", f"{PREFIX}*"),
    *_rules(
        _NEITHER,
        "how Ray and TransferQueue are started (for env_vars see environment.*)",
        "ray_kwargs.*",
        "ray_init.*",
        "transfer_queue.*",
    ),
    *_rules(
        _NEITHER,
        "number of worker processes",
        *("data.dataloader_num_workers", "data.filter_overlong_prompts_workers", f"{_R}.agent.num_workers"),
        *("reward.num_workers", "reward_model.num_workers"),
    ),
    *_rules(_NEITHER, "validation is never recorded", "data.val_*", "data.validation_*", f"{_R}.val_kwargs.*"),
    *_rules(_NEITHER, "a copy of the same files in memory", "data.use_shm"),
    *_rules(_NEITHER, "layout and memory of the rollout engine", *(f"{_R}.{knob}" for knob in _ENGINE_KNOBS)),
    *_rules(
        _NEITHER,
        "batch sizes of the trainer's log-prob pass",
        *(f"{_R}.log_prob_micro_batch_size*", f"{_R}.log_prob_use_dynamic_bsz", f"{_R}.log_prob_max_token_len_per_gpu"),
    ),
    *_rules(
        _NEITHER,
        "how weights are transferred and where servers run",
        *(f"{_R}.checkpoint_engine.*", f"{_R}.router_config_path"),
    ),
    *_rules(
        _NEITHER,
        "only logs where a conversation tokenized as a whole differs from the tokens generated turn by turn",
        f"{_R}.multi_turn.tokenization_sanity_check_mode",
    ),
    *_rules(
        _ROLLOUT,
        "counts only for a format that changes the weights, e.g. bitsandbytes: verl sends the trainer's weights to the "
        "engine before the first rollout, so the weights that the engine loads or initializes (dummy) are never used",
        f"{_R}.load_format",
    ),
    *_rules(_NEITHER, "custom class that transfers weights", f"{_R}.checkpoint_manager_class"),
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
        "whether scores are part of the rollout or computed after it",
        *(f"{root}.enable_resource_pool" for root in _OLD_AND_NEW_REWARD_MODEL),
        part="reward",
    ),
    *_rules(_NEITHER, "number of concurrent sandbox calls", "*sandbox_fusion.max_concurrent", part="reward"),
    *_rules(_ROLLOUT, "whether a sandbox runs the code, not its address", "*sandbox_fusion.url", part="reward"),
    *_rules(
        _NEITHER,
        "layout and memory of the teacher's engine",
        *(f"distillation.teacher_models.*.inference.{knob}" for knob in _ENGINE_KNOBS),
        *("distillation.n_gpus_per_node", "distillation.nnodes", "distillation.teacher_models.*.num_replicas"),
    ),
    *_rules(
        _TRAINING,
        "how the training learns from the teacher's answers",
        *(
            f"distillation.distillation_loss.{key}"
            for key in ("*coef", "*clamp", "use_*", "policy_loss_mode", "clip_ratio*")
        ),
    ),
    # The trainer's own block.
    *_rules(_ROLLOUT, "V0 and V1 trainers record batches in different formats", "trainer.use_v1"),
    *_rules(_ROLLOUT, "which weights generate which trajectory, and which trajectories are kept", "trainer.v1.*"),
    *_rules(
        _TRAINING,
        "length of the learning rate schedule, if there is one",
        *("trainer.total_epochs", "trainer.total_training_steps"),
    ),
    *_rules(_TRAINING, "when the actor starts to learn", "trainer.critic_warmup"),
    *_rules(
        _TRAINING,
        "the weights that the training starts from, unless they are its own checkpoint",
        "trainer.resume_from_path",
    ),
    *_rules(_TRAINING, "which rows make up a mini-batch", "trainer.balance_batch"),
    *_rules(_TRAINING, "the training engine", "trainer.use_legacy_worker_impl"),
    *_rules(
        _NEITHER,
        "part of the run folder's name",
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
        "an unknown setting; only the trainer reads this block, not the engine or the reward function",
        "trainer.*",
    ),
    # Learning.
    *_rules(
        _NEITHER,
        "after how many generation batches a step fails; the generated batches are the same",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    *_rules(_ROLLOUT, "dynamic sampling decides which prompts are generated", "algorithm.filter_groups.*"),
    *_rules(_TRAINING, "advantage and loss (REMAX adds rollouts and is compared separately)", "algorithm.*"),
    *_rules(
        _ROLLOUT,
        "the weights that generate the first rollout",
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
        "layout, memory and speed of the reference model",
        *(f"actor_rollout_ref.ref.{knob}" for knob in _TRAIN_KNOBS),
    ),
    *_rules(_NEITHER, "batch sizes of the reference model's log-prob pass", "actor_rollout_ref.ref.log_prob_*"),
    *_rules(_TRAINING, "the reference model is part of the loss", "actor_rollout_ref.ref", "actor_rollout_ref.ref.*"),
    *_rules(_NEITHER, "layout and memory of the critic", *(f"critic.{knob}" for knob in _TRAIN_KNOBS)),
    *_rules(_TRAINING, "how the critic learns", "critic.*"),
    *_rules(_TRAINING, "the training engine", "model_engine", "actor_rollout_ref.hybrid_engine"),
    *_rules(_NEITHER, "a timeout", "actor_rollout_ref.nccl_timeout"),
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
    # Every other key, known or not, is assumed to affect prompts, tokens or rewards.
    *_rules(
        _ROLLOUT,
        "the reward function and its settings",
        "reward.*",
        "reward_model.*",
        "custom_reward_function.*",
        part="reward",
    ),
    *_rules(_ROLLOUT, "limits of the reward's sandbox", "sandbox_fusion.*", part="reward"),
    *_rules(_ROLLOUT, "chooses or shapes the prompts", "data.*"),
    *_rules(_ROLLOUT, "changes the tokens", f"{_R}.*"),
    *_rules(_ROLLOUT, "the model that generates", "actor_rollout_ref.model.*"),
    *_rules(_ROLLOUT, "the teacher's answers are stored with the rollout", "distillation.*"),
    *_rules(_ROLLOUT, "an unknown setting, which may affect anything", "*"),
]


@dataclass(frozen=True)
class Unused:
    """Settings that some trainings do not read. There, their rule does not apply."""

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
        "`trainer.use_v1` is false: the V0 trainer does not read this block",
        lambda config: config.get("trainer.use_v1") is False,
    ),
    *(
        Unused(f"trainer.v1.{mode}.*", f"`trainer.v1.trainer_mode` is one of verl's modes, but not {mode}", applies)
        for mode in _V1_MODES
        for applies in (_is_another_mode(mode),)
    ),
    Unused(
        "trainer.v1.sampler.max_off_policy_*",
        "`trainer.v1.trainer_mode` is sync and the sampler is verl's own: every trajectory is on-policy",
        lambda config: _mode(config) == "sync" and not config.get("trainer.v1.sampler.custom_sampler.path"),
    ),
]


@functools.lru_cache(maxsize=4096)
def rule_for(key: str) -> Rule:
    """The rule that applies to a setting."""
    return next(rule for rule in RULES if matches(key, rule.pattern))


def unused(key: str, config: Mapping[str, Any]) -> Unused | None:
    """Why a training with this flat configuration does not read a setting; None if its rule applies."""
    return next((item for item in UNUSED if matches(key, item.pattern) and item.applies(config)), None)


def rules_as_markdown() -> str:
    """The list as docs/settings.md shows it."""
    meanings = "\n".join(f"- **{effect.value}**: {_MEANINGS[effect]}" for effect in Effect)
    lines = [_INTRODUCTION.format(meanings=meanings), "| setting | effect | why |", "|---|---|---|"]
    for (effect, reason), rules in itertools.groupby(RULES, lambda rule: (rule.effect, rule.reason)):
        patterns = ", ".join(f"`{rule.pattern}`" for rule in rules)
        lines.append(f"| {patterns} | {effect.value} | {reason} |")
    lines += ["", _SOMETIMES, "| setting | not read if |", "|---|---|"]
    lines += [f"| `{item.pattern}` | {item.reason} |" for item in UNUSED]
    lines += ["", _CONTENT, "| setting | what counts |", "|---|---|"]
    for pattern, identities in IDENTITIES.items():
        lines.append(f"| `{pattern}` | {'; '.join(_as_cell(kind.__doc__ or '') for kind in identities.values())} |")
    lines += ["", _FOLDERS, "| file | what it is |", "|---|---|"]
    lines += [f"| `{pattern}` | {reason} |" for pattern, reason in NON_MODEL_FILES.items()]
    return "\n".join(lines) + "\n"


def _as_cell(docstring: str) -> str:
    """The first sentence of a docstring, in lowercase and without a period like the other cells of the tables."""
    sentence = docstring.partition(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


_MEANINGS = {
    Effect.ROLLOUT: "the tokens or the stored rewards depend on it. After a change, recorded rollouts are not used.",
    Effect.TRAINING: "only what is learned from the rollouts depends on it. After a change, recorded rollouts are used "
    "and the change is reported.",
    Effect.NEITHER: "it only changes where and how fast things run, or what is logged. A change makes no difference.",
}
_INTRODUCTION = """# How each setting affects recorded rollouts

<!-- Generated by `python -m verl_rollout_skip.fingerprint.rules > docs/settings.md`; edit that module. -->

The first pattern that matches a setting decides; `*` matches anything, including dots. There are three effects:

{meanings}

The estimator `remax` also generates a greedy answer for each prompt, so switching to or from it changes the rollout.
Any other change to `algorithm.adv_estimator` affects only the training.
"""
_SOMETIMES = """## Settings that are not read

Some trainings do not read these settings. A change then makes no difference, even if the list above says otherwise.
"""
_CONTENT = f"""## Settings that name files

These settings are compared by the content of the files, not by path: you can move a file, and a changed file under the
same path counts as a change. A single file in `data.train_files` is the same as a list of one. Image, video and audio
files that the data references by path are compared by path, size and modification time.

`environment.*` means environment variables: all of `ray_kwargs.ray_init.runtime_env.env_vars`, and those of the driver
that engines read: {", ".join(f"`{name}`" for name in READ_BY_ENGINES)}.
"""
_FOLDERS = "These files of a model folder make no difference:\n"


if __name__ == "__main__":
    print(rules_as_markdown(), end="")
