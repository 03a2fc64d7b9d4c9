"""Every setting of verl 0.9.1's composed configuration: what a change of it does to recorded rollouts.

The list with its reasons is ``verl_rollout_skip/rules.py``, for reading docs/settings.md. Here each of the about
thousand leaves is really changed, and the hashes must say what the list says.
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
from verl_rollout_skip.contents import identities_for
from verl_rollout_skip.fingerprint import (
    BASELINE,
    CHECKPOINT,
    LENGTH,
    difference,
    flatten,
    make_fingerprint,
    plain,
)
from verl_rollout_skip.rules import RULES, Effect, rule_for, rules_as_markdown, unused

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = {
    "V0": ("trainer.use_v1=false",),
    "V1": ("trainer.use_v1=true",),
    "Megatron": ("model_engine=megatron",),
    "VeOmni": ("model_engine=veomni",),
    "TorchTitan": ("model_engine=torchtitan",),
}
LAYOUT = re.compile(r"parallel_size|offload|nnodes|n_gpus_per_node|gpu_memory_utilization|micro_batch_size|fsdp_size")
# Names of code or of places where nothing is read: the value is what counts.
NOT_FILES = {
    "trainer.resume_from_path": "a checkpoint of this training, written while it runs",
    "record_file": "written, not read",
    "replay_file": "replaces the routing in the training only",
}


# Of these it depends on other settings whether they count (see tests/unit/test_fingerprint.py); a schedule of the
# learning rate brings the length of the training with it.
CONDITIONAL = {key: [(False, False)] for key in (*LENGTH, CHECKPOINT)}
# These say which of verl's trainers runs, so others of the trainer's settings come into play.
CHOOSES_TRAINER = ("trainer.use_v1", "trainer.v1.trainer_mode", "trainer.v1.sampler.custom_sampler.path")


@functools.cache
def leaves(training: str) -> dict[str, Any]:
    return dict(flatten(plain(compose_ppo(*TRAININGS[training]))))


def other_value(value: Any) -> Any:
    """Another value of the same kind; something for what is not set."""
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
    """The tree with one leaf replaced; only the blocks on the way to it are copied."""
    first, _, rest = key.partition(".")
    return {**tree, first: changed(tree[first], rest, value) if rest else value}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """verl's default paths do not exist here, which is said a thousand times."""
    with caplog.at_level(logging.ERROR, logger="verl_rollout_skip"):
        yield


@pytest.mark.parametrize("training", TRAININGS)
def test_every_leaf_is_on_the_list(training: str) -> None:
    assert len(leaves(training)) > 850
    assert [key for key in leaves(training) if rule_for(key).pattern == "*"] == []


@pytest.mark.parametrize("training", TRAININGS)
def test_the_layout_never_decides(training: str) -> None:
    assert [key for key in leaves(training) if LAYOUT.search(key) and rule_for(key).effect is not Effect.NEITHER] == []


@pytest.mark.parametrize("training", ["V0", "V1"])
def test_changing_a_leaf_changes_what_the_list_says_and_nothing_else(training: str) -> None:
    tree = plain(compose_ppo(*TRAININGS[training]))
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
def test_the_settings_of_other_training_engines_do_what_the_list_says(training: str) -> None:
    tree = plain(compose_ppo(*TRAININGS[training]))
    before = make_fingerprint(tree)
    wrong = []
    for key in sorted(set(leaves(training)) - set(leaves("V1"))):
        after = make_fingerprint(changed(tree, key, other_value(leaves(training)[key])))
        found = (after.config_hash != before.config_hash, after.training_hash != before.training_hash)
        effect = rule_for(key).effect
        if found != (effect is Effect.ROLLOUT, effect is Effect.TRAINING):
            wrong.append((key, effect.value, found))
    assert wrong == []


def test_the_estimator_remax_is_both() -> None:
    tree = plain(compose_ppo())
    before = make_fingerprint(tree)
    after = make_fingerprint(changed(tree, "algorithm.adv_estimator", "remax"))
    assert difference(before.rollout, after.rollout) == [f"{BASELINE}: not set → true"]
    assert difference(before.training, after.training) == ["algorithm.adv_estimator: gae → remax"]


@pytest.mark.parametrize("training", TRAININGS)
def test_whatever_names_a_file_is_compared_by_content(training: str) -> None:
    def names_a_file(key: str) -> bool:
        ends = ("path", "_file", "_files", "tokenizer", "external_lib", "_dir")
        return key.endswith(ends) and not any(key.endswith(exception) for exception in NOT_FILES)

    by_name_only = [
        key
        for key in leaves(training)
        if names_a_file(key) and rule_for(key).effect is not Effect.NEITHER and not identities_for(key)
    ]
    assert by_name_only == []


def test_changed_content_behind_an_unchanged_path_is_noticed(tmp_path: Path) -> None:
    tree = plain(compose_ppo())
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
def test_what_shapes_prompts_tokens_or_rewards_is_never_overlooked(key: str) -> None:
    assert rule_for(key).effect is Effect.ROLLOUT


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
def test_another_machine_or_another_log_is_no_other_rollout(key: str) -> None:
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
def test_what_only_the_learning_depends_on_is_reported_and_no_more(key: str) -> None:
    assert rule_for(key).effect is Effect.TRAINING


def test_the_changed_tree_is_a_copy() -> None:
    tree = {"a": {"b": 1}, "c": 2}
    before = copy.deepcopy(tree)
    assert changed(tree, "a.b", 3) == {"a": {"b": 3}, "c": 2}
    assert tree == before


def test_every_line_of_the_list_has_a_reason_and_the_last_one_takes_everything() -> None:
    assert all(rule.reason and rule.part in ("tokens", "reward") for rule in RULES)
    assert RULES[-1].pattern == "*"
    assert RULES[-1].effect is Effect.ROLLOUT
    assert len({rule.pattern for rule in RULES}) == len(RULES)


def test_the_document_is_up_to_date() -> None:
    document = ROOT / "docs" / "settings.md"
    assert document.read_text() == rules_as_markdown(), "run: python -m verl_rollout_skip.rules > docs/settings.md"
