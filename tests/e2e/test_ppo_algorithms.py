"""The algorithms of verl that make other demands on a rollout step: a critic, a reference policy, REMAX's baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import Trainings, assert_same_results, assert_same_weights

ALGORITHMS = {
    "gae with critic, reference and KL": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.critic_warmup=2",
        "data.gen_batch_size=null",
        "data.seed=null",
        "trainer.val_before_train=True",
    ),
    "remax over several epochs": (
        "algorithm.adv_estimator=remax",
        "algorithm.use_kl_in_reward=True",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=2",
        "trainer.balance_batch=False",
    ),
}
STEPS = 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recorded_training_repeats_to_the_last_bit(trainings: Trainings, tmp_path: Path, name: str) -> None:
    settings = (
        *ALGORITHMS[name],
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"rollout_skip.dump_dir={tmp_path}",
    )
    label = name.split()[0]
    recorded = trainings.run(f"{label}-record", *settings, "rollout_skip.mode=record")
    again = trainings.run(f"{label}-cache", *settings, "rollout_skip.mode=cache")
    assert again.hits() == [1, 2, 3]
    assert_same_results(recorded, again, steps=[1, 2, 3])
    assert_same_weights(recorded, again, STEPS)
    generated = [version for version in again.trace("generate") if version != 0]
    assert generated == [], "only the validation before the training may generate"
    if "gae" in name:
        assert_same_weights(recorded, again, STEPS, role="critic")
        assert recorded.results()[0] == again.results()[0]
        assert "critic/vf_loss" in again.results()[3]
        assert "actor/kl_loss" in again.results()[3]
    else:
        assert again.trace("generate") == []
