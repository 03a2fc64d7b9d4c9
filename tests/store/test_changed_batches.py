"""A batch that is changed in place after ``put``: recorded as it was put, or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto

from tests.batches import assert_same_batch, objects, rollout_input, rollout_output
from tests.trainings import Training, inputs_of, never, without_timings
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import DumpError
from verl_rollout_skip.store import commit

K1, K2 = RolloutKey(1), RolloutKey(2)
LARGE = {"rows": 64, "prompt_width": 16, "response_width": 5000}
"""Each of its response tensors is larger than a megabyte."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    opened = threading.Event()
    write = commit.commit

    def wait(*arguments: Any, **options: Any) -> Any:
        assert opened.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(commit, "commit", wait)
    return opened


def pixels(rows: int = 4, size: int = 50_000) -> Any:
    """A rollout with one image per row, as a tensor and as an array."""
    batch = rollout_output(rows)
    generator = np.random.default_rng(3)
    batch.non_tensor_batch["multi_modal_inputs"] = objects(
        [
            {
                "pixel_values": torch.from_numpy(generator.random(size)),
                "array": generator.random(size),
                "small": torch.arange(3),
                "small_array": np.arange(3),
                "list": [1, {"a": [2]}],
            }
            for _ in range(rows)
        ]
    )
    return batch


@contextmanager
def changed_after_put(store: RolloutStore, key: RolloutKey, batch: Any, gate: threading.Event) -> Iterator[None]:
    """The block runs between ``put`` and the write."""
    gate.clear()
    store.put(key, batch)
    yield
    gate.set()


CHEAP: dict[str, Callable[[DataProto], Any]] = {
    "rewards": lambda batch: batch.batch["rm_scores"].mul_(-3),
    "rewards through numpy": lambda batch: batch.batch["rm_scores"].numpy().fill(7),
    "rewards through data": lambda batch: batch.batch["rm_scores"].data.add_(1),
    "other data for rewards": lambda batch: setattr(batch.batch["rm_scores"], "data", torch.ones(64, 5000)),
    "reward extras": lambda batch: batch.non_tensor_batch["acc"].fill(9),
}


@pytest.mark.parametrize("change", CHEAP.values(), ids=CHEAP)
def test_rewards_are_recorded_as_they_were_put(
    tmp_path: Path, gate: threading.Event, change: Callable[[DataProto], Any]
) -> None:
    batch = rollout_output(**LARGE)
    with RolloutStore(tmp_path) as store, changed_after_put(store, K1, batch, gate):
        change(batch)
    assert_same_batch(rollout_output(**LARGE), RolloutStore(tmp_path).get(K1))


def test_rewards_keep_every_bit_of_every_shape(tmp_path: Path, gate: threading.Event) -> None:
    """Signed zeros, NaNs, dense rewards, sizes that are not a multiple of a block, views, nested tensors."""
    signed = torch.zeros(50, 11_001)
    signed[3, 5], signed[49, 11_000], signed[0, 0] = -0.0, float("nan"), 1e-45

    def make() -> TensorDict:
        values = torch.zeros(300_000)
        values[299_999] = 0.5
        offsets = torch.cat([torch.arange(50) * 10, torch.tensor([300_000])])
        return TensorDict(
            {
                "rm_scores": signed.clone(),
                "dense_rewards": torch.rand(50, 7_777, generator=torch.Generator().manual_seed(1)),
                "bf16_scores": torch.ones(50, 11_001, dtype=torch.bfloat16),
                "transposed_scores": torch.arange(50.0 * 6_000).reshape(6_000, 50).t(),
                "jagged_scores": torch.nested.nested_tensor_from_jagged(values, offsets),
                "no_scores": torch.zeros(50, 0),
            },
            batch_size=[50],
        )

    batch = make()
    with RolloutStore(tmp_path) as store, changed_after_put(store, K1, batch, gate):
        for tensor in batch.values():
            (tensor.values() if tensor.is_nested else tensor).fill_(3)
    assert_same_batch(make(), RolloutStore(tmp_path).get(K1))


