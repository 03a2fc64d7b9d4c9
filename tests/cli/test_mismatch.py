"""``rollout-skip mismatch``: what is shown of a recording with training columns, and what is said without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.arithmetic_run import make_training, record
from tests.cli_program import assert_fits, assert_one_line_error, run, run_json, run_without_torch
from tests.training_columns import TRAINING, WORST, add_columns, trained
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.config.modes import TrainingColumns as Level

STEPS = range(1, 4)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training, tokenizer = make_training(tmp_path_factory.mktemp("recorded"))
    return record(training, tokenizer, STEPS, prompts=2)


@pytest.fixture(scope="module")
def with_columns(recorded: Path) -> Path:
    add_columns(recorded)
    return recorded


def test_worst_token_is_named_with_its_row_values_and_text(with_columns: Path) -> None:
    found = run_json("mismatch", with_columns)
    step, row, position = WORST
    worst = found["worst"][0]
    tokens = RolloutStore(with_columns).get(RolloutKey(step)).batch["responses"][row].tolist()
    assert (worst["step"], worst["gen_batch"], worst["row"], worst["position"]) == (step, 0, row, position)
    assert worst["training_log_prob"] == -9.0
    assert worst["token"] == tokens[position]
    assert worst["text"] in worst["before"] + worst["text"] + worst["after"]
    assert found["tokens"][0]["token"] == tokens[position]


def test_figures_of_each_step_position_and_rule_are_in_the_json(with_columns: Path) -> None:
    found = run_json("mismatch", with_columns)
    assert found["training"] == TRAINING
    assert [step["step"] for step in found["steps"]] == list(STEPS)
    for step in found["steps"]:
        tensors = trained(with_columns, RolloutKey(step["step"]))
        chosen = tensors["response_mask"].bool()
        distance = (tensors["old_log_probs"] - tensors["rollout_log_probs"])[chosen].double()
        assert step["tokens"] == chosen.sum()
        assert step["k1"] == pytest.approx(-distance.mean().item(), rel=1e-4)
        assert step["mean_abs"] == pytest.approx(distance.abs().mean().item(), rel=1e-4)
        assert step["max_abs"] == pytest.approx(distance.abs().max().item(), rel=1e-4)
    assert sum(group["tokens"] for group in found["positions"]) == sum(step["tokens"] for step in found["steps"])
    assert [group["first"] for group in found["turns"]] == [0]
    rules = {(rule["setting"], rule["level"], rule["threshold"]): rule for rule in found["what_if"]}
    assert rules["rollout_is", "token", "2"]["mean_weight"] == pytest.approx(1.0, abs=0.02)
    assert rules["rollout_rs", "token_k1", "0.5_2"]["tokens"] > 0
    assert found["problems"] == []


def test_text_output_fits_a_terminal_and_steps_can_be_selected(with_columns: Path) -> None:
    done = run("mismatch", with_columns, "--steps", "2", "--worst", "3")
    assert done.returncode == 0, done.stderr
    assert "trainer -9.0000" in done.stdout
    assert "⟦" in done.stdout
    assert "the 3 tokens with the largest difference" in done.stdout
    tables = [line for line in done.stdout.splitlines() if "⟦" not in line and not line.startswith(("exp_", "arith"))]
    assert_fits("\n".join(tables), 100)
    assert [step["step"] for step in run_json("mismatch", with_columns, "--steps", "2")["steps"]] == [2]


def test_thresholds_can_be_chosen_in_the_form_of_verls_settings(with_columns: Path) -> None:
    found = run_json("mismatch", with_columns, "--truncate", "token:0.9_1.1", "--reject", "seq_max_k3:2")
    assert [rule["overrides"] for rule in found["what_if"]] == [
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.9_1.1",
        "algorithm.rollout_correction.rollout_rs=seq_max_k3 algorithm.rollout_correction.rollout_rs_threshold=2",
    ]
    assert_one_line_error(run("mismatch", with_columns, "--reject", "token_k4:2"), "is not a rollout_rs")


def test_it_needs_no_torch(with_columns: Path) -> None:
    done = run_without_torch("mismatch", with_columns)
    assert done.returncode == 0, done.stderr


def test_all_columns_give_the_same_result_and_a_training_can_be_chosen(with_columns: Path) -> None:
    other = "20261119T224500.123Z-1a2b3c4d"
    add_columns(with_columns, other, Level.ALL)
    default, chosen = (run_json("mismatch", with_columns, *more) for more in ((), ("--training", other)))
    assert default.pop("training") == TRAINING
    assert chosen.pop("training") == other
    assert chosen == default
    assert_one_line_error(run("mismatch", with_columns, "--training", "none"), "no columns of a training 'none'", other)


def test_log_probs_that_the_trainer_does_not_pass_on_come_from_the_recording(recorded: Path) -> None:
    training = "20261119T234500.123Z-1a2b3c4d"
    add_columns(recorded, training, leave_out=("rollout_log_probs",))
    found = run_json("mismatch", recorded, "--training", training)
    assert found["worst"][0]["training_log_prob"] == -9.0


def copy_of(variant: Path, folder: Path) -> Path:
    """A copy without columns."""
    return Path(shutil.copytree(variant, folder / "run" / "variant", ignore=shutil.ignore_patterns("columns")))


def test_without_columns_the_command_says_how_to_record_them(recorded: Path, tmp_path: Path) -> None:
    variant = copy_of(recorded, tmp_path)
    done = run("mismatch", variant)
    assert_one_line_error(done, "has no training columns", "rollout_skip.training_columns=log_probs", "a replay")


def test_without_rollout_log_probs_the_command_says_which_setting_is_missing(recorded: Path, tmp_path: Path) -> None:
    variant = copy_of(recorded, tmp_path)
    add_columns(variant, leave_out=("rollout_log_probs",))
    with RolloutStore(variant) as store:
        for key in list(store):
            batch = store.get(key)
            batch.batch.pop("rollout_log_probs")
            store.put(key, batch, replace=True)
    done = run("mismatch", variant)
    assert_one_line_error(done, "have no rollout_log_probs", "actor_rollout_ref.rollout.calculate_log_probs=True")


def test_pruned_rollouts_leave_the_figures_and_lose_only_the_text(recorded: Path, tmp_path: Path) -> None:
    variant = copy_of(recorded, tmp_path)
    add_columns(variant)
    for key in list(RolloutStore(variant)):
        RolloutStore(variant).delete(key)
    found = run_json("mismatch", variant)
    assert found["worst"][0]["training_log_prob"] == -9.0
    assert found["worst"][0]["token"] is None
    assert found["tokens"] == []


def test_damaged_columns_of_one_step_are_a_problem_and_the_others_are_counted(recorded: Path, tmp_path: Path) -> None:
    variant = copy_of(recorded, tmp_path)
    add_columns(variant)
    [part] = variant.glob("columns/*/step_000002/*.parquet")
    part.write_bytes(part.read_bytes()[:-100])
    found = run_json("mismatch", variant, code=1)
    assert [step["step"] for step in found["steps"]] == [1, 3]
    assert [problem["step"] for problem in found["problems"]] == [2]


def test_hostile_columns_are_an_error_and_not_a_traceback(recorded: Path, tmp_path: Path) -> None:
    variant = copy_of(recorded, tmp_path)
    with RolloutStore(variant / "columns" / TRAINING) as store:
        store.put(RolloutKey(1), RolloutStore(variant).get(RolloutKey(1)))
    assert_one_line_error(run("mismatch", variant), "does not contain training columns, but rollouts")


def test_nothing_to_compare_in_other_steps_is_an_error(with_columns: Path) -> None:
    assert_one_line_error(run("mismatch", with_columns, "--steps", "9"), "none of the selected steps")


def test_bypass_mode_is_explained(recorded: Path, tmp_path: Path) -> None:
    training, tokenizer = make_training(tmp_path)
    bypass = {"rollout_correction": {"bypass_mode": True}, "adv_estimator": "grpo"}
    original = training.config
    training.config = lambda *given, **changes: original(*given, **changes, algorithm=bypass)  # type: ignore[method-assign]
    variant = record(training, tokenizer, range(1, 2), prompts=1)
    add_columns(variant)
    assert "bypass_mode is on" in json.dumps(run_json("mismatch", variant)["notes"])
