"""``rollout-skip diff`` on recordings with known differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.batches import rollout_input, rollout_output
from tests.cli_program import assert_fits, assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.entry_files import part_file
from tests.trainings import Engine, Training, inputs_of
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main

K1, K2 = RolloutKey(1), RolloutKey(2)


def diff(capsys: Any, a: Any, b: Any, *options: str, code: int = 1) -> dict[str, Any]:
    assert main(["diff", str(a), str(b), *options, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def step_of(found: dict[str, Any]) -> dict[str, Any]:
    [pair] = found["pairs"]
    [step] = pair["steps"]
    return step


def store_with(folder: Path, batch: Any, inputs: Any = None, key: RolloutKey = K1) -> Path:
    with RolloutStore(folder) as store:
        store.put(key, batch, inputs=rollout_input(len(batch)) if inputs is None else inputs)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Two variants of one run with different temperature and learning rate. The second has only one step."""
    training = Training(tmp_path_factory.mktemp("recorded"))
    training.record(K1, K2)
    changes = {"actor_rollout_ref__rollout__temperature": 0.7, "actor_rollout_ref__actor__optim__lr": 2e-6}
    with training.open("record", **changes) as skip:
        skip.step(K1, inputs_of(K1), Engine(seed=7))
    return training


def variants(training: Training) -> tuple[Path, Path]:
    a, b = sorted(training.variants(), key=lambda path: -len(list(path.glob("step_*"))))
    return a, b


def test_settings_are_compared_before_rows(recorded: Training) -> None:
    done = run("diff", *variants(recorded))
    assert done.returncode == 1, done.stderr
    settings, steps = done.stdout.split("\nstep ")
    assert "actor_rollout_ref.rollout.temperature: 1.0 → 0.7" in settings
    assert "training: different (1)\n  actor_rollout_ref.actor.optim.lr: 1e-06 → 2e-06" in settings
    assert "layout: the same" in settings
    assert "only in a: 1 entry of steps 2" in steps
    assert_fits(steps.split("only in a")[0])


def test_a_copy_has_no_differences_and_exit_code_0(recorded: Training) -> None:
    a, _ = variants(recorded)
    done = run("diff", a, a)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the same\n")


def test_torch_is_not_imported(recorded: Training) -> None:
    done = run_without_torch("diff", *variants(recorded))
    assert done.returncode == 1, done.stderr


def test_responses_are_compared_token_by_token(tmp_path: Path, capsys: Any) -> None:
    """Row 2 differs from its third token on, row 5 is truncated, and the other rows are equal."""
    batch, changed = rollout_output(8, seed=3), rollout_output(8, seed=3)
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    assert lengths[2] > 3
    assert lengths[5] > 2
    changed.batch["responses"][2, 2] += 1
    position = lengths[5] - 1
    for name in ("responses", "response_mask"):
        changed.batch[name][5, position] = 0
    for name in ("input_ids", "attention_mask"):
        changed.batch[name][5, 6 + position] = 0
    changed.batch["rollout_log_probs"][5, position] = 0
    changed.batch["rm_scores"][5] = 0
    changed.batch["rm_scores"][5, position - 1] = -3.0
    step = step_of(diff(capsys, store_with(tmp_path / "a", batch), store_with(tmp_path / "b", changed)))
    assert not step["same"]
    responses = step["responses"]
    assert (responses["same"], responses["differ"], responses["earliest"]) == (6, 2, min(2, position))
    first = responses["first"]
    assert (first["row_a"], first["row_b"], first["token"]) == (2, 2, 2)
    ours = batch.batch["responses"][2, : lengths[2]].tolist()
    assert first["tokens_a"]["before"] == first["tokens_b"]["before"] == ours[:2]
    assert first["tokens_a"]["after"] == ours[2:]
    assert first["tokens_b"]["after"] == [ours[2] + 1, *ours[3:]]
    assert step["prompts"] == {"both": 8, "only_a": 0, "only_b": 0, "reordered": False, "other_inputs": 0}
    scores = batch.batch["rm_scores"].sum(-1)
    assert step["score"]["mean_a"] == pytest.approx(scores.mean().item())
    assert step["score"]["mean_b"] == pytest.approx((scores.sum() - scores[5] - 3).item() / 8)
    assert step["score"]["changed"] == 1
    assert step["length"]["mean_b"] == pytest.approx(step["length"]["mean_a"] - 1 / 8)
    assert {"responses", "rm_scores", "skip__score"} <= set(step["columns"])
    assert "prompts" not in step["columns"]


