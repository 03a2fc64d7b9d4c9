"""Any rollout is restored bit for bit: property tests with thousands of generated batches.

Hypothesis chooses structure (shapes, dtypes, names, what is padded with what, what is wrong by one element); bulk
values come from a seeded generator, as raw bits, so that NaN payloads, -0.0 and infinities are everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

from tests.batches import assert_comes_back, dump_parts, objects
from verl_rollout_skip.store.codec import encoder, padding
from verl_rollout_skip.store.codec.numbers import TORCH_DTYPES

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"]
NUMPY_CODES = ["?", "b", "B", "<i2", ">i4", "<i8", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16", "<M8[ns]", "<m8[25s]"]

sizes = st.integers(0, 5)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(TORCH_DTYPES))


@contextmanager
def pieces(small: bool) -> Iterator[None]:
    """With ``small``, rows are handled one or two at a time, as those of a batch of gigabytes are."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(encoder, "_GROUP_BYTES", 100)
            patch.setattr(padding, "_CHUNK_BYTES", 32)
        yield


def comes_back(data: st.DataObject, batch: Any, inputs: Any = None) -> None:
    """A batch comes back from one part, and from up to eight, with the same digest of its content."""
    cuts = data.draw(st.lists(st.integers(0, rows_of(batch)), max_size=7), "cuts")
    with pieces(data.draw(st.booleans(), label="small pieces")):
        assert_comes_back(batch, inputs, cuts)
        contents = {dump_parts(batch, inputs, where)[1].content_digest for where in ((), cuts)}
    assert len(contents) == 1


def rows_of(batch: Any) -> int:
    return int(batch.batch_size[0]) if isinstance(batch, TensorDict) else len(batch)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """A tensor of any dtype whose elements are random bit patterns, with a few repeated small values between them."""
    dtype = TORCH_DTYPES[name]
    size = torch.empty(0, dtype=dtype).element_size()
    raw = rng.integers(0, 256, (*shape, size)).astype(np.uint8)
    raw[rng.random(shape) < 0.5] = 0
    if dtype is torch.bool:
        raw &= 1
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], code: str) -> np.ndarray:
    raw = rng.integers(0, 256, (*shape, np.dtype(code).itemsize)).astype(np.uint8)
    if code == "?":
        raw &= 1
    return np.frombuffer(raw.tobytes(), code).reshape(shape) if raw.size else np.empty(shape, code)


