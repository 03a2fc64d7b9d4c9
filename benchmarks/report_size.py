"""Measures the report of a long recording: 100 steps with 2,048 responses, 1,024 + 8,192 tokens wide.

``python -m benchmarks.report_size`` records it (2.4 GB in a temporary folder; a few batches under many keys), writes
the report in a fresh process, and prints time, memory and size. The limits are 60 s and 2 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.batches import SIZES, VOCABULARY, make_batch
from verl_rollout_skip import RolloutKey, RolloutStore

LIMIT_S = 60.0
LIMIT_BYTES = 2 * 10**9
_BATCHES = 4
# Not getrusage, because its peak memory of a child includes that of the parent before the fork.
_COMMAND = """
import sys
from verl_rollout_skip.cli import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", default="M", choices=sorted(SIZES))
    parser.add_argument("--folder", type=Path, help="the recording of an earlier run, or where to create it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-skip-report-") as temporary:
        folder = arguments.folder or Path(temporary)
        if not folder.exists() or not any(folder.iterdir()):
            record(folder, arguments.steps, arguments.size)
        measured = measure(folder, Path(temporary, "report.html"))
    print(json.dumps(measured, indent=2))
    if measured["seconds"] > LIMIT_S or measured["memory_bytes"] > LIMIT_BYTES:
        sys.exit(f"more than {LIMIT_S:.0f} s or {LIMIT_BYTES / 1e9:.0f} GB")


def record(folder: Path, steps: int, size: str) -> None:
    """Record this many steps, and a tokenizer with a vocabulary of the same size."""
    batches = [make_batch(SIZES[size], seed=seed) for seed in range(_BATCHES)]
    with RolloutStore(folder) as store:
        for step in range(1, steps + 1):
            output, inputs = batches[step % _BATCHES]
            store.put(RolloutKey(step), output, inputs=inputs, info={"generate_s": 41.5})
    (folder / "tokenizer").mkdir()
    make_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))


def make_tokenizer() -> Tokenizer:
    """A tokenizer with random words: frequent ones are shorter, and some are parts of characters."""
    rng = np.random.default_rng(0)
    words = dict.fromkeys(sorted(ByteLevel.alphabet()))
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzĠĠ" * 6 + "é"))
    while len(words) < VOCABULARY:
        words["".join(rng.choice(letters, min(9, 4 + len(words) // 20_000)))] = None
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure(folder: Path, output: Path) -> dict[str, float]:
    """Write the report in a new process, which prints its peak memory at the end."""
    command = [sys.executable, "-c", _COMMAND, "report", str(folder), "-o", str(output), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = json.loads(done.stdout)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "memory_bytes": int(done.stderr.split()[-2]) * 1024,
        "report_bytes": output.stat().st_size,
        "recorded_bytes": sum(file.stat().st_size for file in folder.rglob("*.parquet")),
        "responses": printed["rows"],
        "shown_groups": printed["shown_groups"],
        "shown_responses": printed["shown_responses"],
        "left_out": printed["left_out"],
    }


if __name__ == "__main__":
    main()
