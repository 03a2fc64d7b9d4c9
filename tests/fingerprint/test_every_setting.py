"""How a change to each setting of verl 0.9.1's configuration affects recorded rollouts.

``verl_rollout_skip/fingerprint/rules.py`` lists the effects with reasons; docs/settings.md is generated from it. These
tests change each of about a thousand settings and check that the hashes change accordingly.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verl_configs import compose_ppo
from verl_rollout_skip.fingerprint.contents import identities_for
from verl_rollout_skip.fingerprint.fingerprint import (
    BASELINE,
    CHECKPOINT,
    LENGTH,
    difference,
    flatten,
    make_fingerprint,
    resolve_config,
)
from verl_rollout_skip.fingerprint.rules import RULES, Effect, rule_for, rules_as_markdown, unused

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = {
    "V0": ("trainer.use_v1=false",),
    "V1": ("trainer.use_v1=true",),
    "Megatron": ("model_engine=megatron",),
    "VeOmni": ("model_engine=veomni",),
    "TorchTitan": ("model_engine=torchtitan",),
}
LAYOUT = re.compile(r"parallel_size|offload|nnodes|n_gpus_per_node|gpu_memory_utilization|micro_batch_size|fsdp_size")
# Names of code, or of folders that are not read: compared by value.
NOT_FILES = {
    "trainer.resume_from_path": "a checkpoint of this training, written while it runs",
    "record_file": "written, not read",
    "replay_file": "replaces the routing in the training only",
}


# Whether these count depends on other settings (see tests/fingerprint/test_fingerprint.py). A learning-rate schedule
# also depends on the length of the training.
CONDITIONAL = {key: [(False, False)] for key in (*LENGTH, CHECKPOINT)}
# These select one of verl's trainers, so they decide which other trainer settings count.
CHOOSES_TRAINER = ("trainer.use_v1", "trainer.v1.trainer_mode", "trainer.v1.sampler.custom_sampler.path")


@functools.cache
def leaves(training: str) -> dict[str, Any]:
    return dict(flatten(resolve_config(compose_ppo(*TRAININGS[training]))))


def other_value(value: Any) -> Any:
    """A different value of the same type; any value for a setting that is null."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "another"]
    if isinstance(value, dict):
        return {**value, "another": 1}
    return f"{value or ''}another"


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tree with one leaf replaced. Only the blocks on the path to it are copied."""
    first, _, rest = key.partition(".")
    return {**tree, first: changed(tree[first], rest, value) if rest else value}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """verl's default paths do not exist here, which would be logged a thousand times."""
    with caplog.at_level(logging.ERROR, logger="verl_rollout_skip"):
        yield


@pytest.mark.parametrize("training", TRAININGS)
def test_every_setting_matches_a_rule(training: str) -> None:
    assert len(leaves(training)) > 850
    assert [key for key in leaves(training) if rule_for(key).pattern == "*"] == []


@pytest.mark.parametrize("training", TRAININGS)
def test_layout_settings_never_affect_rollouts(training: str) -> None:
    assert [key for key in leaves(training) if LAYOUT.search(key) and rule_for(key).effect is not Effect.NEITHER] == []


@pytest.mark.parametrize("training", ["V0", "V1"])
def test_changing_a_setting_has_the_effect_of_its_rule_and_no_other(training: str) -> None:
    tree = resolve_config(compose_ppo(*TRAININGS[training]))
    before = make_fingerprint(tree)
    wrong = []
    for key, value in leaves(training).items():
        after = make_fingerprint(changed(tree, key, other_value(value)))
        found = (after.config_hash != before.config_hash, after.training_hash != before.training_hash)
        effect = rule_for(key).effect if unused(key, leaves(training)) is None else Effect.NEITHER
        if found not in ((effect is Effect.ROLLOUT, effect is Effect.TRAINING), *CONDITIONAL.get(key, ())):
            wrong.append((key, effect.value, found))
        lines = difference(before.rollout, after.rollout) + difference(before.training, after.training)
        others = ("trainer.v1.",) if key in CHOOSES_TRAINER else ()
        if any(not line.startswith((key, *LENGTH, *others)) for line in lines):
            wrong.append((key, "is reported as", lines))
    assert wrong == []