def change_one(rng: np.random.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that differs in one bit of one element."""
    raw = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1).clone()
    element = int(rng.integers(tensor.numel()))
    byte = 0 if tensor.dtype is torch.bool else int(rng.integers(raw.shape[1]))
    bit = 0 if tensor.dtype is torch.bool else int(rng.integers(8))
    raw[element, byte] ^= 1 << bit
    return raw.reshape(-1).view(tensor.dtype).reshape(tensor.shape)


DERIVED = ("input_ids", "attention_mask", "position_ids", "response_mask")
PADDED = (*DERIVED, "prompts", "responses", "rollout_log_probs", "rm_scores")


def padded_rollout(data: st.DataObject, rows: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a rollout with any widths, lengths, pad values, position rule and integer types."""
    draw = data.draw
    rows = draw(sizes, "rows") if rows is None else rows
    prompt_width, response_width = draw(sizes, "P"), draw(sizes, "R")
    rng = np.random.default_rng(draw(seeds, "seed"))
    prompt_lengths = rng.integers(0, prompt_width + 1, rows)
    response_lengths = rng.integers(0, response_width + 1, rows)
    in_prompt = np.arange(prompt_width) >= (prompt_width - prompt_lengths)[:, None]
    in_response = np.arange(response_width) < response_lengths[:, None]
    inside = np.concatenate([in_prompt, in_response], axis=1)
    pad = draw(st.sampled_from([0, 1, -1, 151_643, -100, 2**40, -(2**63)]), "pad")
    largest = draw(st.sampled_from([100, 2**31, 2**33, 2**62]), "largest token")
    tokens = np.where(inside, rng.integers(0, largest, inside.shape), pad)
    counted = np.clip(np.cumsum(inside, axis=1) - 1, 0, None)
    continued = np.clip(np.arange(inside.shape[1]) - (prompt_width - prompt_lengths)[:, None], 0, None)
    float_pad = draw(st.sampled_from([0.0, -0.0, float("nan"), -1e10]), "float pad")
    floats = draw(st.sampled_from(FLOATS), "float type")
    log_probs = random_bits(rng, in_response.shape, floats)
    padding_value = torch.full((), float_pad).to(log_probs.dtype).expand(log_probs.shape)
    log_probs = _where_bits(torch.from_numpy(in_response), log_probs, padding_value)
    scores = np.zeros(in_response.shape, np.float32)
    if response_width:
        scores[np.arange(rows), np.maximum(response_lengths, 1) - 1] = rng.choice([0.0, 1.0, -1.0, 0.3], rows)
    mask_type = draw(st.sampled_from(["int64", "int32", "bool", "uint8"]), "mask type")
    token_type = draw(st.sampled_from(["int64", "int32"]), "token type")
    rule = draw(st.sampled_from(["counted", "continued"]), "position rule")
    arrays = {
        "prompts": tokens[:, :prompt_width].astype(token_type),
        "responses": tokens[:, prompt_width:].astype(token_type),
        "response_mask": in_response.astype(mask_type),
        "input_ids": tokens.astype(token_type),
        "attention_mask": inside.astype(mask_type),
        "position_ids": (counted if rule == "counted" else continued).astype(token_type),
        "rm_scores": scores,
    }
    tensors = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    tensors["rollout_log_probs"] = log_probs
    return tensors


def extra_tensors(data: st.DataObject, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that are padded like the others (or not) and have any dtype and any dimensions before or after."""
    rows, prompt_width = tensors["prompts"].shape
    windows = {
        "prompt": tensors["attention_mask"][:, :prompt_width].bool(),
        "response": tensors["response_mask"].bool(),
        "full": tensors["attention_mask"].bool(),
    }
    rng = np.random.default_rng(data.draw(seeds, "extra seed"))
    extras = {}
    for number in range(data.draw(st.integers(0, 4), "extras")):
        inside = windows[data.draw(st.sampled_from(sorted(windows)), "window")]
        name = data.draw(dtypes, "dtype")
        before, behind = data.draw(st.sampled_from([((), ()), ((3,), ()), ((), (2, 3)), ((2,), (2,)), ((), (0,))]))
        values = random_bits(rng, (rows, *before, inside.shape[1], *behind), name)
        where = inside.reshape(rows, *(1 for _ in before), inside.shape[1], *(1 for _ in behind)).expand(values.shape)
        if data.draw(st.booleans(), "padded"):
            values = _where_bits(where, values, random_bits(rng, (1,), name).expand(values.shape))
        extras[f"extra_{number}"] = values
    return extras


def _where_bits(where: torch.Tensor, values: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
    """``torch.where`` for every dtype, and without a NaN changing its payload."""
    if not values.numel():
        return values
    size = values.element_size()
    raw = [
        t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).reshape(-1, size)
        for t in (values, pad)
    ]
    chosen = torch.where(where.reshape(-1, 1), *raw)
    return chosen.reshape(-1).view(values.dtype).reshape(values.shape)


def as_batch(data: st.DataObject, tensors: dict[str, torch.Tensor]) -> Any:
    """The tensors in any order, as a DataProto or as a TensorDict."""
    rows = len(tensors["responses"])
    order = data.draw(st.permutations(sorted(tensors)), "order")
    batch = TensorDict({key: tensors[key] for key in order}, batch_size=[rows])
    return DataProto(batch=batch) if data.draw(st.booleans(), "DataProto") else batch


@given(st.data())
def test_any_padded_rollout_comes_back(data: st.DataObject) -> None:
    tensors = padded_rollout(data)
    tensors |= extra_tensors(data, tensors)
    left_out = data.draw(st.sets(st.sampled_from(PADDED), max_size=3), "left out") - {"responses"}
    comes_back(data, as_batch(data, {key: value for key, value in tensors.items() if key not in left_out}))


@given(st.data())
def test_a_single_changed_bit_in_any_tensor_comes_back(data: st.DataObject) -> None:
    tensors = padded_rollout(data)
    rng = np.random.default_rng(data.draw(seeds, "where"))
    for key in data.draw(st.sets(st.sampled_from(PADDED), min_size=1, max_size=2), "changed"):
        if tensors[key].numel():
            tensors[key] = change_one(rng, tensors[key])
    comes_back(data, as_batch(data, tensors))


@pytest.mark.parametrize("key", PADDED)
@pytest.mark.parametrize("rule", ["counted", "continued"])
def test_every_single_element_may_be_an_exception(key: str, rule: str) -> None:
    inside = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    tokens = torch.where(inside == 1, torch.arange(1, 11).reshape(2, 5), 0)
    positions = {"counted": [[0, 0, 1, 2, 2], [0, 1, 2, 2, 2]], "continued": [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]}
    tensors = {
        "prompts": tokens[:, :2],
        "responses": tokens[:, 2:],
        "response_mask": inside[:, 2:],
        "input_ids": tokens,
        "attention_mask": inside,
        "position_ids": torch.tensor(positions[rule]),
        "rollout_log_probs": -0.5 * inside[:, 2:].float(),
        "rm_scores": torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    }
    for row, column in np.ndindex(tuple(tensors[key].shape)):
        changed = tensors[key].clone()
        changed[row, column] = -0.0 if changed[row, column] == 0 and changed.is_floating_point() else 7
        assert_comes_back(DataProto(batch=TensorDict({**tensors, key: changed}, batch_size=[2])))


@given(st.data())
def test_attention_masks_with_holes_come_back(data: st.DataObject) -> None:
    tensors = padded_rollout(data)
    rng = np.random.default_rng(data.draw(seeds, "holes"))
    for key in ("attention_mask", "response_mask"):
        mask = tensors[key].clone()
        mask[torch.from_numpy(rng.random(tuple(mask.shape)) < 0.3)] = 0
        tensors[key] = mask
    tensors["position_ids"] = torch.clip(torch.cumsum(tensors["attention_mask"], 1) - 1, min=0)
    comes_back(data, as_batch(data, tensors | extra_tensors(data, tensors)))


@given(st.data())
def test_tensors_of_any_dtype_and_shape_come_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    tensors = {}
    for number in range(data.draw(st.integers(1, 4), "tensors")):
        shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3), "shape"))
        tensor = random_bits(rng, (rows, *shape), data.draw(dtypes, "dtype"))
        if len(shape) > 1 and data.draw(st.booleans(), "transposed"):
            tensor = tensor.transpose(1, 2)
        tensors[f"tensor_{number}"] = tensor
    comes_back(data, DataProto(batch=TensorDict(tensors, batch_size=[rows])))


@given(st.data())
def test_arrays_of_any_dtype_and_shape_come_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    arrays = {}
    for number in range(data.draw(st.integers(1, 4), "arrays")):
        shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3), "shape"))
        array = random_array(rng, (rows, *shape), data.draw(st.sampled_from(NUMPY_CODES), "code"))
        arrays[f"array_{number}"] = array[:, ::-1] if shape and data.draw(st.booleans(), "reversed") else array
    comes_back(data, DataProto(batch=None, non_tensor_batch=arrays, meta_info={}))


any_text = st.text(st.characters(exclude_categories=()), max_size=6)
any_float = st.binary(min_size=8, max_size=8).map(lambda raw: float(np.frombuffer(raw, "<f8")[0])) | st.floats()
any_integer = st.integers() | st.sampled_from([2**63, -(2**63) - 1, 10**400])
any_number = st.tuples(st.sampled_from(NUMPY_CODES), seeds).map(
    lambda drawn: random_array(np.random.default_rng(drawn[1]), (1,), drawn[0])[0]
)
any_array = st.tuples(st.sampled_from(NUMPY_CODES), st.lists(st.integers(0, 3), max_size=3), seeds).map(
    lambda drawn: random_array(np.random.default_rng(drawn[2]), tuple(drawn[1]), drawn[0])
)
any_tensor = st.tuples(dtypes, st.lists(st.integers(0, 3), max_size=3), seeds).map(
    lambda drawn: random_bits(np.random.default_rng(drawn[2]), tuple(drawn[1]), drawn[0])
)
any_leaf = st.one_of(
    st.none(), st.booleans(), any_integer, any_float, any_text, st.binary(max_size=5), any_number, any_array, any_tensor
)
any_key = st.one_of(any_text, st.just("$type"), any_integer, st.none(), st.tuples(st.integers(), any_text))
any_cell = st.recursive(
    any_leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(any_key, inner, max_size=3),
        st.lists(inner, max_size=3).map(objects),
    ),
    max_leaves=6,
)


def cells(data: st.DataObject, count: int) -> list[Any]:
    """Cells of a column: of one simple type, or of any; some rows share one object."""
    kinds = [any_text, any_integer, any_float, st.booleans(), any_cell]
    kind = data.draw(st.sampled_from(range(len(kinds))), "kind of cells")
    pool = data.draw(st.lists(st.none() | kinds[kind], min_size=1, max_size=4), "cells")
    return [pool[data.draw(st.integers(0, len(pool) - 1))] for _ in range(count)]


@given(st.data())
def test_any_objects_in_cells_come_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    arrays = {f"objects_{n}": objects(cells(data, rows)) for n in range(data.draw(st.integers(1, 3), "columns"))}
    comes_back(data, DataProto(batch=None, non_tensor_batch=arrays, meta_info={}))


@given(st.data())
def test_object_arrays_of_any_shape_come_back(data: st.DataObject) -> None:
    shape = (data.draw(sizes, "rows"), *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2), "shape"))
    array = objects(cells(data, int(np.prod(shape)))).reshape(shape)
    comes_back(data, DataProto(batch=None, non_tensor_batch={"grid": array}, meta_info={}))


@given(st.data())
def test_fixed_width_text_comes_back(data: st.DataObject) -> None:
    shape = (data.draw(sizes, "rows"), *data.draw(st.lists(st.integers(0, 2), max_size=1), "shape"))
    count = int(np.prod(shape))
    texts = data.draw(st.lists(any_text, min_size=count, max_size=count), "texts")
    raws = data.draw(st.lists(st.binary(max_size=4), min_size=count, max_size=count), "bytes")
    arrays = {
        "text": np.array(texts, data.draw(st.sampled_from(["<U6", ">U7"]))).reshape(shape),
        "raw": np.array(raws, "S5").reshape(shape),
    }
    comes_back(data, DataProto(batch=None, non_tensor_batch=arrays, meta_info={}))


@given(st.dictionaries(any_key, any_cell, max_size=4), st.integers(0, 2))
def test_any_meta_info_comes_back(meta: dict, rows: int) -> None:
    batch = TensorDict({"x": torch.zeros(rows)}, batch_size=[rows])
    assert_comes_back(DataProto(batch=batch, meta_info=meta), DataProto(batch=batch, meta_info={"other": meta}))


STRANGE_NAMES = [
    "",
    ".",
    "a.b",
    "a_b",
    "a__b",
    "A_B",
    "x",
    "X",
    "x__2",
    "skip__x",
    "skip__score",
    "skip__alias__x",
    "skip__prompt_length",
    "in__x",
    "out__x",
    "out__in__x",
    "element",
    "x.list.element",
    "ß",
    "ẞ",
    "İ",
    "nul\x00nul",
    "new\nline",
    'quote"quote',
    "`",
    "你好",
    "uid",
    "prompts",
    "responses",
    "attention_mask",
    "rm_scores",
]
readable_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
names = st.lists(st.sampled_from(STRANGE_NAMES) | readable_text, min_size=1, max_size=6, unique=True)


@given(st.data())
def test_keys_of_any_name_come_back(data: st.DataObject) -> None:
    def batch(label: str) -> DataProto:
        rng = np.random.default_rng(data.draw(seeds, label))
        tensors: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        for name in data.draw(names, f"names of {label}"):
            kind = data.draw(st.integers(0, 3))
            if kind == 0:
                tensors[name] = torch.from_numpy(rng.integers(0, 2, (2, 2)))
            elif kind == 1:
                arrays[name] = rng.integers(0, 2, 2)
            else:
                pool = [{"number": int(rng.integers(2))}, "text", [b"bytes", torch.ones(2)]]
                arrays[name] = objects([pool[rng.integers(len(pool))] for _ in range(2)])
        return DataProto(TensorDict(tensors, batch_size=[2]), arrays, {name: name for name in [*tensors, *arrays]})

    comes_back(data, batch("output"), batch("input") if data.draw(st.booleans(), "with input") else None)


@given(st.data())
def test_inputs_that_the_output_copies_come_back(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 4), "rows")
    given_tensors, given_arrays = padded_rollout(data, rows), {}
    for number in range(3):
        given_arrays[f"objects_{number}"] = objects(cells(data, rows))
    given_arrays["numbers"] = random_array(np.random.default_rng(data.draw(seeds)), (rows,), "<f8")
    given_tensors["loss_mask"] = given_tensors["response_mask"].clone()
    rng = np.random.default_rng(data.draw(seeds, "changes"))
    made, arrays = padded_rollout(data, rows), {"own": objects(cells(data, rows))}
    for key, tensor in given_tensors.items():
        choice = data.draw(st.sampled_from(["echoed", "changed", "own", "absent"]), key)
        if choice == "echoed":
            made[key] = tensor.clone()
        elif choice == "changed" and tensor.numel():
            made[key] = change_one(rng, tensor)
        elif choice == "absent":
            made.pop(key, None)
    for key, array in given_arrays.items():
        choice = data.draw(st.sampled_from(["echoed", "copied", "absent"]), key)
        if choice == "echoed":
            arrays[key] = array
        elif choice == "copied" and rows:
            arrays[key] = array.copy()
            arrays[key][0] = data.draw(any_float) if array.dtype != object else data.draw(any_leaf)
    output = DataProto(TensorDict(made, batch_size=[rows]), arrays, {})
    inputs = DataProto(TensorDict(given_tensors, batch_size=[rows]), given_arrays, {"global_steps": 1})
    comes_back(data, output, inputs)


def jagged(data: st.DataObject, rows: int, lengths: list[int], offsets: torch.Tensor | None = None) -> Any:
    """A jagged tensor in one of the ways in which torch and verl make them."""
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    name = data.draw(dtypes, "dtype")
    before = data.draw(st.lists(st.integers(1, 3), max_size=1), "before")
    behind = data.draw(st.lists(st.integers(1, 3), max_size=1), "behind")
    ragged_idx = len(before) + 1

    def values(total: int) -> torch.Tensor:
        return random_bits(rng, (*before, total, *behind), name)

    ends = torch.tensor([0, *np.cumsum(lengths)])
    way = data.draw(st.sampled_from(["offsets", "shared", "holes", "later", "transposed", "verl", "as_nested"]), "way")
    if way == "shared" and offsets is not None:
        return torch.nested.nested_tensor_from_jagged(values(sum(lengths)), offsets, jagged_dim=ragged_idx)
    if way == "holes" and rows:
        gaps = rng.integers(0, 3, rows)
        starts = torch.tensor([0, *np.cumsum(np.array(lengths) + gaps)])
        total, counts = int(starts[-1]), torch.tensor(lengths)
        return torch.nested.nested_tensor_from_jagged(values(total), starts, counts, jagged_dim=ragged_idx)
    if way == "later" and rows:
        return torch.nested.nested_tensor_from_jagged(values(sum(lengths) + 3), ends + 2, jagged_dim=ragged_idx)
    if way == "transposed" and behind and not before:
        return torch.nested.nested_tensor_from_jagged(values(sum(lengths)), ends).transpose(1, 2)
    if way in ("verl", "as_nested") and rows and not name.startswith(("float8", "uint16", "uint32", "uint64")):
        pieces_of_rows = [values(length) for length in lengths]
        if way == "verl":
            return nested_tensor_from_tensor_list(pieces_of_rows, ragged_idx)
        if not before:
            return torch.nested.as_nested_tensor(pieces_of_rows, layout=torch.jagged)
    return torch.nested.nested_tensor_from_jagged(values(sum(lengths)), ends, jagged_dim=ragged_idx)


@given(st.data())
def test_any_jagged_tensors_come_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows), "lengths")
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    tensors = {f"jagged_{n}": jagged(data, rows, lengths, offsets) for n in range(data.draw(st.integers(1, 4)))}
    comes_back(data, TensorDict(tensors, batch_size=[rows]))


@given(st.data())
def test_any_jagged_rollout_comes_back(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4), "rows")
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]), "token type")
    prompts = [torch.from_numpy(rng.integers(0, 2**31 - 1, rng.integers(0, 4))).to(dtype) for _ in range(rows)]
    responses = [torch.from_numpy(rng.integers(0, 2**31 - 1, rng.integers(0, 4))).to(dtype) for _ in range(rows)]
    inside = [torch.from_numpy(rng.integers(0, 2, len(row))) for row in responses]
    rows_of: dict[str, list[torch.Tensor]] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)).to(dtype) for p, r in zip(prompts, responses, strict=True)],
        "response_mask": inside,
        "loss_mask": inside,
        "rm_scores": [random_bits(rng, (len(row),), "float32") for row in responses],
    }
    changed = data.draw(st.none() | st.sampled_from(sorted(rows_of)), "changed")
    if changed is not None:
        row = int(rng.integers(rows))
        if len(rows_of[changed][row]):
            rows_of[changed] = list(rows_of[changed])
            rows_of[changed][row] = change_one(rng, rows_of[changed][row])
    order = data.draw(st.permutations(sorted(rows_of)), "order")
    tensors: dict[str, Any] = {key: torch.nested.as_nested_tensor(rows_of[key], layout=torch.jagged) for key in order}
    if data.draw(st.booleans(), "shared offsets"):
        shared = tensors["responses"].offsets()
        for key in ("rm_scores", "loss_mask"):
            tensors[key] = torch.nested.nested_tensor_from_jagged(tensors[key].values(), shared)
    inputs = None
    if data.draw(st.booleans(), "echoed"):
        inputs = TensorDict({key: tensors[key].clone() for key in order[:3]}, batch_size=[rows])
    comes_back(data, TensorDict(tensors, batch_size=[rows]), inputs)


@given(st.data())
def test_any_strided_nested_tensors_come_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    dims = data.draw(st.integers(1, 3), "dims")
    name = data.draw(st.sampled_from(["int64", "int32", "float32", "bfloat16", "float16", "bool", "uint8"]), "dtype")
    values = [random_bits(rng, tuple(rng.integers(0, 4, dims).tolist()), name) for _ in range(rows)]
    if name == "int64":
        values = [value % data.draw(st.sampled_from([2**20, 2**40])) for value in values]
    dtype = TORCH_DTYPES[name]
    nested = torch.nested.nested_tensor(values, dtype=dtype, layout=torch.strided)
    comes_back(data, TensorDict({"nested": nested}, batch_size=[rows]))


def random_tensordict(data: st.DataObject, rows: int, depth: int) -> TensorDict:
    node = TensorDict({}, batch_size=[rows])
    rng = np.random.default_rng(data.draw(seeds, "seed"))
    makers: list[Callable[[], Any]] = [
        lambda: random_bits(rng, (rows, *data.draw(st.lists(sizes, max_size=2))), data.draw(dtypes)),
        lambda: NonTensorData(data.draw(any_cell)),
        lambda: random_tensordict(data, rows, depth - 1) if depth else torch.zeros(rows),
    ]
    if rows:
        makers.append(lambda: NonTensorStack.from_list([NonTensorData(cell) for cell in cells(data, rows)]))
    for name in data.draw(st.lists(st.sampled_from(STRANGE_NAMES[1:]), max_size=4, unique=True), "names"):
        node.set(name, data.draw(st.sampled_from(makers))())
    return node


@given(st.data())
def test_any_tree_of_tensordicts_comes_back(data: st.DataObject) -> None:
    rows = data.draw(sizes, "rows")
    inputs = random_tensordict(data, rows, 1) if data.draw(st.booleans(), "with input") else None
    comes_back(data, random_tensordict(data, rows, 2), inputs)
