"""Exports recorded rollouts as text: JSONL as verl dumps its generations, Parquet, or a Hugging Face dataset.

Each file gets its name only when it is complete. Existing files are kept unless ``overwrite`` is set, and a folder is
replaced only if it is a dataset itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.store.new_files import new_file, put_folder
from verl_rollout_skip.tools.decoding import TextDecoder
from verl_rollout_skip.tools.trajectories import Trajectory, json_value

Rollouts = Iterable[tuple[RolloutKey, Iterable[Trajectory]]]
"""Entries in key order."""

_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("gen_batch", pa.int64()),
        ("row", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("score", pa.float64()),
        ("ground_truth", pa.string()),
        ("data_source", pa.string()),
        ("messages", pa.string()),
        ("reward_extra", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("response_tokens", pa.list_(pa.int32())),
    ]
)
_DATASET_FILES = ("dataset_info.json", "state.json")


class Format(str, Enum):
    """The export format."""

    JSONL = "jsonl"
    """A folder with one file per step, like verl's ``trainer.rollout_data_dir``."""
    PARQUET = "parquet"
    """One Parquet file with all steps."""
    DATASET = "dataset"
    """A folder that ``datasets.load_from_disk`` opens."""


def export(rollouts: Rollouts, decoder: TextDecoder, form: Format, out: Path, overwrite: bool = False) -> list[Path]:
    """Write the rollouts; return the created files or folder."""
    if form is Format.JSONL:
        return _export_jsonl(rollouts, decoder, out, overwrite)
    if form is Format.PARQUET:
        with _new_file(out, overwrite) as file:
            _write_parquet(rollouts, decoder, file)
        return [out]
    _export_dataset(rollouts, decoder, out, overwrite)
    return [out]


def _export_jsonl(rollouts: Rollouts, decoder: TextDecoder, out: Path, overwrite: bool) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for step, batches in _by_step(rollouts):
        path = out / f"{step}.jsonl"
        with _new_file(path, overwrite) as file, open(file, "w", encoding="utf-8", errors="replace") as lines:
            for key, trajectories in batches:
                for trajectory in trajectories:
                    lines.write(_json(_generation(key, trajectory, decoder)) + "\n")
        made.append(path)
    return made


def _generation(key: RolloutKey, trajectory: Trajectory, decoder: TextDecoder) -> dict[str, Any]:
    """One line as verl's ``_dump_generations`` writes it, plus ``gen_batch`` from the second generation batch on."""
    fields = {
        "input": _text(decoder, trajectory.prompt),
        "output": _text(decoder, trajectory.response),
        "gts": trajectory.ground_truth,
        "score": trajectory.score,
        "step": key.step,
        **trajectory.reward_extra,
    }
    return {**fields, "gen_batch": key.gen_batch} if key.gen_batch else fields


def _write_parquet(rollouts: Rollouts, decoder: TextDecoder, file: Path) -> None:
    # pyarrow itself would query the file position, which a named pipe does not have.
    with open(file, "wb") as sink, pq.ParquetWriter(sink, _SCHEMA, compression="zstd") as writer:
        for key, trajectories in rollouts:
            rows = [_row(key, trajectory, decoder) for trajectory in trajectories]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))


def _row(key: RolloutKey, trajectory: Trajectory, decoder: TextDecoder) -> dict[str, Any]:
    truth, source = trajectory.ground_truth, trajectory.data_source
    fields = {
        "step": key.step,
        "gen_batch": key.gen_batch,
        "row": trajectory.row,
        "prompt": _text(decoder, trajectory.prompt),
        "response": _text(decoder, trajectory.response),
        "score": trajectory.score,
        "ground_truth": truth if truth is None or isinstance(truth, str) else _json(truth),
        "data_source": None if source is None else str(source),
        "messages": None if trajectory.messages is None else _json(trajectory.messages),
        "reward_extra": _json(trajectory.reward_extra),
        "prompt_tokens": trajectory.prompt,
        "response_tokens": trajectory.response,
    }
    # Half a surrogate pair has no UTF-8 encoding. It becomes a question mark, as in JSONL.
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _export_dataset(rollouts: Rollouts, decoder: TextDecoder, out: Path, overwrite: bool) -> None:
    try:
        from datasets import Dataset, disable_progress_bars
    except ImportError as error:
        raise StoreError(
            "A Hugging Face dataset needs the package datasets, which is not installed: pip install datasets, or use "
            "--format parquet, which load_dataset reads too."
        ) from error
    disable_progress_bars()
    _refuse_taken(out, overwrite)
    out = Path(os.path.realpath(out))
    if out.exists() and not _is_replaceable(out):
        raise StoreError(
            f"{out} was kept: only a Hugging Face dataset is replaced, and this folder has no "
            f"{' and '.join(_DATASET_FILES)}. Choose another path, or remove the folder yourself."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        file = Path(folder, "rows.parquet")
        _write_parquet(rollouts, decoder, file)
        dataset = Dataset.from_parquet(str(file), cache_dir=str(Path(folder, "cache")))
        dataset.save_to_disk(str(Path(folder, "made")))
        del dataset
        put_folder(Path(folder, "made"), out, backup=Path(folder, "replaced"))


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and (all((folder / name).is_file() for name in _DATASET_FILES) or not any(folder.iterdir()))


def _by_step(rollouts: Rollouts) -> Iterator[tuple[int, Iterator[tuple[RolloutKey, Iterable[Trajectory]]]]]:
    yield from itertools.groupby(rollouts, key=lambda rollout: rollout[0].step)


@contextlib.contextmanager
def _new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    _refuse_taken(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        yield file


def _refuse_taken(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise StoreError(f"{path} already exists and was kept. Choose another path, or replace it with --overwrite.")


def _text(decoder: TextDecoder, tokens: list[int] | None) -> str | None:
    return None if tokens is None else decoder.text(tokens, skip_special_tokens=True)


def _json(value: Any) -> str:
    return json.dumps(json_value(value), ensure_ascii=False, default=str)
