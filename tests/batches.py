"""Small rollouts in verl's format, and an exact comparison of batches that shares no code with the package.

``assert_same_batch`` is deliberately strict: bits instead of values, types instead of equality, the order of keys,
which rows share one object, which nested tensors share their offsets.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

from verl_rollout_skip.store import codec
from verl_rollout_skip.store.codec.batch import unflatten

PAD_TOKEN = 0
SAMPLES_PER_PROMPT = 2


def rollout_output(rows: int = 8, prompt_width: int = 6, response_width: int = 10, seed: int = 0) -> DataProto:
    """What verl 0.9.1's AgentLoopManager returns for a single-turn rollout with an outcome reward."""
    rng = np.random.default_rng(seed)
    prompt_lengths = np.repeat(rng.integers(1, prompt_width + 1, rows) if prompt_width else np.zeros(rows, int), 2)[
        :rows
    ]
    response_lengths = rng.integers(1, response_width + 1, rows) if response_width else np.zeros(rows, int)
    in_prompt = np.arange(prompt_width) >= (prompt_width - prompt_lengths)[:, None]
    in_response = np.arange(response_width) < response_lengths[:, None]
    prompts = np.where(in_prompt, rng.integers(1, 50_000, (rows, prompt_width)), PAD_TOKEN)
    responses = np.where(in_response, rng.integers(1, 50_000, (rows, response_width)), PAD_TOKEN)
    attention_mask = np.concatenate([in_prompt, in_response], axis=1).astype(np.int64)
    log_probs = np.where(in_response, -rng.exponential(0.5, in_response.shape), 0.0).astype(np.float32)
    scores = np.zeros(in_response.shape, np.float32)
    correct = rng.integers(0, 2, rows)
    if response_width:
        scores[np.arange(rows), response_lengths - 1] = correct
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": in_response.astype(np.int64),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": np.clip(np.cumsum(attention_mask, axis=1) - 1, 0, None),
        "rollout_log_probs": log_probs,
        "rm_scores": scores,
    }
    return DataProto(
        batch=TensorDict({key: torch.from_numpy(value) for key, value in tensors.items()}, batch_size=[rows]),
        non_tensor_batch={
            "__num_turns__": np.full(rows, 2, np.int32),
            "multi_modal_inputs": objects([{} for _ in range(rows)]),
            "acc": correct.astype(np.float64),
        },
        meta_info={
            "timing": {"agent_loop/generate_sequences/mean": 0.25, "agent_loop/num_preempted/max": -1},
            "reward_extra_keys": ["acc"],
        },
    )


def rollout_input(rows: int = 8, seed: int = 0) -> DataProto:
    """The input of ``generate_sequences`` in verl 0.9.1: no tensors, each prompt repeated for its samples."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {
        key: [] for key in ("data_source", "reward_model", "extra_info", "raw_prompt", "index", "uid")
    }
    for index in range((rows + SAMPLES_PER_PROMPT - 1) // SAMPLES_PER_PROMPT):
        left, right = (int(number) for number in rng.integers(1, 100, 2))
        question = f"What is {left} + {right}?"
        row = {
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
            "extra_info": {"index": index, "split": "train", "question": question},
            "raw_prompt": [{"role": "user", "content": question}],
            "index": index,
            "uid": rng.bytes(16).hex(),
        }
        for key, value in row.items():
            columns[key].extend([value] * SAMPLES_PER_PROMPT)
    return DataProto(
        batch=None,
        non_tensor_batch={key: objects(values[:rows]) for key, values in columns.items()},
        meta_info={"global_steps": 1},
    )


def objects(values: list[Any]) -> np.ndarray:
    """An object array with these cells."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def dump(batch: Any, inputs: Any = None) -> bytes:
    """The Parquet file of a rollout step, without a store."""
    (data,) = dump_parts(batch, inputs)[0]
    return data


def dump_parts(batch: Any, inputs: Any = None, cuts: Sequence[int] = ()) -> tuple[list[bytes], codec.Summary]:
    """The parts of a rollout step, split before these rows, and its description."""
    prepared = codec.prepare(batch, inputs)
    plan, parts = codec.Plan(prepared), []
    for start, stop in pairwise([0, *sorted(cuts), prepared.output.batch.rows]):
        sink = io.BytesIO()
        plan.write(slice(start, stop), sink)
        parts.append(sink.getvalue())
    return parts, plan.summary()


def load(*parts: bytes) -> tuple[Any, Any]:
    """The output and the input (or None) of a rollout step, decoded from its parts."""
    reader = codec.Reader(parts, limit=1 << 30)
    return unflatten(reader.output()), unflatten(reader.input()) if reader.has_input else None


