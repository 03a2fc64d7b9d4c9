"""``make demo`` as a user runs it: its output, the commands it prints, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.training import ROOT, TIMEOUT

pytestmark = pytest.mark.slow


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recipes.demo", "--folder", str(folder), "--only", "v1", *options]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True)


def test_the_demo_shows_the_saved_time_and_its_three_commands_work_when_pasted(tmp_path: Path) -> None:
    output, _ = start_demo(tmp_path, "--steps", "2").communicate(timeout=TIMEOUT)
    assert "1/2 V1 record: starting Ray, the workers and the inference engine\n" in output
    assert "2/2 V1 replay: starting Ray and the workers, no inference engine\n" in output
    rows = [line.split() for line in output.splitlines()]
    assert next(row for row in rows if row[:2] == ["V1", "record"])[2] == "yes"
    replay = next(row for row in rows if row[:1] == ["replay"])
    assert (replay[1], replay[-1]) == ("no", "yes")
    assert len(next(row for row in rows if row[:1] == ["saving"])) == 5
    table = output.split("2/2 V1 replay: 2 steps")[1].split("List the recordings")[0]
    assert max(map(len, table.splitlines())) <= 80

    commands = [line for line in output.splitlines() if line.startswith("  ") and "rollout-skip" in line]
    listed, report, resumed = (
        subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True) for command in commands
    )
    assert listed.returncode == 0, listed.stderr
    assert "v1_cpu_TrainGBS8__InferGBS8__N4" in listed.stdout
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "4 rollout steps: 2 loaded" in resumed.stdout + resumed.stderr


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + TIMEOUT
    while not any("ray::TaskRunner" in name(process) for process in seen.values()):
        assert demo.poll() is None
        assert time.monotonic() < deadline
        seen.update({process.pid: process for process in psutil.Process(demo.pid).children(recursive=True)})
        time.sleep(0.2)

    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert f"its files are in {tmp_path}" in output
    assert len(seen) > 5
    assert [process for process in seen.values() if is_alive(process)] == []


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs. A zombie has ended, even if init has not reaped it yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
