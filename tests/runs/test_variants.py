"""Trainings with changed settings: which recorded rollouts they use, and what the messages say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.batches import assert_same_batch
from tests.entry_files import part_file
from tests.trainings import RUN_NAME, Engine, Training, contents, inputs_of, manifest_of, never, without_timings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import ManifestError, MismatchError

K1, K2, K3 = (RolloutKey(step) for step in range(1, 4))
TEMPERATURE = "actor_rollout_ref__rollout__temperature"
RATE = "actor_rollout_ref__actor__optim__lr"


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_changed_temperature_starts_a_new_variant_and_the_log_says_so(training: Training, caplog: Any) -> None:
    training.record(K1)
    caplog.set_level(logging.INFO)
    with training.open("cache", **{TEMPERATURE: 0.7}) as skip:
        assert not skip.step(K1, inputs_of(K1), Engine()).hit
    assert "a new variant is started" in caplog.text
    assert "actor_rollout_ref.rollout.temperature: 1.0 → 0.7" in caplog.text
    assert len(training.variants()) == 2
    for temperature in (1.0, 0.7):
        with training.open("replay", **{TEMPERATURE: temperature}) as replay:
            assert replay.step(K1, inputs_of(K1), never).hit


def test_on_mismatch_error_stops_and_says_what_differs(training: Training) -> None:
    training.record(K1)
    before = contents(training.dumps)
    with pytest.raises(MismatchError, match=r"temperature: 1\.0 → 0\.7[\s\S]*on_mismatch=new"):
        training.open("cache", {"on_mismatch": "error"}, **{TEMPERATURE: 0.7})
    assert contents(training.dumps) == before


def test_reuse_uses_the_only_other_variant_and_marks_the_rollouts(training: Training, caplog: Any) -> None:
    training.record(K1)
    with training.open("cache", {"on_mismatch": "reuse"}, **{TEMPERATURE: 0.7}) as skip:
        reused = skip.step(K1, inputs_of(K1), never)
        assert not skip.step(K2, inputs_of(K2), Engine()).hit
    assert reused.metrics["rollout_skip/off_policy"] == 1.0
    assert "recorded with different settings" in caplog.text
    # The next run finds both the reused step and the one that it recorded itself.
    with training.open("replay", {"on_mismatch": "reuse"}, **{TEMPERATURE: 0.7}) as skip:
        assert skip.step(K1, inputs_of(K1), never).metrics["rollout_skip/off_policy"] == 1.0
        assert skip.step(K2, inputs_of(K2), never).metrics["rollout_skip/off_policy"] == 0.0


def test_reuse_with_several_variants_lists_the_most_similar_first(training: Training) -> None:
    training.record(K1, **{TEMPERATURE: 0.5, "data__seed": 3})
    training.record(K1, **{TEMPERATURE: 0.6})
    with pytest.raises(MismatchError) as caught:
        training.open("replay", {"on_mismatch": "reuse"}, **{TEMPERATURE: 0.7})
    text = str(caught.value)
    assert "2 variants" in text
    assert "rollout_skip.source" in text
    assert text.index("temperature: 0.6 → 0.7") < text.index("temperature: 0.5 → 0.7")
    assert "data.seed: 3 → not set" in text


@pytest.mark.parametrize("form", ["manifest", "folder", "folder/"])
def test_source_reads_another_run_and_new_rollouts_go_to_the_trainings_own_folder(
    training: Training, tmp_path: Path, form: str
) -> None:
    training.record(K1)
    [variant] = training.variants()
    before = contents(training.dumps)
    source = {"manifest": f"{variant}/manifest.json", "folder": str(variant), "folder/": f"{variant}/"}[form]
    elsewhere = tmp_path / "elsewhere"
    settings = {"source": source, "dump_dir": str(elsewhere)}
    for hits in ([True, False], [True, True]):
        with training.open("cache", settings, trainer__experiment_name="other") as skip:
            assert [skip.step(key, inputs_of(key), Engine()).hit for key in (K1, K2)] == hits
    assert contents(training.dumps) == before
    [own] = (elsewhere / RUN_NAME.replace("exp", "other")).iterdir()
    assert RolloutStore(own).keys() == [K2]
    with training.open("replay", {"source": source, "dump_dir": None}) as replay:
        assert replay.step(K1, inputs_of(K1), never).hit


def test_source_with_different_settings_is_an_error_unless_reused(training: Training) -> None:
    training.record(K1)
    source = {"source": str(training.variants()[0])}
    with pytest.raises(MismatchError, match=r"temperature: 1\.0 → 0\.7[\s\S]*on_mismatch=reuse"):
        training.open("replay", source, **{TEMPERATURE: 0.7})
    with training.open("replay", {**source, "on_mismatch": "reuse"}, **{TEMPERATURE: 0.7}) as replay:
        assert replay.step(K1, inputs_of(K1), never).metrics["rollout_skip/off_policy"] == 1.0


def test_source_that_is_not_a_variant_is_an_error_that_says_what_to_do(training: Training) -> None:
    training.record(K1)
    [variant] = training.variants()
    with pytest.raises(
        ManifestError, match=f"DUMP_DIR/RUN_NAME/VARIANT. This folder contains the variants {variant.name}"
    ):
        training.open("replay", {"source": str(training.dumps / RUN_NAME)})
    (variant / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=f"It has rollouts.*Run rollout-skip verify {variant} to see"):
        training.open("replay", {"source": str(variant)})


def test_damaged_entry_of_a_source_is_generated_again_and_the_source_is_unchanged(training: Training) -> None:
    training.record(K1)
    [variant] = training.variants()
    data = part_file(variant)
    data.write_bytes(b"broken")
    before = contents(variant)
    settings = {"source": str(variant), "dump_dir": str(training.folder / "elsewhere")}
    with training.open("cache", settings) as skip:
        assert not skip.step(K1, inputs_of(K1), Engine()).hit
    assert "was unreadable" in skip.summary()
    assert contents(variant) == before
    with training.open("cache", settings) as skip:
        assert skip.step(K1, inputs_of(K1), never).hit, "the step generated instead is in our own folder"


def test_recomputed_rewards_use_rollouts_of_another_reward_function(training: Training) -> None:
    training.record(K1)
    [old] = training.variants()
    before = contents(old)
    (training.folder / "inputs" / "reward.py").write_text("v2")
    with pytest.raises(MismatchError, match=r"reward\.custom_reward_function\.path"):
        training.open("replay")
    for hits in ([True, False], [True, True]):
        with training.open("cache", {"reward": "recompute"}) as skip:
            assert [skip.step(key, inputs_of(key), Engine()).hit for key in (K1, K2)] == hits
    assert contents(old) == before
    [new] = [variant for variant in training.variants() if variant != old]
    assert RolloutStore(new).keys() == [K2]


def test_changed_learning_rate_uses_the_rollouts_as_off_policy(training: Training, caplog: Any) -> None:
    training.record(K1, K2)
    with training.open("cache", **{RATE: 5e-6}) as skip:
        metrics = [skip.step(key, inputs_of(key), never).metrics for key in (K1, K2)]
        skip.step(K3, inputs_of(K3), Engine())
    assert [step["rollout_skip/off_policy"] for step in metrics] == [0.0, 1.0]
    assert "off-policy from the second step on" in caplog.text
    assert "actor_rollout_ref.actor.optim.lr: 1e-06 → 5e-06" in caplog.text
    assert "1 loaded off-policy" in skip.summary()
    # The second training recorded step 3, so it is now off-policy for the first one.
    for rate, expected in ((1e-6, [0.0, 0.0, 1.0]), (5e-6, [0.0, 1.0, 0.0])):
        with training.open("replay", **{RATE: rate}) as replay:
            found = [replay.step(key, inputs_of(key), never).metrics for key in (K1, K2, K3)]
        assert [step["rollout_skip/off_policy"] for step in found] == expected


def test_different_layout_is_only_reported(training: Training, caplog: Any) -> None:
    training.record(K1)
    caplog.set_level(logging.INFO)
    with training.open("replay", trainer__nnodes=2) as replay:
        assert replay.step(K1, inputs_of(K1), never).metrics["rollout_skip/off_policy"] == 0.0
    assert "a different layout, which does not affect the rollouts" in caplog.text
    assert "world_size: 8 → 16" in caplog.text


def test_folder_that_belongs_to_different_settings_is_never_written_to(training: Training) -> None:
    """As if two hashes started the same: the variant of one training has the name of another one's."""
    training.record(K1)
    training.record(K1, **{TEMPERATURE: 0.7})
    mine, other = sorted(training.variants(), key=lambda path: manifest_of(path)["created_at"])
    if manifest_of(mine)["fingerprint"]["actor_rollout_ref.rollout.temperature"] != 1.0:
        mine, other = other, mine
    mine.rename(training.folder / "aside")
    other.rename(mine)
    before = contents(training.dumps)
    for mode in ("cache", "record", "refresh", "replay"):
        with pytest.raises(MismatchError, match="belongs to different settings"):
            training.open(mode)
    assert contents(training.dumps) == before


