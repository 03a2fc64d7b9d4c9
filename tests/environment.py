"""Real environments for integration tests: other processes, small and read-only disks, an S3 server.

Nothing here is a mock. If the machine does not allow mounting, tests are not skipped: the disks fail for another real
reason (a limit on file sizes, another user).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks import Disk, mount
from verl_rollout_skip.store import names
from verl_rollout_skip.store.storage import Staged
from verl_rollout_skip.store.storage.local import LocalStorage

ROOT = Path(__file__).resolve().parents[1]

Report = Callable[[str], None]


def leftovers(folder: Path) -> list[Path]:
    """Temporary files, and parts that no record lists. Files that were set aside do not count."""
    kept = {path for path in folder.rglob("*.json") if names.parse_record(path.name) is not None}
    listed = {path.with_name(part["file"]) for path in kept for part in parts_of(path)}
    return sorted(
        path for path in folder.rglob("*") if path.name[:1] == "." or (path.suffix == ".parquet" and path not in listed)
    )


def parts_of(record: Path) -> list[dict[str, Any]]:
    """The parts that a record lists; empty if it is damaged."""
    try:
        return json.loads(record.read_bytes())["parts"]
    except (ValueError, KeyError, TypeError):
        return []


class Forked:
    """A child process that runs a function and reports lines. It can be killed at any time."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._reports, sender = os.pipe()
        self._text = b""
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run_child(sender, work, arguments)
        os.close(sender)

    def wait_for(self, line: str) -> None:
        """Wait until the child has reported this line."""
        while f"{line}\n".encode() not in self._text:
            piece = os.read(self._reports, 1 << 16)
            assert piece, f"the child ended before it reported {line!r}: {self._text.decode()}"
            self._text += piece

    def kill(self) -> list[str]:
        """Send SIGKILL and return all lines that the child reported."""
        os.kill(self.pid, signal.SIGKILL)
        return self.lines()

    def lines(self) -> list[str]:
        """All lines that the child reports until it ends."""
        if self._reports >= 0:
            while piece := os.read(self._reports, 1 << 16):
                self._text += piece
            os.close(self._reports)
            self._reports = -1
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._text.decode().splitlines()

    @property
    def exit_code(self) -> int:
        """The exit code as in ``subprocess``: negative if a signal ended the child."""
        self.lines()
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def end(self) -> None:
        if self._status is None:
            self.kill()

    def _run_child(self, sender: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        code = 1
        try:
            os.close(self._reports)
            work(lambda line: os.write(sender, f"{line}\n".encode()), *arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)


@pytest.fixture
def fork() -> Iterator[Callable[..., Forked]]:
    """Start ``work(report, *arguments)`` in a forked process, which does not have to import torch and verl again."""
    children: list[Forked] = []

    def start(work: Callable[..., None], *arguments: Any) -> Forked:
        children.append(Forked(work, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.end()


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a script in a new interpreter."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Disk]]:
    """A tmpfs of this size, or, if mounting is not permitted, a folder with a limit on file sizes."""
    mounted: list[Path] = []

    def make(size: int, options: str = "") -> Disk:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        if mount("-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(path)):
            mounted.append(path)
            return Disk(path, size, mounted=True)
        disk = Disk(path, size, mounted=False)
        _refuse_more_than(disk, monkeypatch)
        return disk

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], bool]]:
    """Make a folder read-only with a mount, which also affects root. Returns False if mounting is not permitted."""
    mounted: list[Path] = []

    def make(path: Path) -> bool:
        if not mount("--bind", str(path), str(path)):
            return False
        mounted.append(path)
        return mount("-o", "remount,ro,bind", str(path))

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server (moto in its own process)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
                break
            assert server.poll() is None, "the S3 server ended"
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="session")
def s3_options(s3_server: str) -> dict[str, Any]:
    """``storage_options`` for that server."""
    return {
        "key": "test",
        "secret": "test",
        "endpoint_url": s3_server,
        "client_kwargs": {"region_name": "eu-west-1"},
    }


def _refuse_more_than(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LocalStorage.publish

    def publish_if_it_fits(storage: LocalStorage, staged: Staged, name: str, replace: bool = False) -> None:
        staged.measure()
        if disk.free() < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        publish(storage, staged, name, replace)

    monkeypatch.setattr(LocalStorage, "publish", publish_if_it_fits)
