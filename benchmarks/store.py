"""Compares the store with verl's ``DataProto.save_to_disk`` and ``load_from_disk``: ``make bench``.

Both sides get the same batches in the same run. Each measurement runs in a fresh process, alternating between them. The
best of several samples counts, because noise only adds time; for loads, the median counts, because the cost of the
host's memory is not noise. Prints tables and writes everything to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.batches import IMAGES, SIZES, BatchSize, make_batch, save_raw
from benchmarks.page import write_page

logger = logging.getLogger("benchmarks")

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "store.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
TEXTS = ("zipf", "uniform")
PARTS = (1, 8)
ENTRIES = (10, 1_000, 10_000)


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rollout-skip-bench-", dir=arguments.folder) as name:
        folder = Path(name)
        machine = report.machine(folder)
        batches = [
            _compare(folder, SIZES[size], text, arguments.repeats if text == TEXTS[0] and size != IMAGES else 1)
            for size in arguments.sizes
            for text in (arguments.texts if size != IMAGES else TEXTS[:1])
        ]
        largest = SIZES[[size for size in arguments.sizes if size != IMAGES][-1]]
        parts = [_parts(folder, largest, number) for number in PARTS]
        lock = _interpreter_lock(folder, largest)
        growth = [_growth(folder, entries) for entries in ENTRIES]
    result = {
        "machine": machine,
        "repeats": arguments.repeats,
        "seconds": round(time.perf_counter() - started, 1),
        "batches": batches,
        "goals": report.goals(batches),
        "parts": {"size": largest.name, "entries": parts},
        "interpreter_lock": lock,
        "growth": growth,
    }
    print(report.text(result))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nwritten to {arguments.output}")
    if arguments.page:
        write_page(PAGE, result)
        print(f"and into {PAGE}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="size S only, once; no file without --output")
    parser.add_argument(
        "--repeats", type=int, help="samples per measurement (default: 3; uniform text and images once)"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: S M images")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS[:1], help="default: zipf")
    parser.add_argument("--page", action="store_true", help=f"write the tables into {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("--folder", type=Path, help="folder for the dumps (default: the system's temporary folder)")
    parser.add_argument("--output", type=Path, help=f"the JSON file (default: {RESULTS.relative_to(HERE.parent)})")
    arguments = parser.parse_args()
    if arguments.output is None and not arguments.quick:
        arguments.output = RESULTS
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 3)
    arguments.sizes = arguments.sizes or (["S"] if arguments.quick else ["S", "M", IMAGES])
    if arguments.sizes == [IMAGES] or (arguments.page and not {"M", IMAGES} <= {*arguments.sizes}):
        parser.error(f"--sizes needs a size without images; --page needs M and {IMAGES}")
    return arguments


def _compare(folder: Path, size: BatchSize, text: str, repeats: int) -> dict[str, Any]:
    name = f"{size.name} {text}"
    logger.info("%s: creating the batch", name)
    raw = folder / "raw"
    output, inputs = make_batch(size, text)
    save_raw(raw, output, inputs)
    described = {
        "size": size.name,
        "text": text,
        "rows": size.rows,
        "prompt_width": size.prompt_width,
        "response_width": size.response_width,
        "raw_bytes": sum(tensor.nbytes for tensor in output.batch.values()),
        "image_bytes": size.rows * size.image_bytes,
        "tokens": int(output.batch["attention_mask"].sum()),
    }
    del output, inputs
    os.sync()  # otherwise the measured dumps would wait for these files
    samples: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for probe in ("ours_dump", "upstream_dump", "ours_load", "upstream_load", "ours_miss", "ours_hits"):
            arguments: dict[str, Any] = {"folder": str(folder), "raw": str(raw)}
            if probe.endswith("_load"):
                arguments["compare"] = repeat == 0
            samples.setdefault(probe, []).append(_run(probe, arguments, f"{name}, {repeat + 1} of {repeats}"))
    (folder / "batch.pkl").unlink()
    shutil.rmtree(folder / "store")
    shutil.rmtree(folder / "training")
    shutil.rmtree(raw)
    return report.summary(described, samples)


def _parts(folder: Path, size: BatchSize, parts: int) -> dict[str, Any]:
    with _raw(folder, size) as raw:
        arguments = {"folder": str(folder), "raw": str(raw), "parts": parts}
        return {"parts": parts, **_run("ours_parts", arguments, f"{size.name} in {parts} parts")}


def _interpreter_lock(folder: Path, size: BatchSize) -> dict[str, Any]:
    with _raw(folder, size) as raw:
        results = {
            name: _run(
                "interpreter_lock",
                {"folder": str(folder), "raw": str(raw), "busy": name == "busy"},
                f"main thread {name}",
            )
            for name in ("sleeping", "busy")
        }
    return {"size": size.name, **results}


@contextmanager
def _raw(folder: Path, size: BatchSize) -> Iterator[Path]:
    """A batch on disk, for processes that dump it."""
    raw = folder / "raw"
    save_raw(raw, *make_batch(size))
    os.sync()
    yield raw
    shutil.rmtree(folder / "store")
    shutil.rmtree(raw)


def _growth(folder: Path, entries: int) -> dict[str, Any]:
    result = {"entries": entries, **_run("growth", {"folder": str(folder), "entries": entries}, f"{entries} entries")}
    shutil.rmtree(folder / "store")
    return result


def _run(probe: str, arguments: dict[str, Any], label: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.probes", probe, json.dumps(arguments)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{label}: {probe} failed\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seconds = result.get("seconds")
    logger.info("%s: %s%s", label, probe.replace("_", " "), "" if seconds is None else f" {seconds:.3f} s")
    return result


if __name__ == "__main__":
    main()