def assert_comes_back(batch: Any, inputs: Any = None, cuts: Sequence[int] = ()) -> bytes:
    """Check that a rollout step is restored exactly, and return its first part."""
    parts, _ = dump_parts(batch, inputs, cuts)
    loaded, loaded_inputs = load(*parts)
    assert_same_batch(batch, loaded)
    assert (inputs is None) == (loaded_inputs is None)
    if inputs is not None:
        assert_same_batch(inputs, loaded_inputs)
    return parts[0]


def data_proto(tensors: dict[str, Any] | None = None, **arrays: Any) -> DataProto:
    """A DataProto with these tensors and these non-tensors; a list becomes an object array."""
    columns = {key: objects(value) if isinstance(value, list) else value for key, value in arrays.items()}
    batch = None
    if tensors:
        batch = TensorDict(tensors, batch_size=[len(next(iter(tensors.values())))])
    return DataProto(batch=batch, non_tensor_batch=columns, meta_info={})


def assert_same_batch(left: Any, right: Any) -> None:
    """Check that two DataProtos or TensorDicts agree in every bit and type; the error names the path."""
    assert type(left) is type(right), f"{type(left)} became {type(right)}"
    if isinstance(left, TensorDict):
        _same_tensordict(left, right, "batch")
        return
    assert (left.batch is None) == (right.batch is None), f"batch was {left.batch!r} and is {right.batch!r}"
    if left.batch is not None:
        _same_tensordict(left.batch, right.batch, "batch")
    assert list(left.non_tensor_batch) == list(right.non_tensor_batch), "the keys of non_tensor_batch"
    for key, array in left.non_tensor_batch.items():
        assert_same_object(array, right.non_tensor_batch[key], f"non_tensor_batch[{key!r}]")
        _same_sharing(array, right.non_tensor_batch[key], f"non_tensor_batch[{key!r}]")
    assert_same_object(left.meta_info, right.meta_info, "meta_info")


