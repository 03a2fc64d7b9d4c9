"""Real trainings that differ from their recording in one place: the ledger says in which step and in which stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli_program import run, run_json
from tests.e2e.main_perturbed import LOG_PROB, LOSS, REWARD, VARIABLE
from tests.e2e.training import PPO, Finished, Trainings, assert_proved, skip, variant_in
from verl_rollout_skip.replay.ledger.compare import Tolerance, compare_steps, layout_changes
from verl_rollout_skip.replay.ledger.file import Ledger, ledger_names, read_ledger
from verl_rollout_skip.store.storage import open_storage

pytestmark = pytest.mark.slow

STEPS = 3
PERTURBED = replace(PPO, module="tests.e2e.main_perturbed")
# A critic, a reference policy and both kinds of KL penalty, so that every stage has values.
GAE = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


def ledgers(dumps: Path) -> list[Ledger]:
    """The ledgers of all trainings, oldest first."""
    storage = open_storage(str(variant_in(dumps)))
    return [read_ledger(storage, name) for name in ledger_names(storage)]


def warning(training: Finished) -> str:
    (found,) = [text for text in training.messages if "differs from its recording" in text]
    return found


@pytest.fixture(scope="module")
def recorded(trainings: Trainings, dumps: Path) -> Finished:
    return trainings.run(PERTURBED, "record", *GAE, *skip("record", dumps))


@pytest.fixture(scope="module")
def replayed(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return trainings.run(PERTURBED, "replay", *GAE, *skip("replay", dumps))


def perturbed(trainings: Trainings, dumps: Path, name: str, *settings: str) -> Finished:
    changed = replace(PERTURBED, env={VARIABLE: name})
    return trainings.run(changed, name, *GAE, *skip("replay", dumps), *settings)


@pytest.fixture(scope="module")
def scaled_loss(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return perturbed(trainings, dumps, LOSS)


@pytest.fixture(scope="module")
def changed_reward(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return perturbed(trainings, dumps, REWARD)


@pytest.fixture(scope="module")
def changed_log_prob(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return perturbed(trainings, dumps, LOG_PROB)


@pytest.fixture(scope="module")
def other_critic(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return perturbed(trainings, dumps, "critic", "++critic.fsdp.seed=7")


@pytest.fixture(scope="module")
def two_workers(trainings: Trainings, recorded: Finished, dumps: Path) -> Finished:
    return perturbed(trainings, dumps, "two-workers", "trainer.n_gpus_per_node=2")


def test_the_same_training_is_identical_in_every_value_of_every_step(replayed: Finished, dumps: Path) -> None:
    assert_proved(replayed, STEPS)
    one, other = ledgers(dumps)[:2]
    for recorded, again in zip(one.steps, other.steps, strict=True):
        assert compare_steps(recorded, again) == []
        assert {"values", "returns", "ref_log_prob"} <= recorded.tensors.keys()
        assert recorded.critic_tensors.keys() == recorded.tensors.keys()
    assert one.steps[-1].weights.keys() == {"actor", "critic"}
    assert one.steps[-1].weights == other.steps[-1].weights


def test_a_policy_loss_that_is_a_millionth_larger_is_found_in_the_update_of_its_step(scaled_loss: Finished) -> None:
    assert "step 2, update: actor/" in warning(scaled_loss)
    assert "identical to the recording in 1 step, then different" in scaled_loss.summary


def test_one_changed_reward_is_found_in_the_rewards_of_its_step(changed_reward: Finished) -> None:
    assert "step 2, reward: rm_scores/" in warning(changed_reward)


def test_one_changed_log_prob_is_found_in_the_old_log_probs_of_its_step(changed_log_prob: Finished) -> None:
    assert "step 2, old log-probs: old_log_probs/" in warning(changed_log_prob)


def test_another_seed_of_the_critic_is_found_in_the_values_of_the_first_step(other_critic: Finished) -> None:
    text = warning(other_critic)
    assert "step 1, values: values/" in text
    assert "critic.fsdp.seed" in text


def test_two_workers_differ_in_last_bits_and_the_layout_is_named_as_the_reason(
    two_workers: Finished, recorded: Finished, dumps: Path
) -> None:
    text = warning(two_workers)
    assert "A likely reason is the layout, which changes the last bits" in text
    assert "world_size: 1 → 2" in text
    one = ledgers(dumps)[0]
    (other,) = [ledger for ledger in ledgers(dumps) if ledger.header.gpu_layout["world_size"] == 2]
    assert "world_size: 1 → 2" in layout_changes(one.header, other.header)
    close = Tolerance(rtol=1e-2, atol=1e-3)
    assert [compare_steps(*pair) for pair in zip(one.steps, other.steps, strict=True)] != [[]] * STEPS
    learned = {f"{name}/{figure}" for name in one.steps[0].tensors for figure in ("min", "max", "mean")}
    found = compare_steps(one.steps[0], other.steps[0], close)
    assert not [difference for difference in found if difference.name in learned]


def test_the_audit_names_the_step_and_the_stage_of_each_difference(
    replayed: Finished,
    scaled_loss: Finished,
    changed_reward: Finished,
    changed_log_prob: Finished,
    other_critic: Finished,
    dumps: Path,
) -> None:
    found = run_json("audit", variant_in(dumps), code=1)["audits"]
    firsts = [None if audit["first"] is None else (audit["first"]["step"], audit["first"]["stage"]) for audit in found]
    expected = {None, (2, "update"), (2, "reward"), (2, "old log-probs"), (1, "values")}
    assert expected <= set(firsts)
    assert [audit["verdict"] for audit in found].count("identical") == 1
    for audit, first in zip(found, firsts, strict=True):
        if audit["settings"]:
            assert (first, audit["settings"]) == ((1, "values"), ["critic.fsdp.seed: 42 → 7"])


def test_the_audit_accepts_two_workers_within_a_tolerance_and_names_the_layout(
    two_workers: Finished, dumps: Path
) -> None:
    (ledger,) = [ledger for ledger in ledgers(dumps) if ledger.header.gpu_layout["world_size"] == 2]
    path = variant_in(dumps) / "ledgers" / ledger.header.training
    assert run("audit", path).returncode == 1
    done = run("audit", path, "--rtol", "1e-3", "--atol", "1e-3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"within tolerance in {STEPS} steps" in done.stdout
    assert "world_size: 1 → 2" in done.stdout


def test_the_ledger_of_a_killed_training_is_compared_from_the_first_step_on(
    trainings: Trainings, tmp_path: Path
) -> None:
    settings = (f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable", *skip("cache", tmp_path))

    def logged_two_steps(_: Path) -> bool:
        files = list(tmp_path.glob("*/*/ledgers/*.jsonl"))
        return bool(files) and files[0].read_bytes().count(b"\n") >= 3

    trainings.run_until(PPO, "killed", logged_two_steps, *settings)
    (killed,) = ledgers(tmp_path)
    assert [line.step for line in killed.steps] == [1, 2]
    assert killed.end is None

    continued = trainings.run(PPO, "continued", *settings)
    assert "identical to the recording in " in continued.summary
    assert not any("differs from its recording" in text for text in continued.messages)
    _, ledger = ledgers(tmp_path)
    assert [line.step for line in ledger.steps] == [1, 2, 3]
    assert [compare_steps(*pair) for pair in zip(killed.steps, ledger.steps[:2], strict=True)] == [[], []]
    assert {rollout.recorded_by for rollout in ledger.steps[0].rollouts} == {killed.header.training}