@pytest.mark.parametrize("mode", ["cache", "replay"])
def test_deleted_manifest_is_restored_if_every_record_proves_the_settings(
    training: Training, caplog: Any, mode: str
) -> None:
    training.record(K1, K2)
    [variant] = training.variants()
    written = manifest_of(variant)
    (variant / "manifest.json").unlink()
    before = contents(variant)
    with training.open(mode) as skip:
        assert [skip.step(key, inputs_of(key), never).hit for key in (K1, K2)] == [True, True]
    assert f"{variant}/manifest.json is missing" in caplog.text
    if mode == "replay":
        assert contents(variant) == before, "replay writes nothing"
        return
    restored = manifest_of(variant)
    assert restored["restored_at"] is not None
    assert {key: restored[key] for key in ("fingerprint", "gpu_layout", "versions")} == {
        key: written[key] for key in ("fingerprint", "gpu_layout", "versions")
    }
    assert {name: contents(variant)[name] for name in before} == before, "no entry is changed"


def test_without_manifest_entries_that_do_not_prove_their_settings_are_an_error(training: Training) -> None:
    """An entry of another variant is in the training's own variant, which has lost its manifest."""
    training.record(K1, **{TEMPERATURE: 0.7})
    [other] = training.variants()
    training.record(K2)
    [mine] = [variant for variant in training.variants() if variant != other]
    (other / "step_000001").rename(mine / "step_000001")
    (mine / "manifest.json").unlink()
    before = contents(training.dumps)
    for mode in ("cache", "record", "refresh", "replay", "repeat"):
        with pytest.raises(
            ManifestError, match=r"manifest\.json is missing[\s\S]*step 1[\s\S]*Restore the manifest from a copy"
        ):
            training.open(mode)
    assert contents(training.dumps) == before


def test_entry_moved_here_from_another_variant_is_a_miss(training: Training, caplog: Any) -> None:
    training.record(K1, **{TEMPERATURE: 0.7})
    [other] = training.variants()
    training.record(K2)
    [mine] = [variant for variant in training.variants() if variant != other]
    (other / "step_000001").rename(mine / "step_000001")
    with training.open("cache") as skip:
        assert not skip.step(K1, inputs_of(K1), Engine()).hit
        assert skip.step(K2, inputs_of(K2), never).hit
    assert "was recorded with different settings than its manifest says" in caplog.text
    with training.open("replay") as replay, pytest.raises(MismatchError, match="moved or copied here"):
        replay.step(K1, inputs_of(K1), never)


def test_dump_dir_can_be_a_url(training: Training) -> None:
    skip = {"dump_dir": "memory://dumps/rollouts"}
    with training.open("cache", skip) as first:
        generated = first.step(K1, inputs_of(K1), Engine())
    with training.open("replay", skip) as replay:
        loaded = replay.step(K1, inputs_of(K1), never)
    assert_same_batch(without_timings(generated.batch), without_timings(loaded.batch))
