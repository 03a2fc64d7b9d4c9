"""Audits of ledgers that were written as trainings write them: what differs, from which step on, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.written_ledgers import (
    OTHER_REPLAY,
    RECORDING,
    REPLAY,
    ledger_path,
    with_metric,
    with_rollouts_of,
    with_tensor,
    write,
)
from verl_rollout_skip.errors import LedgerError
from verl_rollout_skip.replay.ledger.compare import Tolerance
from verl_rollout_skip.replay.ledger.line import LedgerStep, StepRollout
from verl_rollout_skip.replay.ledger.stages import Stage
from verl_rollout_skip.store.storage import open_storage
from verl_rollout_skip.tools.audit import Audit, Figure, Kind, Rules, Verdict, audit, explain, summarize
from verl_rollout_skip.tools.ledgers import VariantLedgers

SLOWER = {"training_hash": "u" * 64, "training_settings": {"actor_rollout_ref.actor.optim.lr": 1e-07}}


def ledgers(variant: Path | str) -> VariantLedgers:
    return VariantLedgers(open_storage(str(variant)))


def audits(variant: Path | str, rules: Rules | None = None) -> list[Audit]:
    return [audit(*pair, rules) for pair in ledgers(variant).later_trainings()]


def figure(found: Audit, name: str) -> Figure:
    [figure] = [figure for figure in found.figures if figure.name.text == name]
    return figure


def test_a_replay_that_computed_the_same_is_identical(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 6))
    write(tmp_path, REPLAY, range(1, 6), RECORDING)
    [found] = audits(tmp_path)
    assert found.verdict is Verdict.IDENTICAL
    assert found.steps == (1, 2, 3, 4, 5)
    assert (found.differing, found.first, explain(found)) == ([], None, [])
    assert summarize(found) == "identical in all 5 steps, 9 figures"
    assert [figure.compared for figure in found.figures] == [5, 5, 5, 5, 5, 5, 5, 5, 2]  # two checkpoints


def test_a_changed_loss_is_named_with_its_first_step_and_size(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 6), change=with_metric("actor/pg_loss", lambda _: 2.0))
    write(tmp_path, REPLAY, range(1, 6), RECORDING, with_metric("actor/pg_loss", lambda _: 2.0 + 2**-20, 1))
    write(
        tmp_path,
        OTHER_REPLAY,
        range(1, 6),
        RECORDING,
        lambda step: with_metric("actor/pg_loss", lambda _: 2.0 + step.step * 2**-20 * (step.step > 2))(step),
    )
    found = audits(tmp_path)[1]
    assert found.verdict is Verdict.DIFFERENT
    loss = figure(found, "actor/pg_loss")
    assert (loss.first_step, loss.differing, loss.compared) == (3, 3, 5)
    assert (loss.max_absolute, loss.max_relative) == (5 * 2**-20, 5 * 2**-21)
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (3, Stage.UPDATE)
    assert summarize(found) == "different from step 3 on: 1 of 9 figures"
    assert audits(tmp_path)[0].first.step == 1


def test_the_first_stage_that_differs_comes_first(tmp_path: Path) -> None:
    """A changed reward changes advantages, losses and weights too; the reward is the cause."""

    def change(step: LedgerStep) -> LedgerStep:
        for changed in (
            with_metric("actor/pg_loss", lambda value: value + 1, 2),
            with_metric("critic/advantages/mean", lambda value: value + 1, 2),
            with_tensor("advantages", lambda values: values + 1, 2),
            with_tensor("token_level_scores", lambda values: values + 1, 2),
        ):
            step = changed(step)
        return replace(step, weights=dict.fromkeys(step.weights, "0" * 32))

    write(tmp_path, RECORDING, range(1, 4))
    write(tmp_path, REPLAY, range(1, 4), RECORDING, change)
    [found] = audits(tmp_path)
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (2, Stage.REWARD)
    assert [figure.name.text for figure in found.differing] == [
        "token_level_scores",
        "advantages",
        "critic/advantages/mean",
        "actor/pg_loss",
        "weights of the actor",
    ]
    assert explain(found)[0].startswith("first difference: step 2, reward: token_level_scores/")


def test_a_tensor_with_the_same_moments_differs_by_its_digest(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 2), change=with_tensor("advantages", lambda values: values))
    write(tmp_path, REPLAY, range(1, 2), RECORDING, with_tensor("advantages", lambda values: values[:, ::-1].copy()))
    [found] = audits(tmp_path)
    reordered = figure(found, "advantages")
    assert (reordered.differing, reordered.max_absolute) == (1, None)
    assert found.verdict is Verdict.DIFFERENT
    [tolerant] = audits(tmp_path, Rules(Tolerance(rtol=1e-6)))
    assert tolerant.verdict is Verdict.WITHIN_TOLERANCE


def test_last_bits_from_another_layout_are_within_tolerance_and_the_layout_is_named(tmp_path: Path) -> None:
    def last_bits(step: LedgerStep) -> LedgerStep:
        step = with_metric("actor/grad_norm", lambda value: float(np.nextafter(value, 9)))(step)
        return replace(step, weights=dict.fromkeys(step.weights, "f" * 32))

    write(tmp_path, RECORDING, range(1, 4))
    layout = {"nnodes": 1, "n_gpus_per_node": 2, "world_size": 2}
    write(tmp_path, REPLAY, range(1, 4), RECORDING, last_bits, gpu_layout=layout, versions={"verl": "0.9.2"})
    assert audits(tmp_path)[0].verdict is Verdict.DIFFERENT
    [found] = audits(tmp_path, Rules(Tolerance(rtol=1e-6)))
    assert found.verdict is Verdict.WITHIN_TOLERANCE
    assert summarize(found) == "within tolerance in 3 steps: 2 of 9 figures differ"
    assert explain(found) == [
        "layout, which may change last bits: n_gpus_per_node: 1 → 2; world_size: 1 → 2",
        "versions: torch: 2.13.0 → not set; verl: 0.9.1 → 0.9.2",
        "only the digests differ, which no tolerance can judge: weights of the actor",
    ]


def test_a_tolerance_for_one_figure_does_not_hide_the_others(tmp_path: Path) -> None:
    def change(step: LedgerStep) -> LedgerStep:
        step = with_metric("actor/grad_norm", lambda value: value * 1.01)(step)
        return with_metric("critic/score/mean", lambda value: value * 1.01, 3)(step)

    write(tmp_path, RECORDING, range(1, 4))
    write(tmp_path, REPLAY, range(1, 4), RECORDING, change)
    [found] = audits(tmp_path, Rules(Tolerance(overrides={"actor/*": (0.02, 0.0)})))
    assert [figure.name.text for figure in found.beyond] == ["critic/score/mean"]
    assert (figure(found, "actor/grad_norm").differing, figure(found, "actor/grad_norm").beyond) == (3, 0)
    assert found.first is not None
    assert found.first.step == 3


def test_the_first_step_is_the_first_beyond_the_tolerance(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 5), change=with_metric("actor/pg_loss", lambda _: 1.0))
    drift = {1: 1.0, 2: 1.01, 3: 1.02, 4: 1.5}
    write(
        tmp_path,
        REPLAY,
        range(1, 5),
        RECORDING,
        lambda step: with_metric("actor/pg_loss", lambda _: drift[step.step])(step),
    )
    [found] = audits(tmp_path, Rules(Tolerance(rtol=0.1)))
    loss = figure(found, "actor/pg_loss")
    assert (loss.first_step, loss.differing, loss.beyond) == (4, 3, 1)


def test_a_metric_that_only_one_training_has_is_a_difference_unless_it_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 3))
    write(tmp_path, REPLAY, range(1, 3), RECORDING, with_metric("actor/new", lambda _: 1.0))
    [found] = audits(tmp_path, Rules(Tolerance(rtol=1.0)))
    assert [figure.name.text for figure in found.beyond] == ["actor/new"]
    assert figure(found, "actor/new").max_absolute is None
    [found] = audits(tmp_path, Rules(ignore=("actor/n*",)))
    assert found.verdict is Verdict.IDENTICAL


def test_if_every_figure_is_ignored_nothing_is_compared(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 3))
    write(tmp_path, REPLAY, range(1, 3), RECORDING)
    [found] = audits(tmp_path, Rules(ignore=("*",)))
    assert found.verdict is Verdict.NOT_COMPARED


def test_a_training_without_tensors_is_compared_by_its_metrics_and_that_is_said(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 3))
    write(tmp_path, REPLAY, range(1, 3), RECORDING, lambda step: replace(step, tensors={}))
    [found] = audits(tmp_path)
    assert found.verdict is Verdict.IDENTICAL
    assert "steps 1-2: tensors are not compared, because one training has none" in explain(found)


def test_a_variant_with_other_rollout_settings_is_pointed_out(tmp_path: Path) -> None:
    write(tmp_path / "one", RECORDING, range(1, 3))
    write(tmp_path / "two", RECORDING, range(1, 3), config_hash="d" * 64)
    found = audit(ledgers(tmp_path / "one").recording(), ledgers(tmp_path / "two").recording())
    assert explain(found) == ["the settings that rollouts depend on differ: rollout-skip diff lists them"]


def test_nan_equals_nan_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 5), change=with_metric("actor/pg_loss", lambda _: math.nan))
    write(tmp_path, REPLAY, range(1, 5), RECORDING, with_metric("actor/pg_loss", lambda _: math.nan))
    write(tmp_path, OTHER_REPLAY, range(1, 5), RECORDING, with_metric("actor/pg_loss", lambda value: 1.0, 3))
    same, other = audits(tmp_path, Rules(Tolerance(rtol=1.0)))
    assert same.verdict is Verdict.IDENTICAL
    assert figure(other, "actor/pg_loss").beyond == 4
    assert math.isnan(figure(other, "actor/pg_loss").max_absolute or 0)


def test_each_step_is_compared_with_the_training_that_recorded_it(tmp_path: Path) -> None:
    """The recording crashed after step 3, a second training loaded it and recorded steps 4 to 6."""
    before, after = (with_metric("actor/pg_loss", lambda _, loss=loss: loss) for loss in (1.0, 2.0))
    write(tmp_path, RECORDING, range(1, 4), change=before, end=None)
    loads = dict.fromkeys(range(1, 4), RECORDING)
    write(tmp_path, REPLAY, range(1, 7), loads, lambda step: (before if step.step < 4 else after)(step), mode="cache")
    both = {**loads, **dict.fromkeys(range(4, 7), REPLAY)}
    write(tmp_path, OTHER_REPLAY, range(1, 7), both, lambda step: (before if step.step < 4 else after)(step))
    continued, replayed = audits(tmp_path)
    assert (continued.verdict, continued.steps, continued.only_b) == (Verdict.IDENTICAL, (1, 2, 3), (4, 5, 6))
    assert (replayed.verdict, replayed.steps) == (Verdict.IDENTICAL, (1, 2, 3, 4, 5, 6))
    assert replayed.a.describe() == "the recording, by 2 trainings (record, cache, steps 1-6)"
    recording = ledgers(tmp_path).recording()
    assert [recording.at(step).header.training for step in recording.steps] == [RECORDING] * 3 + [REPLAY] * 3


def test_a_killed_training_is_compared_as_far_as_its_ledger_goes(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 6))
    write(tmp_path, REPLAY, range(1, 5), RECORDING, end=None)
    path = ledger_path(tmp_path, REPLAY)
    path.write_bytes(path.read_bytes()[:-10])
    [found] = audits(tmp_path)
    assert (found.verdict, found.steps, found.only_a) == (Verdict.IDENTICAL, (1, 2, 3), (4, 5))
    only, torn, killed = explain(found)
    assert only == "only in a: steps 4-5"
    assert "the training ended while it was being written" in torn
    assert killed == f"{REPLAY} has not ended: it was killed, or it is still running"


def test_an_off_policy_replay_is_compared_up_to_its_first_update(tmp_path: Path) -> None:
    lower = with_metric("actor/pg_loss", lambda value: value / 2)
    write(tmp_path, RECORDING, range(1, 4))
    write(tmp_path, REPLAY, range(1, 4), RECORDING, lower, **SLOWER)
    [found] = audits(tmp_path)
    assert (found.verdict, found.steps) == (Verdict.IDENTICAL, (1,))
    assert {figure.name.stage for figure in found.figures} == {
        Stage.ROLLOUT,
        Stage.REWARD,
        Stage.OLD_LOG_PROBS,
        Stage.ADVANTAGES,
    }
    assert explain(found) == [
        "step 1: compared only up to the update, because the settings of the training differ",
        "steps 2-3: not compared, because the settings of the training differ (--all-steps compares them)",
        "settings: actor_rollout_ref.actor.optim.lr: 1e-06 → 1e-07",
    ]
    [whole] = audits(tmp_path, Rules(all_steps=True))
    assert (whole.verdict, whole.steps) == (Verdict.DIFFERENT, (1, 2, 3))


def test_two_off_policy_replays_with_the_same_settings_are_compared_in_full(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 4))
    for name in (REPLAY, OTHER_REPLAY):
        write(tmp_path, name, range(1, 4), RECORDING, **SLOWER)
    found = audit(ledgers(tmp_path).training(REPLAY), ledgers(tmp_path).training(OTHER_REPLAY))
    assert (found.verdict, found.steps) == (Verdict.IDENTICAL, (1, 2, 3))


def test_two_recordings_with_different_settings_share_only_the_first_step(tmp_path: Path) -> None:
    write(tmp_path / "one", RECORDING, range(1, 4))
    write(tmp_path / "two", RECORDING, range(1, 4), change=with_metric("actor/pg_loss", lambda _: 7.0), **SLOWER)
    found = audit(ledgers(tmp_path / "one").recording(), ledgers(tmp_path / "two").recording())
    assert (found.verdict, found.steps) == (Verdict.IDENTICAL, (1,))


def test_the_code_of_the_trainer_may_differ_because_an_audit_is_to_find_what_that_changes(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 4), training_settings={"code of the trainer class": "old"})
    changed = {"training_hash": "u" * 64, "training_settings": {"code of the trainer class": "new"}}
    write(tmp_path, REPLAY, range(1, 4), RECORDING, with_metric("actor/pg_loss", lambda _: 7.0, 3), **changed)
    [found] = audits(tmp_path)
    assert (found.verdict, found.steps) == (Verdict.DIFFERENT, (1, 2, 3))
    assert "settings: code of the trainer class: old → new" in explain(found)


def test_repeated_steps_are_not_compared_with_what_was_trained_on_them_first(tmp_path: Path) -> None:
    """A training of 4 steps repeats the first two rollouts of a recording of 6."""
    write(tmp_path, RECORDING, range(1, 7))
    repeated = with_rollouts_of({3: 1, 4: 2})

    def change(step: LedgerStep) -> LedgerStep:
        return repeated(with_metric("actor/pg_loss", lambda _: 7.0, 3)(step))

    write(tmp_path, REPLAY, range(1, 5), RECORDING, change, mode="repeat")
    [found] = audits(tmp_path)
    assert (found.verdict, found.steps) == (Verdict.IDENTICAL, (1, 2))
    assert "step 3: not compared, because different rollouts were loaded" in explain(found)
    assert "step 4: not compared, because the trainings learned from different rollouts before" in explain(found)
    [whole] = audits(tmp_path, Rules(all_steps=True))
    assert whole.verdict is Verdict.DIFFERENT


def test_steps_after_the_end_of_the_recording_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 3))
    write(tmp_path, REPLAY, range(1, 5), RECORDING, with_rollouts_of({3: 1, 4: 2}), mode="repeat")
    [found] = audits(tmp_path)
    assert (found.verdict, found.steps, found.only_b) == (Verdict.IDENTICAL, (1, 2), (3, 4))
    reason = f"{RECORDING}, which recorded their rollouts, has no such steps"
    assert f"steps 3-4: not compared, because {reason}" in explain(found)


def test_two_recordings_part_where_they_generate_different_rollouts(tmp_path: Path) -> None:
    """The engine is not deterministic. What follows differs anyway, so only the first difference counts."""

    def other(step: LedgerStep) -> LedgerStep:
        if step.step < 2:
            return step
        changed = with_rollouts_of({2: 20, 3: 30})(step)
        return with_metric("actor/pg_loss", lambda _: 7.0)(with_tensor("responses", lambda values: values)(changed))

    write(tmp_path / "one", RECORDING, range(1, 4))
    write(tmp_path / "two", RECORDING, range(1, 4), change=other)
    found = audit(ledgers(tmp_path / "one").recording(), ledgers(tmp_path / "two").recording())
    assert (found.verdict, found.steps) == (Verdict.DIFFERENT, (1, 2))
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (2, Stage.ROLLOUT)


def test_validation_is_not_compared_because_each_training_generates_it_again(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 4), change=with_metric("val-core/addition/acc/mean@1", lambda _: 0.5))
    write(tmp_path, REPLAY, range(1, 4), RECORDING, with_metric("val-core/addition/acc/mean@1", lambda _: 0.6))
    [found] = audits(tmp_path, Rules(all_steps=True))
    assert found.verdict is Verdict.IDENTICAL


def test_without_the_ledger_of_the_recording_nothing_is_compared(tmp_path: Path) -> None:
    write(tmp_path, REPLAY, range(1, 4), RECORDING)
    write(tmp_path, OTHER_REPLAY, range(1, 4), dict.fromkeys(range(1, 4)))
    named, unnamed = audits(tmp_path)
    assert named.verdict is unnamed.verdict is Verdict.NOT_COMPARED
    assert (
        f"steps 1-3: not compared, because there is no ledger of {RECORDING}, which recorded their rollouts"
        in explain(named)
    )
    assert "steps 1-3: not compared, because their rollouts were recorded without a ledger" in explain(unnamed)
    with pytest.raises(LedgerError, match=f"rollout-skip audit .*/ledgers/{REPLAY} .*/ledgers/{OTHER_REPLAY}"):
        ledgers(tmp_path).recording()


def test_a_variant_without_ledgers_or_replays_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledgers in .*rollout_skip\.audit=auto"):
        ledgers(tmp_path)
    write(tmp_path, RECORDING, range(1, 4))
    with pytest.raises(LedgerError, match=r"Replay it with rollout_skip\.mode=replay"):
        audits(tmp_path)


def test_the_beginning_of_a_name_is_enough_if_it_is_unique(tmp_path: Path) -> None:
    write(tmp_path, RECORDING, range(1, 4))
    write(tmp_path, REPLAY, range(1, 4), RECORDING)
    assert ledgers(tmp_path).training("20261119T22").name == REPLAY
    with pytest.raises(LedgerError, match=f"2 of them begin with '2026'. Choose one: {RECORDING}, {REPLAY}"):
        ledgers(tmp_path).training("2026")
    with pytest.raises(LedgerError, match="none of them begins with 'x'"):
        ledgers(tmp_path).training("x")


def test_the_critics_tensors_are_listed_only_where_they_differ_from_the_actors(tmp_path: Path) -> None:
    def with_critic(step: LedgerStep) -> LedgerStep:
        own = with_tensor("values", lambda values: values + 1)(step)
        critic = {**step.tensors, "values": own.tensors["values"]}
        return replace(with_tensor("values", lambda values: values)(step), critic_tensors=critic)

    write(tmp_path, RECORDING, range(1, 3), change=with_critic)
    write(tmp_path, REPLAY, range(1, 3), RECORDING, with_critic)
    [found] = audits(tmp_path)
    tensors = [figure.name for figure in found.figures if figure.name.kind is Kind.TENSOR]
    assert [name.text for name in tensors if "critic" in name.text] == ["critic's values"]
    assert figure(found, "critic's values").name.stage is Stage.VALUES


def test_dapo_steps_with_batches_by_two_trainings_belong_to_the_later_one(tmp_path: Path) -> None:
    """A training crashed between two generation batches of step 2; the next one loaded the first and made the other."""

    def batches(by: list[str | None], hit: list[bool]) -> tuple[StepRollout, ...]:
        return tuple(StepRollout(i, "d" * 32, hit[i], by[i]) for i in range(len(by)))

    def second(step: LedgerStep) -> LedgerStep:
        return replace(step, rollouts=batches([RECORDING, None], [True, False])) if step.step == 2 else step

    def third(step: LedgerStep) -> LedgerStep:
        return replace(step, rollouts=batches([RECORDING, REPLAY], [True, True])) if step.step == 2 else step

    write(tmp_path, RECORDING, range(1, 2), end=None)
    write(tmp_path, REPLAY, range(1, 3), {1: RECORDING}, second, mode="cache")
    write(tmp_path, OTHER_REPLAY, range(1, 3), {1: RECORDING, 2: REPLAY}, third)
    found = audits(tmp_path)[1]
    assert [found.a.at(step).header.training for step in found.steps] == [RECORDING, REPLAY]


def test_ledgers_in_an_object_store_are_compared(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run/variant"
    write(url, RECORDING, range(1, 4))
    write(url, REPLAY, range(1, 4), RECORDING, with_metric("actor/pg_loss", lambda _: 0.0, 2))
    [found] = audits(url)
    assert found.first is not None
    assert found.first.step == 2
