"""A training with two FSDP2 workers, one vLLM server each, and validation: killed, resumed and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.training import (
    PPO,
    Trainings,
    alone,
    assert_same_weights,
    resume,
    skip,
    variant_in,
)
from tests.vllm.checks import assert_no_engine, assert_weights_arrived
from verl_rollout_skip import RolloutKey, RolloutStore

STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "trainer.n_gpus_per_node=2",
    "trainer.val_before_train=True",
    "trainer.test_freq=2",
)


def test_a_killed_training_is_continued_from_its_manifest_and_replayed(
    trainings: Trainings, tmp_path: Path, plain_python: str
) -> None:
    dumps, folder = tmp_path / "dumps", tmp_path / "resumed"
    first_step = "*/*/step_000001/gen_000.json"
    trainings.run_until(PPO, "killed", lambda _: any(dumps.glob(first_step)), *SETTINGS, *skip("cache", dumps))
    variant = variant_in(dumps)
    left = [key.step for key in RolloutStore(variant).keys()]  # noqa: SIM118
    assert 1 <= len(left) < STEPS

    with alone():
        resumed = resume(
            [f"{variant}/manifest.json", f"trainer.default_local_dir={folder}/checkpoints"], folder, trainings.assets
        )
    assert resumed.exit_code == 0, resumed.log[-5000:]
    assert resumed.hits() == left
    assert_weights_arrived(resumed, STEPS)
    assert RolloutStore(variant).keys() == [RolloutKey(step) for step in range(1, STEPS + 1)]
    validated = [step for step, values in resumed.results().items() if any(key.startswith("val-") for key in values)]
    assert validated == [0, 2, 3]

    plain = replace(PPO, python=plain_python)
    unvalidated = ("trainer.val_before_train=False", "trainer.test_freq=-1")
    replayed = trainings.run(plain, "replay", *SETTINGS, *unvalidated, *skip("replay", dumps))
    assert_no_engine(replayed)
    trained = {
        step: {key: value for key, value in values.items() if not key.startswith("val-")}
        for step, values in resumed.results().items()
        if step
    }
    assert replayed.results() == trained
    assert_same_weights(resumed, replayed, STEPS)
