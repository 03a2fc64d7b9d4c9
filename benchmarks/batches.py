"""Synthetic but realistic rollout batches, in the format of verl's agent loop, for the benchmarks.

Lengths are log-normal and limited by the width, tokens are Zipf-like text (or uniform, the worst case for a
compressor), log-probs have a full mantissa, and the reward is on the last token of each response.
``save_raw`` and ``load_raw`` pass a batch to another process without using either of the compared stores.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from verl import DataProto

VOCABULARY = 151_936
PAD_TOKEN = 151_643
SAMPLES_PER_PROMPT = 8
PATCH = 1176


@dataclass(frozen=True)
class BatchSize:
    """A named batch size: trajectories, padded widths of prompts and responses, and bytes of the image of each prompt,
    which every trajectory copies."""

    name: str
    rows: int
    prompt_width: int
    response_width: int
    image_bytes: int = 0


IMAGES = "images"
SIZES = {
    "XS": BatchSize("XS", 64, 128, 512),
    "S": BatchSize("S", 512, 1024, 4096),
    "M": BatchSize("M", 2048, 1024, 8192),
    IMAGES: BatchSize(IMAGES, 512, 1024, 1024, image_bytes=3 << 20),
}


def make_batch(size: BatchSize, text: str = "zipf", seed: int = 0) -> tuple[DataProto, DataProto]:
    """The output of a rollout step and its input."""
    from verl import DataProto

    rng = np.random.default_rng(seed)
    rows, prompt_width, response_width = size.rows, size.prompt_width, size.response_width
    prompt_lengths = _lengths(rng, rows // SAMPLES_PER_PROMPT, 160, 0.5, prompt_width)
    prompt_lengths = np.repeat(prompt_lengths, SAMPLES_PER_PROMPT)
    response_lengths = _lengths(rng, rows, 0.22 * response_width, 0.75, response_width)

    prompts = _tokens(rng, (rows // SAMPLES_PER_PROMPT, prompt_width), text).repeat(SAMPLES_PER_PROMPT, axis=0)
    prompts[np.arange(prompt_width) < (prompt_width - prompt_lengths)[:, None]] = PAD_TOKEN
    in_response = np.arange(response_width) < response_lengths[:, None]
    responses = _tokens(rng, (rows, response_width), text)
    responses[~in_response] = PAD_TOKEN
    attention_mask = np.concatenate(
        [np.arange(prompt_width) >= (prompt_width - prompt_lengths)[:, None], in_response], axis=1
    ).astype(np.int64)
    position_ids = np.clip(np.cumsum(attention_mask, axis=1) - 1, 0, None)
    log_probs = -rng.exponential(0.35, (rows, response_width)).astype(np.float32)
    log_probs[~in_response] = 0.0
    scores = np.zeros((rows, response_width), np.float32)
    scores[np.arange(rows), response_lengths - 1] = rng.integers(0, 2, rows) * 2.0 - 1.0

    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": in_response.astype(np.int64),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "rollout_log_probs": log_probs,
        "rm_scores": scores,
    }
    batch = TensorDict({key: torch.from_numpy(value) for key, value in tensors.items()}, batch_size=[rows])
    output = DataProto(
        batch=batch,
        non_tensor_batch={
            "__num_turns__": np.full(rows, 2, np.int32),
            "multi_modal_inputs": _objects(_images(rows, size.image_bytes, rng)),
            "acc": (scores.sum(-1) > 0).astype(np.float64),
        },
        meta_info={"timing": {"agent_loop/generate_sequences/mean": 41.5}, "reward_extra_keys": ["acc"]},
    )
    return output, _inputs(rows, rng)


def save_raw(folder: Path, output: DataProto, inputs: DataProto) -> None:
    """Save a batch as one file per array; ``folder`` must not exist."""
    folder.mkdir(parents=True)
    for key, tensor in output.batch.items():
        np.save(folder / f"{key}.npy", tensor.numpy())
    rest = {
        "tensors": list(output.batch.keys()),
        "output": (output.non_tensor_batch, output.meta_info),
        "inputs": (inputs.non_tensor_batch, inputs.meta_info),
    }
    (folder / "rest.pickle").write_bytes(pickle.dumps(rest))


def load_raw(folder: Path) -> tuple[DataProto, DataProto]:
    """Load a batch that ``save_raw`` saved."""
    from verl import DataProto

    rest = pickle.loads((folder / "rest.pickle").read_bytes())
    tensors = {key: torch.from_numpy(np.load(folder / f"{key}.npy")) for key in rest["tensors"]}
    rows = len(next(iter(tensors.values())))
    output, inputs = rest["output"], rest["inputs"]
    return (
        DataProto(TensorDict(tensors, batch_size=[rows]), non_tensor_batch=output[0], meta_info=output[1]),
        DataProto(batch=None, non_tensor_batch=inputs[0], meta_info=inputs[1]),
    )


def _inputs(rows: int, rng: np.random.Generator) -> DataProto:
    from verl import DataProto

    cells: dict[str, list] = {key: [] for key in ("raw_prompt", "reward_model", "extra_info", "data_source", "uid")}
    for index in range(rows // SAMPLES_PER_PROMPT):
        left, right = (int(number) for number in rng.integers(1, 10_000, 2))
        question = f"What is {left} + {right}? Think step by step and put the answer in a box."
        row = {
            "raw_prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
            "extra_info": {
                "index": index,
                "split": "train",
                "question": question,
                "answer": str(left + right),
            },
            "data_source": "arithmetic",
            "uid": rng.bytes(16).hex(),
        }
        for key, value in row.items():
            cells[key].extend([value] * SAMPLES_PER_PROMPT)
    return DataProto(
        batch=None,
        non_tensor_batch={key: _objects(values) for key, values in cells.items()},
        meta_info={"global_steps": 1},
    )


def _images(rows: int, image_bytes: int, rng: np.random.Generator) -> list[dict[str, torch.Tensor]]:
    """The output of a processor for the image of each prompt: normalized pixels in patches."""
    if not image_bytes:
        return [{} for _ in range(rows)]
    patches = image_bytes // (4 * PATCH)
    cells = []
    for _ in range(rows // SAMPLES_PER_PROMPT):
        pixels = rng.integers(0, 256, (patches, PATCH), np.uint8).astype(np.float32) / np.float32(127.5) - 1
        grid = torch.tensor([[1, 1, patches]])
        for _ in range(SAMPLES_PER_PROMPT):
            cells.append({"pixel_values": torch.from_numpy(pixels.copy()), "image_grid_thw": grid.clone()})
    return cells


def _lengths(rng: np.random.Generator, count: int, median: float, sigma: float, width: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), sigma, count), 1, width).astype(np.int64)


def _tokens(rng: np.random.Generator, shape: tuple[int, int], text: str) -> np.ndarray:
    if text == "uniform":
        return rng.integers(0, PAD_TOKEN, shape)
    # Zipf-Mandelbrot over the vocabulary: an entropy of 10.4 bits per token, close to single tokens of byte-pair
    # encoded English and code. Frequent tokens have small ids, as merges are numbered by frequency. Tokens are
    # independent, so no phrases repeat, and real text compresses better than this.
    weights = 1.0 / (np.arange(PAD_TOKEN) + 2.7) ** 1.15
    cumulative = np.cumsum(weights / weights.sum())
    return np.searchsorted(cumulative, rng.random(shape)).clip(max=PAD_TOKEN - 1)


def _objects(values: list) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