@pytest.mark.parametrize("training", ["Megatron", "VeOmni", "TorchTitan"])
def test_settings_of_other_training_engines_have_the_effect_of_their_rule(training: str) -> None:
    tree = resolve_config(compose_ppo(*TRAININGS[training]))
    before = make_fingerprint(tree)
    wrong = []
    for key in sorted(set(leaves(training)) - set(leaves("V1"))):
        after = make_fingerprint(changed(tree, key, other_value(leaves(training)[key])))
        found = (after.config_hash != before.config_hash, after.training_hash != before.training_hash)
        effect = rule_for(key).effect
        if found != (effect is Effect.ROLLOUT, effect is Effect.TRAINING):
            wrong.append((key, effect.value, found))
    assert wrong == []


def test_estimator_remax_affects_rollout_and_training() -> None:
    tree = resolve_config(compose_ppo())
    before = make_fingerprint(tree)
    after = make_fingerprint(changed(tree, "algorithm.adv_estimator", "remax"))
    assert difference(before.rollout, after.rollout) == [f"{BASELINE}: not set → true"]
    assert difference(before.training, after.training) == ["algorithm.adv_estimator: gae → remax"]


@pytest.mark.parametrize("training", TRAININGS)
def test_every_setting_that_names_a_file_is_compared_by_content(training: str) -> None:
    def names_a_file(key: str) -> bool:
        ends = ("path", "_file", "_files", "tokenizer", "external_lib", "_dir")
        return key.endswith(ends) and not any(key.endswith(exception) for exception in NOT_FILES)

    by_name_only = [
        key
        for key in leaves(training)
        if names_a_file(key) and rule_for(key).effect is not Effect.NEITHER and not identities_for(key)
    ]
    assert by_name_only == []


def test_changed_content_under_the_same_path_is_detected(tmp_path: Path) -> None:
    tree = resolve_config(compose_ppo())
    unnoticed = []
    for key in leaves("V1"):
        if not identities_for(key) or key.endswith("sandbox_fusion.url"):
            continue
        file = tmp_path / f"{key}.json"  # no tokenizer, no README
        folder = tmp_path / key
        folder.mkdir()
        hashes = []
        for content in ("old", "new"):
            file.write_text(content)
            (folder / "config.json").write_text(content)
            (folder / "tokenizer.json").write_text(content)
            for path in (file, folder):
                found = make_fingerprint(changed(tree, key, str(path)))
                hashes.append((found.config_hash, found.training_hash))
        # The names of a module, a trainer and a format, not paths.
        if len(set(hashes)) != 4 and not key.endswith(("external_lib", "trainer_mode", "load_format")):
            unnoticed.append(key)
    assert unnoticed == []


_DEPENDED_ON = """
actor_rollout_ref.model.path  actor_rollout_ref.model.custom_chat_template  actor_rollout_ref.model.lora_rank
actor_rollout_ref.model.trust_remote_code  actor_rollout_ref.model.override_config.use_shm
actor_rollout_ref.rollout.n  actor_rollout_ref.rollout.temperature  actor_rollout_ref.rollout.top_p
actor_rollout_ref.rollout.top_k  actor_rollout_ref.rollout.seed  actor_rollout_ref.rollout.name
actor_rollout_ref.rollout.dtype  actor_rollout_ref.rollout.do_sample  actor_rollout_ref.rollout.ignore_eos
actor_rollout_ref.rollout.load_format  actor_rollout_ref.rollout.calculate_log_probs
actor_rollout_ref.rollout.engine_kwargs.vllm.profiler.x  actor_rollout_ref.rollout.engine_kwargs.vllm.num_workers
actor_rollout_ref.rollout.engine_kwargs.trtllm.max_num_seqs  actor_rollout_ref.rollout.engine_kwargs.max_num_seqs
actor_rollout_ref.rollout.engine_kwargs.vllm.sglang.max_num_seqs  reward.reward_kwargs.engine_kwargs.vllm.max_num_seqs
distillation.teacher_models.x.inference.engine_kwargs.vllm.something_new
actor_rollout_ref.rollout.quantization  actor_rollout_ref.rollout.qat.quantization_config_path
actor_rollout_ref.rollout.multi_turn.max_user_turns  actor_rollout_ref.rollout.agent.default_agent_loop
actor_rollout_ref.rollout.something_new  actor_rollout_ref.rollout.over_sample_rate
actor_rollout_ref.actor.megatron.dist_checkpointing_path  actor_rollout_ref.actor.megatron.use_dist_checkpointing
actor_rollout_ref.actor.veomni.load_checkpoint_path  actor_rollout_ref.actor.load_weight
actor_rollout_ref.model.checkpoint_of_the_future  data.train_files  data.train_batch_size  data.gen_batch_size
data.seed  data.shuffle  data.truncation  data.train_max_samples  data.prompt_key  data.max_prompt_length
data.filter_overlong_prompts  data.something_new  data.apply_chat_template_kwargs.enable_thinking
data.custom_cls.num_workers  data.sampler.class_path  reward.custom_reward_function.path  reward.reward_manager.name
reward.reward_kwargs.num_workers  reward.reward_model.enable  reward.reward_model.enable_resource_pool
reward.reward_model.model_path  reward.reward_model.rollout.load_format  reward.reward_model.rollout.temperature
reward.sandbox_fusion.url  reward.sandbox_fusion.memory_limit_mb  sandbox_fusion.url  reward_model.sandbox_fusion.url
algorithm.filter_groups.enable  algorithm.filter_groups.metric  algorithm.filter_groups.max_inflight_gen_batches
trainer.use_v1  trainer.v1.trainer_mode  trainer.v1.separate_async.parameter_sync_step  trainer.v1.something_new
trainer.v1.sampler.custom_sampler.path  distillation.enabled  distillation.distillation_loss.topk
distillation.teacher_models.teacher_model.model_path  distillation.teacher_models.x.inference.load_format
environment.VLLM_USE_V1  entirely_new  entirely.new
"""
ROLLOUTS_DEPEND_ON = _DEPENDED_ON.split()


