"""``training_columns`` in verl's V0 training loop: what the actor trained on is dumped beside the rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl import DataProto

from tests.trainers.v0.stand_ins import VERL
from tests.trainers.v0.test_dapo import FILTER, SkipDapo
from tests.trainers.v0.training import SkipTrainer, Trainings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.runs.columns import trainings_with_columns
from verl_rollout_skip.tools.differing_rows import differing_tokens
from verl_rollout_skip.tools.mismatch import measure_mismatch

COLUMNS = "rollout_skip.training_columns=log_probs"
LOG_PROBS = {"old_log_probs", "rollout_log_probs", "response_mask"}
ROWS = {"rollout_gen_batch", "rollout_row"}


class OneChangedLogProb(SkipTrainer):
    """A training in which the last bits of one log-prob differ in step 2."""

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.global_steps == 2:
            batch.batch["old_log_probs"][3, 0] += 1e-6
        return super()._update_actor(batch)


def variant(dumps: Path) -> str:
    (manifest,) = dumps.glob("*/*/manifest.json")
    return str(manifest.parent)


def columns_of(dumps: Path, training: int = 0) -> RolloutStore:
    name = trainings_with_columns(variant(dumps))[training]
    return RolloutStore(f"{variant(dumps)}/columns/{name}")


def assert_refers_to_its_rollouts(store: RolloutStore, rollouts: RolloutStore, trained: list[DataProto]) -> None:
    """Each row has the values that the actor trained on, and names the recorded row with its response."""
    for key, update in zip(store.keys(), trained, strict=True):
        found = store.get(key)
        assert found["old_log_probs"].tolist() == update.batch["old_log_probs"].tolist()
        places = zip(found["rollout_gen_batch"].tolist(), found["rollout_row"].tolist(), strict=True)
        for place, response in zip(places, update.batch["responses"].tolist(), strict=True):
            gen_batch, row = place
            recorded = rollouts.get(RolloutKey(key.step, gen_batch)).batch["responses"]
            assert recorded[row].tolist() == response


def test_recording_and_replay_dump_the_log_probs_of_each_update(trainings: Trainings) -> None:
    recording = trainings.run("record", COLUMNS)
    replayed = trainings.run("replay", COLUMNS)
    for number, training in enumerate((recording, replayed)):
        store = columns_of(trainings.dumps, number)
        assert [(key.step, key.gen_batch) for key in store] == [(1, 0), (2, 0), (3, 0)]
        assert set(store.get(RolloutKey(1)).keys()) >= LOG_PROBS | ROWS
        if training.trained:
            assert_refers_to_its_rollouts(store, trainings.store, training.trained)
        assert training.said("training columns of 3 updates")
        assert training.said("0 dumps failed")
    folder = variant(trainings.dumps)
    one, other = trainings_with_columns(folder)
    for step in (1, 2, 3):
        assert differing_tokens(folder, one, folder, other, step) == []


def test_audit_names_the_row_and_token_that_differ_first(trainings: Trainings, capsys: pytest.CaptureFixture) -> None:
    trainings.run("record", COLUMNS)
    trainings.run("replay", COLUMNS, trainer=OneChangedLogProb)
    capsys.readouterr()
    assert main(["audit", variant(trainings.dumps)]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "old_log_probs: 1 row differs" in line]
    assert line.startswith("  step 2, old_log_probs: 1 row differs, first row ")
    assert ", token 0: " in line
    assert "⟦" in line


def test_replay_adds_columns_to_a_recording_that_has_none(trainings: Trainings) -> None:
    trainings.run("record")
    assert trainings_with_columns(variant(trainings.dumps)) == []
    trainings.run("replay", COLUMNS)
    folder = variant(trainings.dumps)
    [training] = trainings_with_columns(folder)
    found = measure_mismatch(folder, training)
    assert [step.key.step for step in found.steps] == [1, 2, 3]
    assert all(token.token is not None for token in found.worst)


def test_all_dumps_actor_and_critic(trainings: Trainings) -> None:
    settings = ("algorithm.adv_estimator=gae", "critic.enable=True", "critic.model.path=null")
    trainings.run("record", "rollout_skip.training_columns=all", *settings)
    store = columns_of(trainings.dumps)
    roles = [(key.step, store.record(key).info["role"]) for key in store]
    assert roles == [(step, role) for step in (1, 2, 3) for role in ("critic", "actor")]
    for key in store:
        assert {"values", "returns", "advantages", "old_log_probs"} <= set(store.get(key).keys())


@pytest.mark.skipif(VERL < (0, 7), reason="SkipDAPOTrainer needs rollouts that come with their rewards")
def test_filtered_step_of_dapo_names_the_generation_batch_of_each_row(trainings: Trainings) -> None:
    recording = trainings.run("record", COLUMNS, *FILTER, trainer=SkipDapo)
    store = columns_of(trainings.dumps)
    assert_refers_to_its_rollouts(store, trainings.store, recording.trained)
    batches = {batch for key in store for batch in store.get(key)["rollout_gen_batch"].tolist()}
    assert batches > {0}
    assert -1 not in batches


def test_full_disk_stops_a_recording_and_only_warns_in_cache(trainings: Trainings) -> None:
    def block() -> None:
        folder = Path(variant(trainings.dumps)) / "columns"
        folder.write_text("not a folder")

    trainings.run("cache")
    block()
    warned = trainings.run("cache", COLUMNS)
    assert warned.said("training columns were not dumped; the training continues")
    assert warned.said("3 dumps failed")
    failed = trainings.run("cache", COLUMNS, "rollout_skip.on_dump_error=fail", fails=True)
    assert "columns" in str(failed.error)


def test_training_without_the_setting_has_no_columns(trainings: Trainings) -> None:
    quiet = trainings.run("record")
    assert not quiet.said("training columns")
    assert not (Path(variant(trainings.dumps)) / "columns").exists()


def test_unselected_steps_have_no_columns(trainings: Trainings) -> None:
    trainings.run("cache", COLUMNS, "rollout_skip.steps=[2]")
    assert [key.step for key in columns_of(trainings.dumps)] == [2]
