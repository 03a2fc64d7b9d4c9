"""PPO with a critic, a reference policy and validation, which use more parts of a step than GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import PPO, Trainings, assert_proved, assert_same_results, assert_same_weights, skip

STEPS = 3
GAE = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.critic_warmup=2",
    "data.gen_batch_size=null",
    "data.seed=null",
    "trainer.val_before_train=True",
    "trainer.test_freq=2",
)


@pytest.mark.slow
def test_a_recorded_training_repeats_while_its_validation_is_generated_with_the_right_weights(
    trainings: Trainings, dumps: Path
) -> None:
    recorded = trainings.run(PPO, "record", *GAE, *skip("record", dumps))
    again = trainings.run(PPO, "cache", *GAE, *skip("cache", dumps))
    assert again.hits() == [1, 2, 3]
    assert again.trace("sync") == [0, 2, 3]
    assert set(again.trace("generate")) == {0, 2, 3}
    assert again.results()[0] == recorded.results()[0]
    assert any(name.startswith("val-") for name in again.results()[2])
    assert_proved(again, STEPS)
    assert_same_results(recorded, again, steps=[1, 2, 3])
    assert_same_weights(recorded, again, STEPS)
    assert_same_weights(recorded, again, STEPS, role="critic")
    assert {"critic/vf_loss", "actor/kl_loss"} <= set(again.results()[STEPS])