def test_small_batches_are_copied_whole(tmp_path: Path, gate: threading.Event) -> None:
    batch = rollout_output(8)
    with RolloutStore(tmp_path) as store, changed_after_put(store, K1, batch, gate):
        for tensor in batch.batch.values():
            tensor.numpy().fill(0)
    assert_same_batch(rollout_output(8), RolloutStore(tmp_path).get(K1))


SHARED: dict[str, tuple[str, Callable[[DataProto], Any]]] = {
    "one token": ("responses", lambda batch: batch.batch["responses"][63, 7].zero_()),
    "a slice of a slice": ("response_mask", lambda batch: batch.batch["response_mask"][8:9, 2:][0].fill_(0)),
    "through numpy": ("responses", lambda batch: batch.batch["responses"].numpy().fill(1)),
    "through data": ("attention_mask", lambda batch: batch.batch["attention_mask"].data.fill_(1)),
}


@pytest.mark.parametrize(("name", "change"), SHARED.values(), ids=SHARED)
def test_a_large_tensor_that_was_changed_fails_the_dump_and_later_ones_are_copied(
    tmp_path: Path,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[DataProto], Any],
) -> None:
    store = RolloutStore(tmp_path)
    batch = rollout_output(**LARGE)
    with changed_after_put(store, K1, batch, gate):
        change(batch)
    with caplog.at_level(logging.WARNING), pytest.raises(DumpError, match=rf"step 1.*not written.*{name}.*in place"):
        store.flush()
    assert store.keys() == []
    assert not list(tmp_path.rglob("*.*")), "no part of it remains"
    batch = rollout_output(**LARGE)
    with changed_after_put(store, K1, batch, gate):
        for tensor in batch.batch.values():
            tensor.numpy().fill(0)
    store.close()
    assert_same_batch(rollout_output(**LARGE), store.get(K1))
    assert caplog.text.count("every tensor is copied from now on") == 1


