"""``training_columns``: what an update trained on is dumped beside the rollouts, bit for bit."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest
import torch

from tests.batches import assert_same_tensor, rollout_output
from tests.environment import leftovers
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.config.modes import Mode, OnDumpError
from verl_rollout_skip.config.modes import TrainingColumns as Level
from verl_rollout_skip.config.skip_config import SkipConfig, Steps
from verl_rollout_skip.errors import DiskLimitError, DumpError
from verl_rollout_skip.replay.columns import TrainingColumns, rows_of
from verl_rollout_skip.replay.disk_usage import variant_usage
from verl_rollout_skip.replay.ledger.updates import UpdateSlice
from verl_rollout_skip.runs.columns import columns_of, trainings_with_columns
from verl_rollout_skip.store.storage.local import LocalStorage
from verl_rollout_skip.tools.columns import read_update

TRAINING = "20261119T214500.123Z-1a2b3c4d"
STEP = RolloutKey(1)


def tensors_of(seed: int = 0, rows: int = 8) -> dict[str, torch.Tensor]:
    """What a V0 update receives: the rollout and what the trainer computed."""
    batch = dict(rollout_output(rows, seed=seed).batch.items())
    torch.manual_seed(seed)
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch[name] = torch.randn(batch["responses"].shape) * batch["response_mask"]
    return batch


def open_columns(variant: Path, level: Level = Level.LOG_PROBS, **settings: Any) -> TrainingColumns:
    limit = settings.pop("max_disk", None)
    found = SkipConfig(mode=settings.pop("mode", Mode.CACHE), training_columns=level, max_disk=limit, **settings)
    return TrainingColumns(str(variant), TRAINING, found, variant_usage(str(variant), limit))


def dump(columns: TrainingColumns, tensors: dict[str, torch.Tensor], order: list[int] | None = None) -> None:
    """A step that trains on these rows of its rollout, all of them by default."""
    columns.add_rollout(STEP, lambda: rows_of(tensors))
    chosen = tensors if order is None else {name: tensor[order] for name, tensor in tensors.items()}
    add_update(columns, "actor", (chosen, None))


def add_update(
    columns: TrainingColumns, role: str, *slices: tuple[dict[str, torch.Tensor], list[str] | None], step: int = 1
) -> None:
    """An update as a trainer passes it on: slices of its rows, with their keys in V1."""
    update = columns.begin_update(step, role)
    if update is not None:
        for tensors, keys in slices:
            update.add(UpdateSlice(0, tensors, tensors if keys is None else keys))
        update.finish()


def dump_and_close(columns: TrainingColumns) -> None:
    dump(columns, tensors_of())
    columns.close()


def dumped(variant: Path, key: RolloutKey = STEP) -> dict[str, torch.Tensor]:
    return dict(RolloutStore(variant / "columns" / TRAINING).get(key).items())


def test_log_probs_of_an_update_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = tensors_of()
    columns = open_columns(tmp_path)
    dump(columns, tensors)
    columns.close()
    found = dumped(tmp_path)
    assert sorted(found) == [
        "old_log_probs",
        "ref_log_prob",
        "response_mask",
        "rollout_gen_batch",
        "rollout_log_probs",
        "rollout_row",
    ]
    for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "response_mask"):
        assert_same_tensor(found[name], tensors[name])
    assert columns.failures == 0
    assert columns.dumped == 1
    assert columns.written_bytes > 0


def test_all_dumps_every_tensor_of_actor_and_critic_even_nan_payloads_and_bfloat16(tmp_path: Path) -> None:
    tensors = tensors_of()
    payloads = torch.tensor([0x7FC00001, 0x7FA00002, -0x3FFFFF, -0x80000000, 0x7F800000], dtype=torch.int64)
    strange = payloads.repeat(16).to(torch.int32).view(torch.float32).reshape(8, 10)
    tensors |= {"values": strange, "returns": strange.to(torch.bfloat16), "advantages": torch.full((8, 10), -0.0)}
    columns = open_columns(tmp_path, Level.ALL)
    columns.add_rollout(STEP, lambda: rows_of(tensors))
    for role in ("critic", "actor"):
        add_update(columns, role, (tensors, None))
    columns.close()
    store = RolloutStore(tmp_path / "columns" / TRAINING)
    assert [store.record(key).info["role"] for key in store] == ["critic", "actor"]
    for key in store:
        found = store.get(key)
        assert set(found.keys()) == {*tensors, "rollout_gen_batch", "rollout_row"}
        for name, tensor in tensors.items():
            assert_same_tensor(found[name], tensor, name)


def test_log_probs_leaves_out_the_critic(tmp_path: Path) -> None:
    columns = open_columns(tmp_path)
    add_update(columns, "critic", (tensors_of(), None))
    columns.close()
    assert not (tmp_path / "columns").exists()


def test_rows_of_a_balanced_batch_name_their_trajectories(tmp_path: Path) -> None:
    columns = open_columns(tmp_path)
    dump(columns, tensors_of(), order=[5, 2, 7, 0, 1, 3, 6, 4])
    columns.close()
    assert dumped(tmp_path)["rollout_row"].tolist() == [5, 2, 7, 0, 1, 3, 6, 4]


def test_rows_of_a_filtered_step_come_from_several_generation_batches(tmp_path: Path) -> None:
    first, second = tensors_of(seed=1), tensors_of(seed=2)
    kept = {name: torch.cat([first[name][[6, 7]], second[name][[0, 1]]]) for name in first}
    padded = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in kept.items()}
    columns = open_columns(tmp_path)
    columns.add_rollout(RolloutKey(1, 0), lambda: rows_of(first))
    columns.add_rollout(RolloutKey(1, 1), lambda: rows_of(second))
    add_update(columns, "actor", (padded, None))
    columns.close()
    found = dumped(tmp_path)
    assert found["rollout_gen_batch"].tolist() == [0, 0, 1, 1, -1]
    assert found["rollout_row"].tolist() == [6, 7, 0, 1, -1]


def test_equal_trajectories_are_each_used_once(tmp_path: Path) -> None:
    tensors = {name: tensor[[0, 1, 0, 0]] for name, tensor in tensors_of().items()}
    columns = open_columns(tmp_path)
    dump(columns, tensors, order=[3, 2, 1, 0])
    columns.close()
    assert dumped(tmp_path)["rollout_row"].tolist() == [0, 2, 1, 3]


def test_keys_identify_the_rows_of_a_v1_update_with_jagged_tensors(tmp_path: Path) -> None:
    def jagged() -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.randn(n) for n in (3, 1, 4)], layout=torch.jagged)

    tensors = {"old_log_probs": jagged(), "rollout_log_probs": jagged(), "response_mask": jagged() > 0}
    columns = open_columns(tmp_path)
    columns.add_rollout(STEP, lambda: ["a_0_0", "a_1_0", "b_0_0"])
    add_update(columns, "actor", (tensors, ["b_0_0", "padding", "a_1_0"]))
    columns.close()
    found = dumped(tmp_path)
    assert found["rollout_row"].tolist() == [2, -1, 1]
    for name, tensor in tensors.items():
        assert_same_tensor(found[name], tensor, name)


def test_files_are_ordinary_parquet_for_duckdb_and_pandas(tmp_path: Path) -> None:
    tensors = tensors_of()
    columns = open_columns(tmp_path)
    dump(columns, tensors)
    columns.close()
    pattern = str(tmp_path / "columns" / "*" / "step_*" / "*.parquet")
    query = f"select rollout_row, old_log_probs[1] from '{pattern}' order by rollout_row"
    assert duckdb.sql(query).fetchall() == list(enumerate(tensors["old_log_probs"][:, 0].tolist()))
    [file] = tmp_path.glob("columns/*/step_000001/*.parquet")
    assert len(pandas.read_parquet(file)) == 8


def test_several_updates_of_a_step_are_entries_of_their_own(tmp_path: Path) -> None:
    columns = open_columns(tmp_path)
    for gen_batch in range(2):
        tensors = tensors_of(seed=gen_batch)
        columns.add_rollout(RolloutKey(1, gen_batch), lambda tensors=tensors: rows_of(tensors))
        add_update(columns, "actor", (tensors, None))
    columns.close()
    assert [dumped(tmp_path, RolloutKey(1, n))["rollout_gen_batch"].tolist() for n in (0, 1)] == [[0] * 8, [1] * 8]


def test_slices_of_an_update_are_one_entry(tmp_path: Path) -> None:
    tensors = tensors_of()
    jagged = torch.nested.as_nested_tensor([torch.randn(n + 1) for n in range(8)], layout=torch.jagged)
    parts = [
        ({"response_mask": tensors["response_mask"][rows], "old_log_probs": part}, [str(row) for row in range(8)][rows])
        for rows, part in (
            (slice(0, 3), torch.nested.as_nested_tensor(list(jagged.unbind()[:3]), layout=torch.jagged)),
            (slice(3, 8), torch.nested.as_nested_tensor(list(jagged.unbind()[3:]), layout=torch.jagged)),
        )
    ]
    columns = open_columns(tmp_path)
    columns.add_rollout(STEP, lambda: [str(row) for row in range(8)])
    add_update(columns, "actor", *parts)
    columns.close()
    found = dumped(tmp_path)
    assert found["rollout_row"].tolist() == list(range(8))
    assert_same_tensor(found["response_mask"], tensors["response_mask"])
    assert [row.tolist() for row in found["old_log_probs"].unbind()] == [row.tolist() for row in jagged.unbind()]


def test_a_crash_before_the_commit_leaves_no_columns(tmp_path: Path, fork: Any) -> None:
    def crash(report: Any) -> None:
        publish = LocalStorage.publish

        def publish_parts(self: LocalStorage, staged: Any, name: str, replace: bool = False) -> None:
            if name.endswith(".json"):
                os._exit(7)
            publish(self, staged, name, replace)

        LocalStorage.publish = publish_parts  # type: ignore[method-assign]
        dump(open_columns(tmp_path, background=False), tensors_of())

    assert fork(crash).exit_code == 7
    assert list(columns_of(str(tmp_path), TRAINING)) == []
    assert leftovers(tmp_path / "columns" / TRAINING)
    columns = open_columns(tmp_path)
    dump(columns, tensors_of())
    columns.close()
    assert dumped(tmp_path)["rollout_row"].tolist() == list(range(8))


def test_max_disk_counts_rollouts_and_columns_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RolloutStore(tmp_path, usage=variant_usage(str(tmp_path), 12_000)) as store:
        store.put(STEP, rollout_output())
    used = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert 5_000 < used < 12_000
    columns = open_columns(tmp_path, max_disk=used + 1000)
    with caplog.at_level(logging.ERROR):
        dump(columns, tensors_of())
        columns.close()
    assert columns.failures == 1
    assert "would exceed max_disk" in caplog.text
    assert trainings_with_columns(str(tmp_path)) == []
    columns = open_columns(tmp_path, max_disk=used + 20_000)
    dump(columns, tensors_of())
    columns.close()
    assert columns.failures == 0
    store = RolloutStore(tmp_path, background=False, usage=variant_usage(str(tmp_path), used + 5_000))
    with pytest.raises(DiskLimitError, match="max_disk"):
        store.put(RolloutKey(2), rollout_output(seed=2))


@pytest.mark.parametrize("background", [True, False])
def test_failed_dump_of_columns_stops_the_training_only_if_asked(tmp_path: Path, background: bool) -> None:
    (tmp_path / "columns").write_text("not a folder")
    warning = open_columns(tmp_path, background=background)
    dump(warning, tensors_of())
    warning.close()
    assert warning.failures == 1
    failing = open_columns(tmp_path, background=background, on_dump_error=OnDumpError.FAIL)
    with pytest.raises((DumpError, OSError)):
        dump_and_close(failing)
    assert failing.failures == 1


def test_a_tensor_with_a_reserved_name_is_a_failed_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = open_columns(tmp_path, Level.ALL)
    dump(columns, {**tensors_of(), "rollout_row": torch.zeros(8)})
    columns.close()
    assert columns.failures == 1
    assert "'rollout_row', but this name is reserved" in caplog.text


def test_tensors_that_the_trainer_changes_after_the_update_are_a_failed_dump_once(tmp_path: Path) -> None:
    """Large tensors are shared until they are written, as for rollouts."""
    rows, width = 64, 8192
    tensors = {"prompts": torch.ones(rows, 1), "responses": torch.arange(rows * width).reshape(rows, width)}
    tensors |= {"old_log_probs": torch.randn(rows, width), "response_mask": torch.ones(rows, width)}
    columns = open_columns(tmp_path, background=True)
    columns._store._writer._executor.submit(lambda: time.sleep(0.3))
    dump(columns, tensors)
    tensors["old_log_probs"].zero_()
    columns._store._writer.wait(STEP)
    columns.report_failures()
    assert columns.failures == 1
    add_update(columns, "actor", (tensors, None))
    tensors["old_log_probs"].fill_(1)
    columns.close()
    assert columns.failures == 1
    assert dumped(tmp_path, RolloutKey(1, 1))["old_log_probs"].count_nonzero() == 0


def test_columns_are_read_row_by_row_in_the_order_of_the_update(tmp_path: Path) -> None:
    tensors = tensors_of()
    columns = open_columns(tmp_path)
    dump(columns, tensors, order=[1, 0, 2, 3, 4, 5, 6, 7])
    columns.close()
    update = read_update(columns_of(str(tmp_path), TRAINING), STEP)
    assert update.places[:2] == [(0, 1), (0, 0)]
    found = update.rows("old_log_probs")
    assert found is not None
    for number, row in enumerate([1, 0, 2, 3, 4, 5, 6, 7]):
        assert found[number].tolist() == tensors["old_log_probs"][row].tolist()


def test_steps_that_are_not_selected_have_no_columns(tmp_path: Path) -> None:
    columns = open_columns(tmp_path, steps=Steps(((2, 2),)))
    for step in (1, 2):
        add_update(columns, "actor", (tensors_of(), None), step=step)
    columns.close()
    assert columns_of(str(tmp_path), TRAINING).keys() == [RolloutKey(2)]


def test_update_that_cannot_be_read_is_a_failed_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = open_columns(tmp_path)
    update = columns.begin_update(1, "actor")
    assert update is not None
    update.add(UpdateSlice(0, tensors_of(), None))
    update.fail(RuntimeError("the queue is gone"))
    columns.close()
    assert (columns.failures, columns.dumped) == (1, 0)
    assert "The columns of step 1 were not dumped: the queue is gone" in caplog.text


def test_rows_that_cannot_be_told_apart_are_one_failed_dump(tmp_path: Path) -> None:
    columns = open_columns(tmp_path)
    only_values = {"old_log_probs": torch.zeros(2, 3)}
    add_update(columns, "actor", (only_values, None), (only_values, None))
    columns.close()
    assert (columns.failures, columns.dumped) == (1, 0)
    assert trainings_with_columns(str(tmp_path)) == []


def test_training_without_the_setting_writes_nothing(tmp_path: Path) -> None:
    columns = open_columns(tmp_path, Level.OFF)
    dump(columns, tensors_of())
    columns.close()
    assert not columns.is_on
    assert list(tmp_path.iterdir()) == []