def test_the_first_difference_is_shown_as_text_if_there_is_a_tokenizer(tmp_path: Path, capsys: Any) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(50_000)}, unk_token="w0"))
    batch = rollout_output(2, seed=3)
    changed = rollout_output(2, seed=3)
    changed.batch["responses"][0, 0] = 4242
    a, b = store_with(tmp_path / "a", batch), store_with(tmp_path / "b", changed)
    for folder in (a, b):
        (folder / "tokenizer").mkdir()
        words.save(str(folder / "tokenizer" / "tokenizer.json"))
    step = step_of(diff(capsys, a, b))
    assert step["responses"]["first"]["text_b"]["after"].startswith("w4242")
    assert main(["diff", str(a), str(b)]) == 1
    assert "⟨w4242 " in capsys.readouterr().out


def test_different_log_probs_are_reported_even_if_the_tokens_are_the_same(tmp_path: Path, capsys: Any) -> None:
    batch, changed = rollout_output(4), rollout_output(4)
    changed.batch["rollout_log_probs"][0, 0] -= 0.5
    step = step_of(diff(capsys, store_with(tmp_path / "a", batch), store_with(tmp_path / "b", changed)))
    assert (step["responses"]["differ"], step["columns"]) == (0, ["rollout_log_probs"])


def test_identical_nans_are_equal(tmp_path: Path, capsys: Any) -> None:
    batch, changed = rollout_output(4), rollout_output(4)
    for one in (batch, changed):
        one.batch["rollout_log_probs"][1, 0] = float("nan")
    changed.batch["rm_scores"][0, 0] += 1
    step = step_of(diff(capsys, store_with(tmp_path / "a", batch), store_with(tmp_path / "b", changed)))
    assert step["columns"] == ["rm_scores", "skip__score"]


def test_reordered_prompts_are_distinguished_from_different_prompts(tmp_path: Path, capsys: Any) -> None:
    order = [2, 3, 0, 1]
    a = store_with(tmp_path / "a", rollout_output(4), rollout_input(4))
    b = store_with(tmp_path / "b", rollout_output(4)[order], rollout_input(4)[order])
    step = step_of(diff(capsys, a, b))
    assert step["prompts"]["reordered"]
    assert (step["prompts"]["both"], step["prompts"]["only_a"]) == (4, 0)
    assert step["responses"]["same"] == 4
    assert step["columns"] is None
    assert main(["diff", str(a), str(b)]) == 1
    assert "reordered" in capsys.readouterr().out


def test_prompts_on_only_one_side_are_counted(tmp_path: Path, capsys: Any) -> None:
    batch, changed = rollout_output(8), rollout_output(8)
    changed.batch["prompts"][0, 5] = 49_999
    changed.batch["input_ids"][0, 5] = 49_999
    step = step_of(diff(capsys, store_with(tmp_path / "a", batch), store_with(tmp_path / "b", changed)))
    assert (step["prompts"]["both"], step["prompts"]["only_a"], step["prompts"]["only_b"]) == (7, 1, 1)


def test_different_numbers_of_samples_are_paired_as_far_as_possible(tmp_path: Path, capsys: Any) -> None:
    a = store_with(tmp_path / "a", rollout_output(4), rollout_input(4))
    b = store_with(tmp_path / "b", rollout_output(4)[:3], rollout_input(4)[:3])
    step = step_of(diff(capsys, a, b))
    assert (step["rows_a"], step["rows_b"], step["prompts"]["both"]) == (4, 3, 3)
    assert step["responses"]["same"] == 3


def test_a_different_ground_truth_for_the_same_prompt_is_reported(tmp_path: Path, capsys: Any) -> None:
    inputs = rollout_input(4)
    inputs.non_tensor_batch["reward_model"][3] = {"style": "rule", "ground_truth": "wrong"}
    a, b = store_with(tmp_path / "a", rollout_output(4)), store_with(tmp_path / "b", rollout_output(4), inputs)
    step = step_of(diff(capsys, a, b))
    assert step["prompts"]["other_inputs"] == 1
    assert main(["diff", str(a), str(b)]) == 1
    assert "1 row with the same prompt but different other inputs" in capsys.readouterr().out