def test_a_dump_that_replaces_another_leaves_that_one_if_it_was_changed(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    store = RolloutStore(tmp_path)
    store.put(K1, rollout_output(4))
    store.flush()
    gate.clear()
    batch = rollout_output(**LARGE)
    store.put(K1, batch, replace=True)
    batch.batch["responses"].zero_()
    gate.set()
    with pytest.raises(DumpError, match="responses"):
        store.close()
    assert_same_batch(rollout_output(4), store.get(K1))


def test_small_things_in_cells_are_recorded_as_they_were_put(tmp_path: Path, gate: threading.Event) -> None:
    batch = pixels()
    with RolloutStore(tmp_path) as store, changed_after_put(store, K1, batch, gate):
        cell = batch.non_tensor_batch["multi_modal_inputs"][1]
        cell["small"].zero_()
        cell["small_array"][:] = 0
        cell["list"][1]["a"].append(3)
        cell["new"] = 1
    assert_same_batch(pixels(), RolloutStore(tmp_path).get(K1))


@pytest.mark.parametrize("name", ["pixel_values", "array"])
def test_a_large_value_in_a_cell_that_was_changed_fails_the_dump(
    tmp_path: Path, gate: threading.Event, name: str
) -> None:
    store = RolloutStore(tmp_path)
    for key in (K1, K2):
        batch = pixels()
        with changed_after_put(store, key, batch, gate):
            batch.non_tensor_batch["multi_modal_inputs"][2][name][41_000] = 3
    with pytest.raises(DumpError, match=r"step 1.*multi_modal_inputs\[2\]"):
        store.close()
    assert store.keys() == [] or store.keys() == [K2]


def test_inputs_that_were_changed_fail_the_dump(tmp_path: Path, gate: threading.Event) -> None:
    def given() -> DataProto:
        inputs = rollout_input(64)
        inputs.batch = TensorDict({"input_ids": torch.arange(64 * 8_000).reshape(64, -1)}, batch_size=[64])
        return inputs

    store = RolloutStore(tmp_path)
    inputs = given()
    store.put(K1, rollout_output(**LARGE), inputs=inputs)
    inputs.batch["input_ids"][0, 0] = 5
    gate.set()
    with pytest.raises(DumpError, match=r"the input's input_ids"):
        store.flush()
    gate.clear()
    inputs = given()
    store.put(K1, rollout_output(**LARGE), inputs=inputs)
    inputs.batch["input_ids"][0, 0] = 5
    gate.set()
    store.close()
    assert_same_batch(given(), store.inputs(K1))


def test_an_encoding_that_breaks_because_of_a_change_names_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that changes between two reads can break the encoder, which then cannot name the cause."""
    batch = rollout_output(**LARGE)

    def look(*_: Any) -> Any:
        batch.batch["attention_mask"].zero_()
        raise ValueError("shapes do not fit")

    monkeypatch.setattr("verl_rollout_skip.store.codec.numbers.find_spans", look)
    store = RolloutStore(tmp_path)
    store.put(K1, batch)
    with pytest.raises(DumpError, match=r"attention_mask.*in place"):
        store.close()


def test_without_a_background_thread_nothing_is_copied_and_what_is_changed_later_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
    batch = rollout_output(**LARGE)
    store = RolloutStore(tmp_path, background=False)
    store.put(K1, batch)
    batch.batch["responses"].zero_()
    batch.batch["rm_scores"].zero_()
    monkeypatch.undo()
    assert_same_batch(rollout_output(**LARGE), store.get(K1))


def test_tensors_of_inference_mode_are_copied_because_torch_does_not_count_their_changes(
    tmp_path: Path, gate: threading.Event
) -> None:
    with torch.inference_mode():
        batch = rollout_output(**LARGE)
        with RolloutStore(tmp_path) as store, changed_after_put(store, K1, batch, gate):
            batch.batch["responses"][5, 5] = 1
    assert_same_batch(rollout_output(**LARGE), RolloutStore(tmp_path).get(K1))


def test_one_token_that_is_changed_through_numpy_is_found_by_the_digest_of_the_generation(
    tmp_path: Path, gate: threading.Event
) -> None:
    """torch does not count such a write, and a sample of the bytes misses it."""
    training = Training(tmp_path)
    skip = training.open("record")
    batch = skip.step(K1, inputs_of(K1, rows=64), lambda _: rollout_output(**LARGE)).batch
    batch.batch["responses"].numpy()[3, 700] += 1
    gate.set()
    with pytest.raises(DumpError, match=r"step 1.*responses or rm_scores changed in place"):
        skip.close()
    assert not list(training.dumps.rglob("*.parquet"))


def test_a_column_of_objects_with_the_name_of_a_tensor_is_not_a_change(tmp_path: Path) -> None:
    """An agent loop may return its rewards as objects, and its responses as text too."""
    generated = rollout_output(8)
    del generated.batch["rm_scores"]
    generated.non_tensor_batch["rm_scores"] = np.linspace(0, 1, 8)
    generated.non_tensor_batch["responses"] = np.array([f"text {row}" for row in range(8)], dtype=object)
    training = Training(tmp_path)
    with training.open("record") as skip:
        skip.step(K1, inputs_of(K1), lambda _: generated)
    with training.open("replay") as replay:
        loaded = replay.step(K1, inputs_of(K1), never).batch
    assert_same_batch(without_timings(generated), without_timings(loaded))


def test_inputs_are_recorded_as_they_were_before_generating(tmp_path: Path) -> None:
    """An engine may write its own marks into the prompts that it is given."""

    def generate(inputs: DataProto) -> DataProto:
        inputs.non_tensor_batch["raw_prompt"][0].append({"role": "assistant", "content": "seen"})
        inputs.non_tensor_batch["reward_model"][1]["ground_truth"] = "seen"
        inputs.non_tensor_batch["index"][2] = -1
        inputs.meta_info["do_sample"] = False
        return rollout_output(len(inputs))

    training = Training(tmp_path)
    with training.open("record") as skip:
        skip.step(K1, inputs_of(K1), generate)
    with training.open("replay") as replay:
        assert replay.step(K1, inputs_of(K1), never).hit


def test_inputs_that_cannot_be_stored_fail_the_dump_and_not_the_rollout_step(tmp_path: Path) -> None:
    inputs = inputs_of(K1)
    inputs.non_tensor_batch["raw_prompt"][0] = object()
    with Training(tmp_path).open("cache", {"on_dump_error": "warn"}) as skip:
        assert len(skip.step(K1, inputs, lambda _: rollout_output(8)).batch) == 8
        assert skip.statistics.dump_failures == 1