@pytest.mark.parametrize("key", ROLLOUTS_DEPEND_ON)
def test_settings_that_affect_prompts_tokens_or_rewards_count(key: str) -> None:
    assert rule_for(key).effect is Effect.ROLLOUT


# Arguments that affect tokens or log-probs beyond batching effects.
_VLLM = """
quantization dtype kv_cache_dtype attention_backend attention_config.backend seed max_model_len logits_processors
enable_lora max_lora_rank lora_dtype hf_overrides hf_overrides.rope_theta override_generation_config generation_config
speculative_config speculative_config.model num_lookahead_slots tokenizer tokenizer_mode chat_template reasoning_parser
tool_call_parser structured_outputs_config.backend guided_decoding_backend mm_processor_kwargs limit_mm_per_prompt
model_impl moe_backend linear_backend all2all_backend kernel_config.moe_backend compilation_config
compilation_config.custom_ops compilation_config.pass_config.fuse_norm_quant
compilation_config.inductor_compile_config.x
optimization_level performance_mode block_size logprobs_mode max_logprobs calculate_kv_scales mamba_ssm_cache_dtype
disable_sliding_window disable_cascade_attn worker_cls worker_extension_cls scheduler_cls load_format
additional_config.x kv_transfer_config.kv_connector video_pruning_rate
 enable_prompt_embeds use_fp64_gumbel rope_scaling something_new
"""
_SGLANG = """
attention_backend prefill_attention_backend decode_attention_backend mm_attention_backend sampling_backend
grammar_backend quantization dtype kv_cache_dtype context_length random_seed chat_template tool_call_parser
reasoning_parser speculative_algorithm speculative_num_steps enable_lora lora_paths lora_backend
enable_deterministic_inference rl_on_policy_target enable_fp32_lm_head triton_attention_reduce_in_fp32
moe_runner_backend moe_a2a_backend deepep_mode json_model_override_args enable_custom_logit_processor
preferred_sampling_params sampling_defaults page_size enable_watermark enable_quant_communications max_queued_requests
hicache_storage_backend enable_hierarchical_cache allow_auto_truncate something_new
"""
ENGINES_DEPEND_ON = [f"vllm.{name}" for name in _VLLM.split()] + [f"sglang.{name}" for name in _SGLANG.split()]


@pytest.mark.parametrize("argument", ENGINES_DEPEND_ON)
@pytest.mark.parametrize("block", ["actor_rollout_ref.rollout", "reward.reward_model.rollout"])
def test_an_argument_of_the_engine_that_changes_the_tokens_is_never_overlooked(block: str, argument: str) -> None:
    assert rule_for(f"{block}.engine_kwargs.{argument}").effect is Effect.ROLLOUT