def test_two_steps_of_one_variant_can_be_compared(recorded: Training, capsys: Any) -> None:
    a, _ = variants(recorded)
    step = step_of(diff(capsys, a / "step_000001", a / "step_000002"))
    assert (step["step"], step["b"]) == (1, {"step": 2, "gen_batch": 0})


def test_runs_are_compared_variant_by_variant(recorded: Training, tmp_path: Path, capsys: Any) -> None:
    other = Training(tmp_path)
    other.record(K1, K2)
    found = diff(capsys, recorded.dumps, other.dumps)
    assert len(found["pairs"]) == 1
    assert found["pairs"][0]["same"]
    assert found["only_in_a"] == [str(variants(recorded)[1])]


@pytest.mark.parametrize("turned", [False, True])
def test_dump_dirs_pair_by_run_and_variant_if_only_one_has_several_runs(
    recorded: Training, tmp_path: Path, capsys: Any, turned: bool
) -> None:
    other = Training(tmp_path)
    other.record(K1, K2)
    other.record(K1, trainer__experiment_name="another")
    sides = [recorded.dumps, other.dumps]
    found = diff(capsys, *(reversed(sides) if turned else sides))
    [pair] = found["pairs"]
    assert pair["same"]
    assert pair["a"].rsplit("/", 2)[1:] == pair["b"].rsplit("/", 2)[1:]
    assert len(found["only_in_a"]) == len(found["only_in_b"]) == 1


def test_a_different_layout_is_shown_but_does_not_count(tmp_path: Path, capsys: Any) -> None:
    one, two = Training(tmp_path / "one"), Training(tmp_path / "two")
    one.record(K1)
    two.record(K1, trainer__n_gpus_per_node=4)
    found = diff(capsys, one.dumps, two.dumps, code=0)
    assert "n_gpus_per_node: 8 → 4" in found["pairs"][0]["settings"]["layout"]


def test_jagged_batches_are_compared(tmp_path: Path, capsys: Any) -> None:
    from tensordict import TensorDict

    def batch(last: int) -> TensorDict:
        rows = {"prompts": [[1, 2], [3]], "responses": [[4, 5], [6, last]]}
        nested = {
            name: torch.nested.nested_tensor([torch.tensor(row) for row in value], layout=torch.jagged)
            for name, value in rows.items()
        }
        return TensorDict(nested, batch_size=[2])

    for name, last in (("a", 7), ("b", 8)):
        with RolloutStore(tmp_path / name) as store:
            store.put(K1, batch(last))
    step = step_of(diff(capsys, tmp_path / "a", tmp_path / "b"))
    assert (step["responses"]["differ"], step["responses"]["first"]["token"]) == (1, 1)


def test_without_a_manifest_the_settings_are_unknown(tmp_path: Path, capsys: Any) -> None:
    a, b = store_with(tmp_path / "a", rollout_output(2)), store_with(tmp_path / "b", rollout_output(2))
    assert main(["diff", str(a), str(b)]) == 0
    assert f"settings: unknown, because {a} has no readable manifest" in capsys.readouterr().out


def test_bad_input_is_a_one_line_error_with_exit_code_2(recorded: Training, tmp_path: Path) -> None:
    a, b = variants(recorded)
    assert_one_line_error(run("diff", a, "/does/not/exist"), "/does/not/exist does not exist.")
    assert_one_line_error(run("diff", a / "step_000002", b / "step_000009"), "does not contain steps 9")
    assert_one_line_error(run("diff", recorded.dumps, store_with(tmp_path / "x", rollout_output(2))), "Choose one")


def test_a_damaged_entry_is_a_one_line_error_that_names_it(tmp_path: Path) -> None:
    a, b = store_with(tmp_path / "a", rollout_output(2)), store_with(tmp_path / "b", rollout_output(4))
    data = part_file(b)
    data.write_bytes(data.read_bytes()[:-10])
    assert_one_line_error(run("diff", a, b), str(data), "damaged")


def test_an_unreadable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    a, closed = store_with(tmp_path / "a", rollout_output(2)), tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    tmp_path.chmod(0o755)
    assert_one_line_error(run_as_nobody("diff", closed, a), "Permission denied", str(closed))
