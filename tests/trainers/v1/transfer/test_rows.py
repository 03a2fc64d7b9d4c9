"""Batches are read from a real TransferQueue and put back: every field, bit for bit, in order, under other uids."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from tests.trainers.v1.training import PARTITION, clear_queue, put_session, seen, trajectory
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import UnsupportedBatchError
from verl_rollout_skip.trainers.v1.transfer import rows

pytestmark = pytest.mark.usefixtures("queue")

K1 = RolloutKey(1)


@pytest.fixture(autouse=True)
def empty_queue() -> Iterator[None]:
    yield
    clear_queue()


def put(uid: str, session: int, tokens: list[int], **fields: Any) -> list[str]:
    """Put a session with one output per number of tokens, as an agent-loop worker does, and return the keys."""
    outputs = []
    for length in tokens:
        output = AgentLoopOutput(
            prompt_ids=[7] * (3 + session),
            response_ids=list(range(length)),
            response_mask=[1] * length,
            response_logprobs=[-0.1 * position for position in range(length)],
            reward_score=0.5,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {"acc": np.float32(0.5)}, "min_global_steps": 1, "max_global_steps": 2},
        )
        prompt = {"uid": uid, "global_steps": 1, "index": np.int64(4), "raw_prompt": [{"role": "user"}], **fields}
        outputs.append(trajectory(output, prompt, session))
    put_session(outputs)
    return [f"{uid}_{session}_{index}" for index in range(len(tokens))]


def batch_of(keys: list[str]) -> KVBatchMeta:
    tags = tq.kv_list(PARTITION)[PARTITION]
    return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[tags[key] for key in keys])


def stored(batch: KVBatchMeta, folder: Path, metrics: dict[str, Any] | None = None) -> TensorDict:
    """Fetch a batch, record it, and load it."""
    fields, partial = rows.fetch(batch)
    uids = [rows.Trajectory.parse(key).uid for key in batch.keys]
    positions = [sorted(set(uids)).index(uid) for uid in uids]
    rows.pack(fields, batch, positions, rows.Sample(["d"], [0], metrics or {}, partial))
    with RolloutStore(folder) as store:
        store.put(K1, fields)
    return RolloutStore(folder).get(K1)


def test_a_batch_comes_back_with_every_bit_type_and_tag_in_its_order(tmp_path: Path) -> None:
    keys = [*put("b", 0, [3, 1]), *put("a", 0, [2]), *put("b", 1, [4])]
    before = batch_of([keys[3], keys[0], keys[2], keys[1]])
    back = rows.put(stored(before, tmp_path), ["new-b", "new-b", "new-a", "new-b"])
    assert back.keys == ["new-b_1_0", "new-b_0_0", "new-a_0_0", "new-b_0_1"]
    assert seen(back) == seen(before)
    assert back.tags == before.tags
    first, second = (tq.kv_batch_get(keys=found.keys, partition_id=PARTITION) for found in (before, back))
    for name in first.keys():  # noqa: SIM118
        one, other = first.get(name), second.get(name)
        assert type(one) is type(other), name
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.layout, one.is_nested) == (other.dtype, other.layout, other.is_nested), name


def test_fields_that_only_some_trajectories_have_stay_where_they_were(tmp_path: Path) -> None:
    keys = [*put("a", 0, [2], routed=torch.tensor([[1, 2], [3, 4]])), *put("b", 0, [3]), *put("c", 0, [1], note=None)]
    before = batch_of(keys)
    back = rows.put(stored(before, tmp_path), ["A", "B", "C"])
    fields, partial = rows.fetch(back)
    assert partial == {"routed": [0], "note": [2]}
    assert fields.get("routed").tolist()[0].tolist() == [[1, 2], [3, 4]]
    common = tq.kv_batch_get(keys=back.keys, partition_id=PARTITION)
    assert not {"routed", "note"} & set(common.keys())


def test_position_ids_with_several_rows_per_token_and_other_tensors_come_back(tmp_path: Path) -> None:
    keys = []
    for session, length in enumerate([5, 3]):
        positions = torch.arange(4 * length).reshape(4, length)
        image = torch.rand(2, length, 3, dtype=torch.float32).to(torch.bfloat16)
        keys += put("a", session, [length], mrope=positions, image=image, flag=torch.tensor(True))
    before = batch_of(keys)
    back = rows.put(stored(before, tmp_path), ["A", "A"])
    assert seen(back) == seen(before)


def test_the_metrics_of_a_sample_come_back_with_their_types(tmp_path: Path) -> None:
    metrics = {"evicted": 3, "staleness/mean": np.float64(1.5), "_counts": {0.0: 2, 1.0: 1}}
    recorded = stored(batch_of(put("a", 0, [1])), tmp_path, metrics)
    back = rows.Sample(**recorded.get(rows.SAMPLE).data)
    assert repr(back.metrics) == repr(metrics)


def test_a_field_with_a_reserved_name_is_an_error() -> None:
    batch = batch_of(put("a", 0, [1], tq_tag="mine"))
    fields, partial = rows.fetch(batch)
    with pytest.raises(UnsupportedBatchError, match="'tq_tag'"):
        rows.pack(fields, batch, [0], rows.Sample([], [], {}, partial))


class Writer:
    """Keeps writing rows and new fields into the same partition, as agent loops do."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            lengths = [1 + (number + row) % 5 for row in range(16)]
            keys = [f"w{number}_0_{row}" for row in range(16)]
            tokens = torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
            fields = TensorDict({"responses": tokens, f"written_{number}": tokens}, batch_size=[16])
            tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=[{"status": "success"}] * 16)


def test_a_batch_is_recorded_while_agent_loops_keep_writing() -> None:
    keys = [key for number in range(60) for key in put(f"a{number}", 0, [2, 1])]
    keys += put("b", 0, [2], routed=torch.tensor([[1, 2], [3, 4]]))
    batch = batch_of(keys)
    alone, partial = rows.fetch(batch)
    with Writer():
        for _ in range(12):
            fields, found = rows.fetch(batch)
            assert found == partial == {"routed": [len(keys) - 1]}
            assert set(fields.keys()) == set(alone.keys())
