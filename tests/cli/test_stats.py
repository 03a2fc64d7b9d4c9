"""``rollout-skip stats``: the statistics of recorded steps, compared with those of the batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.batches import objects, rollout_input, rollout_output
from tests.cli_program import assert_fits, assert_one_line_error, run, run_as_nobody, run_without_torch
from tests.entry_files import part_file, record_file
from tests.trainings import Training
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main

K1, K2 = RolloutKey(1), RolloutKey(2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = Training(tmp_path_factory.mktemp("recorded"))
    training.record(K1, RolloutKey(1, 1), K2, data__max_response_length=10)
    return training.variants()[0]


def stats(path: Path, capsys: Any, *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["stats", str(path), *options, "--json"]) == code
    [variant] = json.loads(capsys.readouterr().out)["variants"]
    return variant


def record(folder: Path, batch: Any, rows: int = 8) -> Path:
    with RolloutStore(folder) as store:
        store.put(K1, batch, inputs=rollout_input(rows), info={"generate_s": 12.5})
    return folder


def test_statistics_equal_those_of_the_batch(recorded: Path, capsys: Any) -> None:
    found = stats(recorded, capsys)
    assert [(step["step"], step["gen_batch"]) for step in found["steps"]] == [(1, 0), (1, 1), (2, 0)]
    store = RolloutStore(recorded)
    for step in found["steps"]:
        batch = store.get(RolloutKey(step["step"], step["gen_batch"]))
        scores = batch.batch["rm_scores"].sum(-1).double()
        lengths = batch.batch["response_mask"].sum(-1).double()
        assert step["rows"] == len(batch) == 8
        assert step["score"]["mean"] == pytest.approx(scores.mean().item())
        assert step["score"]["std"] == pytest.approx(scores.std(unbiased=False).item())
        assert step["pass_rate"] == pytest.approx(batch.non_tensor_batch["acc"].mean())
        assert step["length"]["mean"] == pytest.approx(lengths.mean().item())
        assert step["length"]["p95"] == pytest.approx(np.percentile(lengths.numpy(), 95))
        assert step["length"]["at_limit"] == pytest.approx((lengths == 10).double().mean().item())
        assert step["prompt_tokens"] + step["response_tokens"] == int(batch.batch["attention_mask"].sum())
        pairs = scores.reshape(4, 2)
        assert step["groups"]["count"] == step["groups"]["compared"] == 4
        assert step["groups"]["zero_variance"] == int((pairs[:, 0] == pairs[:, 1]).sum())
        assert step["bytes"] == store.record(RolloutKey(step["step"], step["gen_batch"])).bytes


def test_the_total_counts_every_trajectory_once(tmp_path: Path, capsys: Any) -> None:
    with RolloutStore(tmp_path) as store:
        store.put(K1, rollout_output(2, seed=1), inputs=rollout_input(2), info={"generate_s": 1})
        store.put(K2, rollout_output(16, seed=2), inputs=rollout_input(16), info={"generate_s": 2.5})
    total = stats(tmp_path, capsys)["total"]
    scores = torch.cat([RolloutStore(tmp_path).get(key).batch["rm_scores"].sum(-1) for key in (K1, K2)])
    assert total["rows"] == 18
    assert total["score_mean"] == pytest.approx(scores.mean().item())
    assert total["generate_s"] == 3.5


def test_the_table_fits_the_terminal_and_its_columns_are_explained(recorded: Path) -> None:
    done = run("stats", recorded)
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()[1:6]
    assert table[0].split()[:4] == ["step", "rows", "tokens", "score"]
    assert [row.split()[0] for row in table[1:]] == ["1/0", "1/1", "2/0", "all"]
    assert_fits("\n".join(table))
    assert "pass: acc, as returned by the reward function" in done.stdout
    assert "max: responses at the configured limit of 10 tokens" in done.stdout


def test_torch_is_not_imported(recorded: Path) -> None:
    done = run_without_torch("stats", recorded)
    assert done.returncode == 0, done.stderr


def test_a_step_can_be_selected_by_path_or_number(recorded: Path, capsys: Any) -> None:
    ways: list[list[str]] = [
        [str(recorded / "step_000001")],
        [str(recorded / "step_000001") + "/"],
        [str(recorded), "--steps", "1"],
    ]
    for way in ways:
        assert main(["stats", *way, "--json"]) == 0
        [variant] = json.loads(capsys.readouterr().out)["variants"]
        assert [(step["step"], step["gen_batch"]) for step in variant["steps"]] == [(1, 0), (1, 1)]
    for file in (part_file(recorded, 1, 1), record_file(recorded, 1, 1)):
        found = stats(file, capsys)
        assert [(step["step"], step["gen_batch"]) for step in found["steps"]] == [(1, 1)]


def test_without_acc_a_positive_score_is_a_pass(tmp_path: Path, capsys: Any) -> None:
    batch = rollout_output(4)
    del batch.non_tensor_batch["acc"]
    batch.batch["rm_scores"][:] = 0
    batch.batch["rm_scores"][:, 0] = torch.tensor([1.0, -1.0, 0.0, 0.1])
    record(tmp_path, batch, 4)
    [step] = stats(tmp_path, capsys)["steps"]
    assert (step["pass_rate"], step["pass_source"]) == (0.5, "score > 0")
    assert main(["stats", str(tmp_path)]) == 0
    assert "the score is above 0, because no acc was recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("acc", "rate", "source"),
    [
        (np.array([True, False, False, True]), 0.5, "acc"),
        (objects([True, False, False, False]), 0.25, "acc"),
        (objects([1, 0, 1, 1]), 0.75, "acc"),
        (np.array([0.5, 0.0, 0.25, -1.0]), 0.5, "acc > 0"),
    ],
    ids=["truth values", "objects", "whole numbers", "parts"],
)
def test_acc_takes_precedence_over_the_score(tmp_path: Path, capsys: Any, acc: Any, rate: float, source: str) -> None:
    """All scores are positive here, as with a format reward."""
    batch = rollout_output(4)
    batch.batch["rm_scores"][:, 0] = 5.0
    batch.non_tensor_batch["acc"] = acc
    [step] = stats(record(tmp_path, batch, 4), capsys)["steps"]
    assert (step["pass_rate"], step["pass_source"]) == (rate, source)


@pytest.mark.parametrize("acc", [[1.0, 0.0, True, 1], [np.float64(1), np.bool_(False), np.float32(1), np.int64(1)]])
def test_acc_is_found_in_v1_entries(tmp_path: Path, capsys: Any, acc: list[Any]) -> None:
    from tensordict import NonTensorStack, TensorDict

    rows = {
        "prompts": [[1, 2]] * 4,
        "responses": [[4, 5], [6], [7], [8]],
        "rm_scores": [[0.0, 5.0], [5.0], [5.0], [5.0]],
    }
    nested = {
        name: torch.nested.nested_tensor([torch.tensor(row) for row in value], layout=torch.jagged)
        for name, value in rows.items()
    }
    batch = TensorDict(nested, batch_size=[4])
    batch.set("extra_fields", NonTensorStack(*({"reward_extra_info": {"acc": value}} for value in acc)))
    with RolloutStore(tmp_path) as store:
        store.put(K1, batch)
    [step] = stats(tmp_path, capsys)["steps"]
    assert (step["pass_rate"], step["pass_source"]) == (0.75, "acc")
    assert (step["length"]["limit"], step["length"]["limit_source"], step["length"]["at_limit"]) == (None, "none", None)


def test_missing_columns_are_not_guessed(tmp_path: Path, capsys: Any) -> None:
    batch = rollout_output(4)
    del batch.non_tensor_batch["acc"]
    batch.pop(["rm_scores"])
    with RolloutStore(tmp_path) as store:
        store.put(K1, batch)
    [step] = stats(tmp_path, capsys)["steps"]
    assert (step["score"], step["pass_rate"], step["pass_source"], step["generate_s"]) == (None, None, "none", None)
    assert main(["stats", str(tmp_path)]) == 0
    assert "–" in capsys.readouterr().out


def test_scores_that_are_not_finite_are_excluded_and_counted(tmp_path: Path, capsys: Any) -> None:
    batch = rollout_output(4)
    batch.batch["rm_scores"][:] = 0
    batch.batch["rm_scores"][:, 0] = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    [step] = stats(record(tmp_path, batch, 4), capsys)["steps"]
    assert step["score"] == {"mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0, "nonfinite": 2}
    assert main(["stats", str(tmp_path)]) == 0
    assert "2 trajectories with a score that is not finite" in capsys.readouterr().out


def test_the_total_counts_every_finite_score_once(tmp_path: Path, capsys: Any) -> None:
    """Three of the four scores of the first step are not finite, so it contributes one of five scores."""
    with RolloutStore(tmp_path) as store:
        for key, scores in ((K1, [1.0, float("nan"), float("inf"), float("nan")]), (K2, [0.0, 0.0, 0.0, 0.0])):
            batch = rollout_output(4)
            batch.batch["rm_scores"][:] = 0
            batch.batch["rm_scores"][:, 0] = torch.tensor(scores)
            store.put(key, batch)
    assert stats(tmp_path, capsys)["total"]["score_mean"] == pytest.approx(0.2)


def test_a_single_response_does_not_count_as_a_group_without_variance(tmp_path: Path, capsys: Any) -> None:
    """The third prompt has only one response."""
    batch = rollout_output(5)
    batch.batch["rm_scores"][:] = 0
    batch.batch["rm_scores"][:, 0] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    [step] = stats(record(tmp_path, batch, 5), capsys)["steps"]
    groups = step["groups"]
    assert (groups["count"], groups["compared"], groups["zero_variance"], groups["largest"]) == (3, 2, 1, 2)


def test_an_empty_batch_has_no_statistics(tmp_path: Path, capsys: Any) -> None:
    with RolloutStore(tmp_path) as store:
        store.put(K1, rollout_output(0), inputs=rollout_input(0))
    [step] = stats(tmp_path, capsys)["steps"]
    assert (step["rows"], step["score"], step["length"], step["pass_rate"]) == (0, None, None, None)
    assert main(["stats", str(tmp_path)]) == 0


def test_a_damaged_entry_is_reported_and_the_others_are_shown(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1, K2)
    [variant] = training.variants()
    data = part_file(variant, 2)
    data.write_bytes(data.read_bytes()[:-10])
    found = stats(variant, capsys, code=1)
    assert [step["step"] for step in found["steps"]] == [1]
    assert [bad["step"] for bad in found["unreadable"]] == [2]


def damage_column(file: Path, name: str) -> None:
    """Flip one bit in the data of a column."""
    metadata = pq.read_metadata(file)
    columns = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    [column] = [column for column in columns if column.path_in_schema.split(".")[0] == name]
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    file.write_bytes(content)


def test_changed_bytes_of_a_column_are_detected(tmp_path: Path, capsys: Any) -> None:
    """Size and record are unchanged, so only the page checksum can detect it."""
    training = Training(tmp_path)
    training.record(K1)
    [variant] = training.variants()
    data = part_file(variant)
    damage_column(data, "skip__score")
    found = stats(variant, capsys, code=1)
    assert data.name in found["unreadable"][0]["error"]


def test_an_object_store_works_like_a_folder(tmp_path: Path, capsys: Any) -> None:
    url = "memory://stats/run"
    with RolloutStore(url) as store:
        store.put(K1, rollout_output(8), inputs=rollout_input(8))
    assert main(["stats", url, "--json"]) == 0
    [variant] = json.loads(capsys.readouterr().out)["variants"]
    assert variant["steps"][0]["rows"] == 8


def test_only_the_required_pages_are_read(tmp_path: Path, capsys: Any) -> None:
    """Damaged responses go unnoticed, because stats does not read them. verify does."""
    training = Training(tmp_path)
    training.record(K1)
    [variant] = training.variants()
    damage_column(part_file(variant), "responses")
    assert stats(variant, capsys)["steps"][0]["rows"] == 8
    assert main(["verify", str(variant)]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/does/not/exist"], "/does/not/exist does not exist."),
        ([__file__], "Not a directory"),
        (["{variant}", "--steps", "x"], "--steps has 'x'"),
        (["{variant}/step_000001", "--steps", "1"], "so --steps cannot be used"),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_code_2(recorded: Path, arguments: list[str], words: str) -> None:
    assert_one_line_error(run("stats", *[text.format(variant=recorded) for text in arguments]), words)


def test_an_unreadable_folder_is_a_one_line_error(recorded: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    assert_one_line_error(run_as_nobody("stats", closed), "Permission denied", str(closed))


def test_a_later_format_asks_for_an_upgrade(tmp_path: Path, capsys: Any) -> None:
    training = Training(tmp_path)
    training.record(K1)
    [variant] = training.variants()
    file = record_file(variant)
    file.write_text(file.read_text().replace('"format_version": 2', '"format_version": 3'))
    found = stats(variant, capsys, code=1)
    assert "Upgrade verl-rollout-skip" in found["unreadable"][0]["error"]