@pytest.mark.parametrize(
    "argument",
    [
        *("vllm.gpu_memory_utilization", "vllm.kv_cache_memory_bytes", "vllm.enforce_eager", "vllm.swap_space"),
        *("vllm.distributed_executor_backend", "vllm.max_num_seqs", "vllm.cpu_offload_gb", "vllm.disable_log_stats"),
        *("vllm.compilation_config.cudagraph_mode", "vllm.compilation_config.cudagraph_capture_sizes"),
        *("vllm.tensor_parallel_size", "vllm.data_parallel_size_local", "vllm.enable_sleep_mode"),
        *("sglang.mem_fraction_static", "sglang.tp_size", "sglang.cuda_graph_max_bs", "sglang.log_level"),
    ],
)
def test_memory_and_speed_of_the_engine_make_no_difference(argument: str) -> None:
    tree = resolve_config(compose_ppo())
    before = make_fingerprint(tree)
    engine, _, name = argument.partition(".")
    key = f"actor_rollout_ref.rollout.engine_kwargs.{engine}"
    value: Any = 2
    for part in reversed(name.split(".")):
        value = {part: value}
    after = make_fingerprint(changed(tree, key, value))
    assert difference(before.rollout, after.rollout) == []
    assert difference(before.training, after.training) == []


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_BATCH_INVARIANT", "VLLM_ATTENTION_BACKEND", "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_DEEP_GEMM"),
        *("VLLM_CPU_SGL_KERNEL", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_KV_CACHE_LAYOUT", "VERL_FULL_DETERMINISM"),
        *("K_SCALE_CONSTANT", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"),
        *("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "VLLM_SOMETHING_NEW"),
    ],
)
@pytest.mark.parametrize("where", ["driver", "runtime_env"])
def test_a_variable_that_changes_the_numbers_of_an_engine_counts(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = make_fingerprint(resolve_config(compose_ppo()))
    if where == "driver":
        monkeypatch.setenv(name, "1")
        after = make_fingerprint(resolve_config(compose_ppo()))
    else:
        after = make_fingerprint(resolve_config(compose_ppo(f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='1'")))
    assert difference(before.rollout, after.rollout) == [f"environment.{name}: not set → 1"]


@pytest.mark.parametrize(
    "key",
    [
        *("trainer.nnodes", "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        *("actor_rollout_ref.rollout.gpu_memory_utilization", "trainer.logger", "trainer.save_freq"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.fsdp_config.param_offload"),
        *("data.val_files", "data.dataloader_num_workers", "actor_rollout_ref.rollout.val_kwargs.temperature"),
        *("rollout_skip.mode", "actor_rollout_ref.rollout.skip_dump_dir", "skip.rollout.enable"),
        *("environment.WANDB_API_KEY", "actor_rollout_ref.rollout.enable_sleep_mode"),
        *(
            "algorithm.filter_groups.max_num_gen_batches",
            "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
        ),
    ],
)
def test_settings_of_the_machine_and_of_logging_are_ignored(key: str) -> None:
    assert rule_for(key).effect is Effect.NEITHER


@pytest.mark.parametrize(
    "key",
    [
        *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.ref.strategy"),
        *("algorithm.adv_estimator", "algorithm.gamma", "algorithm.kl_ctrl.kl_coef", "critic.optim.lr"),
        *("critic.model.path", "actor_rollout_ref.ref.megatron.dist_checkpointing_path", "trainer.balance_batch"),
        *("actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler", "trainer.total_epochs"),
        *("actor_rollout_ref.actor.checkpoint.load_contents", "distillation.distillation_loss.use_policy_gradient"),
        "trainer.something_new",
    ],
)
def test_settings_that_affect_only_the_training_are_only_reported(key: str) -> None:
    assert rule_for(key).effect is Effect.TRAINING


def test_changed_configuration_is_a_copy() -> None:
    tree = {"a": {"b": 1}, "c": 2}
    before = copy.deepcopy(tree)
    assert changed(tree, "a.b", 3) == {"a": {"b": 3}, "c": 2}
    assert tree == before


def test_every_rule_has_a_reason_and_the_last_rule_matches_everything() -> None:
    assert all(rule.reason and rule.part in ("tokens", "reward") for rule in RULES)
    assert RULES[-1].pattern == "*"
    assert RULES[-1].effect is Effect.ROLLOUT
    assert len({rule.pattern for rule in RULES}) == len(RULES)


def test_settings_md_is_up_to_date() -> None:
    document = ROOT / "docs" / "settings.md"
    assert document.read_text() == rules_as_markdown(), (
        "run: python -m verl_rollout_skip.fingerprint.rules > docs/settings.md"
    )
