"""Starts zygotes as they are needed, and processes through them."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.zygote import launcher

logger = logging.getLogger(__name__)

SWITCH = "ROLLOUT_SKIP_TESTS_ZYGOTE"
START_TIMEOUT = 120
MOST_ZYGOTES = 3
ROOT = Path(__file__).resolve().parents[2]


class ForkedProcess:
    """A process forked by a zygote, with the methods of ``subprocess.Popen`` that a test needs.

    It ends with the process that started it.
    """

    def __init__(self, args: list[str], pid: int, connection: socket.socket) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            # A timeout of 0 would make the socket non-blocking, which raises another error.
            self._connection.settimeout(timeout if timeout is None else max(timeout, 1e-3))
            try:
                status = launcher.STATUS.unpack(launcher.receive_exactly(self._connection, launcher.STATUS.size))[0]
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            except OSError:
                status = int(signal.SIGKILL)  # the zygote is gone, and its children with it
            self._connection.close()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._connection.sendall(bytes([number]))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = ForkedProcess | subprocess.Popen[bytes]


class Zygote:
    """A running zygote, and the folder with its socket, its log and its stand-in for Python."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zygote-"))
        self.python = self.folder / "python"
        self.python.write_text(f"#!{sys.executable} -SEs\n" + Path(launcher.__file__).read_text())
        self.python.chmod(0o755)
        with open(self.folder / "output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote.server", str(self.folder)],
                cwd=ROOT,
                # Its background thread would forbid to fork; without it pyarrow's allocator tidies up while in use.
                env={**env, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not (self.folder / "socket").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                output = (self.folder / "output").read_text()
                self.close()
                raise RuntimeError(
                    f"the zygote ended or was not ready within {START_TIMEOUT} s; {SWITCH}=0 does without:\n{output}"
                )
            time.sleep(0.05)

    def ask(self, request: dict[str, Any], streams: list[int]) -> tuple[dict[str, Any], socket.socket]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.folder / "socket"))
        return launcher.ask(connection, request, streams), connection

    def close(self) -> None:
        """End the zygote and with it all processes that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_zygotes: list[Zygote] = []


def close_all() -> None:
    while _zygotes:
        _zygotes.pop().close()


def enabled() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def run(
    module: str,
    argv: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: IO[bytes],
    stderr: IO[bytes] | None = None,
) -> Process:
    """Start ``python -m module argv`` in a session of its own; without ``stderr`` errors go to ``stdout``.

    If it starts Ray, the workers are forked too. A process that no zygote can start rightly is started plainly.
    """
    args = ["-m", module, *argv]
    own_env = dict(os.environ if env is None else env)
    folder = os.path.abspath(cwd or os.getcwd())
    with open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), stdout.fileno(), (stderr or stdout).fileno()]
        process = _fork(args, own_env, folder, streams) if enabled() else None
        return process or _plain(args, own_env, folder, streams)


def _plain(args: list[str], env: Mapping[str, str], cwd: str, streams: list[int]) -> Process:
    stdin, stdout, stderr = streams
    command = [sys.executable, *args]
    return subprocess.Popen(
        command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def _fork(args: list[str], env: dict[str, str], cwd: str, streams: list[int]) -> ForkedProcess | None:
    """Ask the zygotes in turn, then a new one; nothing if none can help."""
    request = {**launcher.this_process(), "argv": args, "env": env, "cwd": cwd}
    answer: dict[str, Any] = {}
    for number in range(MOST_ZYGOTES):
        if number == len(_zygotes):
            _start(env)
        answer, connection = _zygotes[number].ask(request, streams)
        if "pid" in answer:
            return ForkedProcess([sys.executable, *args], answer["pid"], connection)
        connection.close()
        if not answer["another_zygote_may_help"]:
            break
    logger.warning("python %s is started without a zygote: %s", " ".join(args[:2]), answer["declined"])
    return None


def _start(env: Mapping[str, str]) -> None:
    if not _zygotes:
        atexit.register(close_all)
    _zygotes.append(Zygote(env))


def ready(env: Mapping[str, str] | None = None) -> Zygote:
    """The first zygote, started for this environment if there is none yet."""
    if not _zygotes:
        _start(dict(os.environ if env is None else env))
    return _zygotes[0]
