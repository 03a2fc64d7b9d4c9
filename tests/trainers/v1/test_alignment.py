"""Aligning the prompts of the current step with those of a recorded one, refills included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from tests.trainers.v1.test_in_flight import batch
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.replay.prompts import InputMismatch
from verl_rollout_skip.store.loaded import LoadedEntry
from verl_rollout_skip.trainers.v1.alignment import Alignment
from verl_rollout_skip.trainers.v1.dataloader import PushBack
from verl_rollout_skip.trainers.v1.in_flight import InFlight
from verl_rollout_skip.trainers.v1.transfer import rows

KEY = RolloutKey(1)


class Training:
    """The prompts in flight of a training, and the dataloader that its refills come from."""

    def __init__(self, prompts: list[int], refills: list[int], compares: bool = True) -> None:
        self.in_flight, self.push_back = InFlight(), PushBack()
        self.in_flight.add(batch(*prompts, run="current"))
        self.refills = list(refills)
        self.alignment = Alignment(self.in_flight, self.push_back, self.fetch, self.state, compares)

    def fetch(self) -> TensorDict:
        return batch(self.refills.pop(0), run="current")

    def state(self) -> dict[str, int]:
        return {"left": len(self.refills)}


def recorded(folder: Path, drawn: list[int], trained: list[int], earlier: Sequence[int] = ()) -> LoadedEntry:
    """An entry of a step that drew some prompts and trained on some of those in flight, one row each."""
    prompts = InFlight()
    if earlier:
        prompts.restore(batch(*earlier, run="recorded"))
    prompts.add(batch(*drawn, run="recorded"))
    positions = [[*earlier, *drawn].index(number) for number in trained]
    fields = TensorDict({"responses": torch.tensor([[number] for number in trained])}, batch_size=[len(trained)])
    keys = [f"recorded-{number}_{session}_0" for session, number in enumerate(trained)]
    meta = KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train")
    sample = rows.Sample([prompt.digest for prompt in prompts.drawn], gone=[], metrics={})
    rows.pack(fields, meta, positions, sample)
    with RolloutStore(folder) as store:
        store.put(KEY, fields, inputs=prompts.rows(positions))
    return RolloutStore(folder).load(KEY)


def aligned(training: Training, entry: LoadedEntry) -> TensorDict:
    found = training.alignment.align(entry)
    rows = training.alignment.rows(entry)
    for name in ("index", "uid"):
        assert rows[name] == [found.prompts[name][number] for number in found.rows]
    return rows


def test_prompts_come_in_the_row_order_of_the_recording_with_the_current_uids(tmp_path: Path) -> None:
    training = Training([1, 2, 3], refills=[])
    rows = aligned(training, recorded(tmp_path, drawn=[1, 2, 3], trained=[3, 1, 3]))
    assert rows["index"] == [3, 1, 3]
    assert rows["uid"] == ["current-3", "current-1", "current-3"]


def test_refills_are_drawn_as_in_the_recording(tmp_path: Path) -> None:
    training = Training([1, 2], refills=[3, 4, 5])
    rows = aligned(training, recorded(tmp_path, drawn=[1, 2, 3, 4], trained=[4, 2]))
    assert rows["index"] == [4, 2]
    assert training.refills == [5]
    assert [chunk["index"] for chunk in training.push_back.keep()] == [[3], [4]]


def test_undoing_puts_the_refills_back_and_they_are_drawn_again_first(tmp_path: Path) -> None:
    training = Training([1, 2], refills=[3, 4, 5])
    entry = recorded(tmp_path, drawn=[1, 2, 3], trained=[3])
    training.alignment.align(entry)
    training.alignment.undo()
    assert len(training.in_flight) == 2
    chunk = training.push_back.next()
    assert chunk is not None
    assert chunk["index"] == [3]


def test_the_refills_of_a_rejected_entry_are_put_back_before_the_next_one_is_aligned(tmp_path: Path) -> None:
    training = Training([1, 2], refills=[3, 4, 5])
    training.alignment.align(recorded(tmp_path / "one", drawn=[1, 2, 3, 4], trained=[4]))
    rows = aligned(training, recorded(tmp_path / "two", drawn=[1, 2, 3], trained=[3]))
    assert rows["index"] == [3]
    assert len(training.in_flight) == 3


def test_a_changed_prompt_is_detected_before_refills_are_drawn(tmp_path: Path) -> None:
    training = Training([1, 9], refills=[3])
    with pytest.raises(
        InputMismatch, match=r"prompt 1 of the 3 that its step drew from the data has changed:\n.*2\+1="
    ):
        training.alignment.align(recorded(tmp_path, drawn=[1, 2, 3], trained=[2, 3]))
    assert training.refills == [3]


def test_a_changed_prompt_that_was_not_trained_on_is_detected(tmp_path: Path) -> None:
    training = Training([1, 2], refills=[9])
    with pytest.raises(InputMismatch, match=r"prompt 2 of the 3 .*, which it did not train on, has changed"):
        training.alignment.align(recorded(tmp_path, drawn=[1, 2, 3], trained=[1, 2]))


def test_a_changed_prompt_that_was_trained_on_is_left_to_the_comparison_of_rows(tmp_path: Path) -> None:
    training = Training([1, 9], refills=[])
    rows = aligned(training, recorded(tmp_path, drawn=[1, 2], trained=[2]))
    assert rows["index"] == [9]


def test_other_prompts_are_accepted_if_the_recorded_batch_replaces_them(tmp_path: Path) -> None:
    training = Training([7, 8], refills=[9], compares=False)
    rows = aligned(training, recorded(tmp_path, drawn=[1, 2, 3], trained=[3]))
    assert rows["index"] == [9]


def test_a_step_that_drew_fewer_prompts_is_a_mismatch(tmp_path: Path) -> None:
    training = Training([1, 2, 3], refills=[])
    with pytest.raises(InputMismatch, match="its step drew 2 prompts from the data, and the current one draws 3"):
        training.alignment.align(recorded(tmp_path, drawn=[1, 2], trained=[1, 2]))


def test_a_sample_of_prompts_from_earlier_steps_that_this_training_did_not_draw_is_a_mismatch(tmp_path: Path) -> None:
    entry = recorded(tmp_path, drawn=[1], trained=[7, 1], earlier=[7, 8])
    with pytest.raises(InputMismatch, match="prompts of earlier steps that the current training did not draw"):
        Training([1], refills=[]).alignment.align(entry)
