"""``make tour``: a tour of the rollout store. Records, replays, kills a writer, damages a file, queries with SQL.

It needs no GPU and no model: the batches are synthetic, with the shape and size of those of verl's agent loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np

from benchmarks.batches import SIZES, make_batch
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import CorruptEntryError, RolloutSkipError
from verl_rollout_skip.store.sizes import format_size

if TYPE_CHECKING:
    from verl import DataProto

SIZE = SIZES["S"]
FIRST_KILLED_STEP = 101


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the dumps (default: a new temporary folder)")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_until_killed(arguments.folder)
        return
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="rollout-skip-demo-"))
    # Started now because imports take seconds; it waits for a line on stdin before it writes.
    command = [sys.executable, "-m", "recipes.store_tour", "--folder", str(folder), "--write"]
    writer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        batch = record(folder)
        replay(folder, batch)
        kill_a_writer(folder, writer)
        damage(folder)
        query(folder)
    finally:
        writer.kill()
        writer.wait()
    print(f"\nThe dumps are in {folder}: open them with DuckDB, pandas, polars or datasets, or delete the folder.")


def record(folder: Path) -> DataProto:
    title(f"Record three rollout steps of {SIZE.rows} trajectories in the background")
    print(f"{'step':>6}{'in memory':>14}{'put() took':>14}{'on disk':>12}{'smaller':>10}")
    rows = []
    with RolloutStore(folder) as store:
        for step in (1, 2, 3):
            batch, inputs = make_batch(SIZE, seed=step)
            raw = sum(tensor.nbytes for tensor in batch.batch.values())
            started = time.perf_counter()
            store.put(RolloutKey(step), batch, inputs=inputs, info={"note": "synthetic"})
            rows.append((step, raw, time.perf_counter() - started))
        store.flush()
        for step, raw, seconds in rows:
            size = store.record(RolloutKey(step)).bytes
            took = f"{seconds * 1e3:.1f} ms"
            print(f"{step:>6}{format_size(raw):>14}{took:>14}{format_size(size):>12}{raw / size:>9.0f}×")
    print("The training thread only waits for put(); encoding, checksums and fsync happen on another thread.")
    return batch


def replay(folder: Path, expected: DataProto) -> None:
    title("Load step 3 again and compare every bit")
    store = RolloutStore(folder)
    started = time.perf_counter()
    loaded = store.get(RolloutKey(3))
    seconds = time.perf_counter() - started
    for key, tensor in expected.batch.items():
        found = loaded.batch[key]
        same = found.dtype == tensor.dtype and found.shape == tensor.shape
        same = same and np.array_equal(found.numpy().view(np.uint8), tensor.numpy().view(np.uint8))
        print(f"  {key:20}{tuple(tensor.shape)!s:>14}  {tensor.dtype!s:14}{'identical' if same else 'DIFFERENT'}")
        if not same:
            sys.exit("The loaded batch is not the recorded one. That is a bug: please report it.")
    print(f"Loaded in {seconds * 1e3:.0f} ms as a {type(loaded).__name__}, after its digest was checked.")
    print(f"The input of the step is recorded too: {', '.join(store.inputs(RolloutKey(3)).non_tensor_batch)}")


def write_until_killed(folder: Path) -> None:
    """Runs in the child process: wait for the start signal, then write steps as fast as possible."""
    batch, inputs = make_batch(SIZE, seed=9)
    store = RolloutStore(folder, background=False)
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(FIRST_KILLED_STEP, FIRST_KILLED_STEP + 1000):
        store.put(RolloutKey(step), batch, inputs=inputs)


def kill_a_writer(folder: Path, writer: subprocess.Popen[str]) -> None:
    title("Kill a process (SIGKILL) while it commits an entry")
    assert writer.stdin is not None
    assert writer.stdout is not None
    if writer.stdout.readline() != "ready\n":
        sys.exit("The writing process did not start.")
    writer.stdin.write("go\n")
    writer.stdin.flush()
    store = RolloutStore(folder)
    while RolloutKey(FIRST_KILLED_STEP + 1) not in store:
        time.sleep(0.005)
    while not (unfinished := list(folder.glob("step_*/.*"))):
        pass
    writer.kill()
    writer.wait()
    left = [path for path in folder.glob("step_*/.*") if path in unfinished]
    print(f"Killed process {writer.pid}; leftover files: {', '.join(path.name for path in left) or 'none'}")
    keys = store.keys()
    for key in keys:
        store.verify(key)
    print(f"All {len(keys)} committed entries verify: steps {', '.join(str(key.step) for key in keys)}")
    print(f"prune() removed the leftovers of the killed process: {len(store.prune())} file(s)")
    for key in keys:
        if key.step >= FIRST_KILLED_STEP:
            store.delete(key)


def damage(folder: Path) -> None:
    title("Flip one bit in the file of step 2")
    path = next(folder.glob("step_000002/gen_000.*.parquet"))
    good = path.read_bytes()
    position = len(good) // 2
    path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
    try:
        RolloutStore(folder).get(RolloutKey(2))
        sys.exit("The damage was not detected. That is a bug: please report it.")
    except CorruptEntryError as error:
        print(f"{type(error).__name__}: {error}")
    path.write_bytes(good)
    RolloutStore(folder).verify(RolloutKey(2))
    print("The bit was restored, and the entry verifies again.")


def query(folder: Path) -> None:
    title("Query the dumps with SQL, which needs neither verl nor this package")
    sql = f"""
        SELECT regexp_extract(filename, 'step_0*([0-9]+)', 1) AS step, count(*) AS trajectories,
               round(avg(skip__score), 3) AS score, avg(skip__response_length)::INT AS tokens,
               round(avg(list_avg(rollout_log_probs)), 3) AS log_prob
        FROM read_parquet('{folder}/step_*/gen_*.parquet', filename = true)
        GROUP BY step ORDER BY step"""
    print(sql, "\n")
    duckdb.sql(sql).show()
    sql = f"""
        SELECT in__reward_model->>'ground_truth' AS answer, skip__score, skip__response_length, responses[1:4] AS tokens
        FROM '{folder}/step_000001/gen_000.*.parquet' ORDER BY skip__response_length DESC LIMIT 3"""
    print(sql, "\n")
    duckdb.sql(sql).show()


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except RolloutSkipError as error:
        sys.exit(f"{type(error).__name__}: {error}")