def assert_same_object(left: Any, right: Any, where: str = "value") -> None:
    """Check recursively that two Python values agree in every type and bit."""
    if _is_image(left) and _is_image(right):
        # An image that was opened from a file comes back as a plain image.
        assert (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes()), where
        assert_same_object(left.info, right.info, f"{where}.info")
        if left.palette is not None or right.palette is not None:
            assert left.palette.mode == right.palette.mode, where
            assert bytes(left.palette.palette) == bytes(right.palette.palette), where
        for mode in ("RGB", "RGBA"):  # what a trainer does with it
            if left.mode not in ("LAB", "La"):
                assert left.convert(mode).tobytes() == right.convert(mode).tobytes(), where
        return
    assert type(left) is type(right), f"{where}: {type(left)} became {type(right)}"
    if isinstance(left, torch.Tensor):
        assert_same_tensor(left, right, where)
    elif isinstance(left, np.ndarray):
        assert left.dtype.str == right.dtype.str, f"{where}: dtype {left.dtype.str} became {right.dtype.str}"
        assert left.shape == right.shape, f"{where}: shape {left.shape} became {right.shape}"
        if left.dtype == object:
            for index in np.ndindex(left.shape):
                assert_same_object(left[index], right[index], f"{where}{list(index)}")
        else:
            assert left.tobytes() == right.tobytes(), f"{where}: {left!r} became {right!r}"
    elif isinstance(left, np.generic):
        assert left.dtype.str == right.dtype.str, f"{where}: dtype {left.dtype.str} became {right.dtype.str}"
        assert left.tobytes() == right.tobytes(), f"{where}: {left!r} became {right!r}"
    elif isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right), f"{where}: {left!r} became {right!r}"
    elif isinstance(left, dict):
        assert len(left) == len(right), f"{where}: {len(left)} keys became {len(right)}"
        for left_key, right_key in zip(left, right, strict=True):
            assert_same_object(left_key, right_key, f"{where} key")
            assert_same_object(left[left_key], right[right_key], f"{where}[{left_key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), f"{where}: {len(left)} items became {len(right)}"
        for index, (left_item, right_item) in enumerate(zip(left, right, strict=True)):
            assert_same_object(left_item, right_item, f"{where}[{index}]")
    else:
        assert left == right, f"{where}: {left!r} became {right!r}"


def assert_same_tensor(left: torch.Tensor, right: torch.Tensor, where: str = "tensor") -> None:
    """Check that two tensors, dense or nested, agree in dtype, layout, shape and every bit.

    For a jagged tensor with holes, only the rows are compared, because the holes have no defined content.
    """
    assert left.dtype == right.dtype, f"{where}: dtype {left.dtype} became {right.dtype}"
    assert left.layout == right.layout, f"{where}: layout {left.layout} became {right.layout}"
    assert left.is_nested == right.is_nested, f"{where}: is_nested {left.is_nested} became {right.is_nested}"
    assert left.device == right.device, f"{where}: device {left.device} became {right.device}"
    if not left.is_nested:
        assert left.shape == right.shape, f"{where}: shape {tuple(left.shape)} became {tuple(right.shape)}"
        if bits_of(left) != bits_of(right):
            raise AssertionError(f"{where}: {left} became {right}")
        return
    if left.layout is torch.jagged:
        for name in ("_ragged_idx", "ndim"):
            was, is_now = getattr(left, name), getattr(right, name)
            assert was == is_now, f"{where}: {name} {was} became {is_now}"
        assert _laid_out(left) == _laid_out(right), f"{where}: {left.shape} became {right.shape}"
    left_rows, right_rows = nested_rows(left), nested_rows(right)
    assert len(left_rows) == len(right_rows), f"{where}: {len(left_rows)} rows became {len(right_rows)}"
    for row, (left_row, right_row) in enumerate(zip(left_rows, right_rows, strict=True)):
        assert_same_tensor(left_row, right_row, f"{where}[{row}]")


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def nested_rows(nested: Any) -> list[torch.Tensor]:
    """The rows of a nested tensor, as returned by ``unbind``."""
    if nested.layout is not torch.jagged:
        return list(nested.unbind())
    offsets = nested.offsets().tolist()
    lengths = nested.lengths().tolist() if nested.lengths() is not None else np.diff(offsets).tolist()
    dim = nested._ragged_idx - 1
    return [nested.values().narrow(dim, start, size) for start, size in zip(offsets[:-1], lengths, strict=True)]


def _laid_out(nested: Any) -> int:
    """The ragged dimension according to the shape; verl creates tensors whose ``_ragged_idx`` differs."""
    return next(dim for dim, size in enumerate(nested.shape) if isinstance(size, torch.SymInt))


def _same_tensordict(left: TensorDict, right: TensorDict, where: str) -> None:
    assert left.batch_size == right.batch_size, f"{where}: batch_size {left.batch_size} became {right.batch_size}"
    assert left.device == right.device, f"{where}: device {left.device} became {right.device}"
    keys = list(left.keys())
    assert keys == list(right.keys()), f"{where}: keys {keys} became {list(right.keys())}"
    for key in keys:
        here = f"{where}[{key!r}]"
        left_value, right_value = left.get(key), right.get(key)
        assert type(left_value) is type(right_value), f"{here}: {type(left_value)} became {type(right_value)}"
        if isinstance(left_value, TensorDict):
            _same_tensordict(left_value, right_value, here)
        elif isinstance(left_value, NonTensorStack):
            left_cells, right_cells = left_value.tolist(), right_value.tolist()
            assert_same_object(left_cells, right_cells, here)
            _same_sharing(left_cells, right_cells, here)
        elif isinstance(left_value, NonTensorData):
            assert left_value.batch_size == right_value.batch_size, f"{here}: batch_size"
            assert_same_object(left_value.data, right_value.data, here)
        else:
            assert_same_tensor(left_value, right_value, here)
    _same_offsets(left, right, where)


def _same_offsets(left: TensorDict, right: TensorDict, where: str) -> None:
    """Nested tensors that shared offsets, and so were compatible in operations, still do."""
    jagged = [key for key in left.keys() if getattr(left.get(key), "layout", None) is torch.jagged]  # noqa: SIM118
    for one, other in itertools.combinations(jagged, 2):
        if _share_offsets(left.get(one), left.get(other)):
            shared = _share_offsets(right.get(one), right.get(other))
            assert shared, f"{where}: {one!r} and {other!r} do not share their offsets any more"


def _share_offsets(one: Any, other: Any) -> bool:
    return one.offsets() is other.offsets() and one.lengths() is other.lengths()


def _same_sharing(left: Any, right: Any, where: str) -> None:
    """Rows that shared one object share one again, and equal but separate objects stay separate."""
    mutable = [row for row in range(len(left)) if isinstance(left[row], list | dict | np.ndarray | torch.Tensor)]
    if isinstance(left, np.ndarray) and left.ndim != 1:
        return
    for row, other in itertools.combinations(mutable, 2):
        was, is_now = left[row] is left[other], right[row] is right[other]
        assert was == is_now, f"{where}: rows {row} and {other} {'no longer' if was else 'now'} share one object"


def _is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes")
