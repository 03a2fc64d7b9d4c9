"""scripts/pip_install.sh, which ``make`` uses to set up environments: one line per success and per failure."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disks import Disk

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "pip_install.sh"


def install(venv: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with these arguments and no other package index."""
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "1", "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(
        [str(SCRIPT), str(venv), "what is installed", *arguments],
        env={**os.environ, "PYTHON": sys.executable, **alone, **variables},
        capture_output=True,
        text=True,
    )


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An existing environment."""
    program(tmp_path / "venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    return tmp_path / "venv"


def test_an_installation_prints_one_line_and_logs_pips_output(venv: Path) -> None:
    done = install(venv, "pip", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"==> what is installed +\d+ s\n", done.stdout)
    assert done.stderr == ""
    assert "Requirement already satisfied: pip" in (venv / "setup.log").read_text()


def test_an_unsupported_python_is_an_error_that_names_a_supported_one(tmp_path: Path) -> None:
    old = program(tmp_path / "python", "[ \"$1\" = --version ] && echo 'Python 3.9.18'")
    known = program(tmp_path / "bin" / "python3.11", f'exec {sys.executable} "$@"')
    done = install(tmp_path / "venv", "pip", PYTHON=str(old), PATH=f"{known.parent}{os.pathsep}/usr/bin:/bin")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"setup failed: Python 3.10, 3.11 or 3.12 is needed; {old}: Python 3.9.18. Use (\S+): make PYTHON=\1\n",
        done.stderr,
    )
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_a_one_line_error(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "bash", 'exec /bin/bash "$@"')
    done = install(tmp_path / "venv", "pip", PYTHON="python3", PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert "python3: not found. Install one, then: make PYTHON=/path/to/python" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_network_is_a_one_line_error(venv: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        index = f"127.0.0.1:{unused.getsockname()[1]}/simple"
        done = install(venv, "a-package-from-the-index", PIP_INDEX_URL=f"http://me:password@{index}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup failed: pip cannot reach its package index http://{index}.")
    assert len(done.stderr.splitlines()) == 1
    assert "a-package-from-the-index" in (venv / "setup.log").read_text()


def test_a_full_disk_is_a_one_line_error(tmp_path: Path, small_disk: Callable[..., Disk]) -> None:
    disk = small_disk(4_000_000)
    if disk.mounted:
        done = install(disk.path / "venv", "pip", PIP_NO_INDEX="1")
    else:  # a device that is always full
        program(tmp_path / "venv" / "bin" / "python", '[ "$3" = --version ] || cat /dev/zero >/dev/full')
        done = install(tmp_path / "venv", "pip")
    assert done.returncode == 1
    assert done.stderr.startswith("setup failed: the disk is full (")
    assert "about 3 GB are needed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_any_other_failure_shows_the_end_of_pips_output(venv: Path) -> None:
    done = install(venv, "no-such-package", PIP_NO_INDEX="1")
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert "ERROR: No matching distribution found for no-such-package" in shown
    assert last == f"setup failed: the lines above are the end of pip's output; {venv}/setup.log has all of it"
