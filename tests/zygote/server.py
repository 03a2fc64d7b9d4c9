"""The zygote: imports the heavy libraries once, then forks a child for each request that arrives at its socket.

Only general libraries are imported here. Ray keeps settings and random state in its C++ library from the moment it is
loaded, and verl reads its platform from the environment; both, and the code under test, are imported by the children.
The zygote declines whatever it could not start exactly as a new Python process would be; the asker then starts one.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.zygote.child import become, die_with_parent
from tests.zygote.environment import EnvironmentReads
from tests.zygote.launcher import LENGTH, STATUS, receive_exactly, send

logger = logging.getLogger("zygote")

# What verl, Ray's workers and their models import, without the packages that import Ray or verl themselves.
LIBRARIES = (
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "pyarrow.dataset",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
    "tensordict",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bloom.modeling_bloom",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer_pt_utils",
    "peft",
    "datasets",
    "hydra",
    "omegaconf",
    "aiohttp",
    "cachetools",
    "codetiming",
    "fastapi",
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "msgspec",
    "requests",
    "uvicorn",
    "zmq",
)
REQUEST_TIMEOUT = 10
OWN = [name for name in sys.modules if name.partition(".")[0] == "tests"]
STATEFUL = ("ray", "verl", "verl_rollout_skip", "grpc")


@dataclass(frozen=True)
class Refusal:
    """Why a process is not forked here."""

    reason: str
    another_zygote_may_help: bool = False


@dataclass(frozen=True)
class Request:
    """A process to start: as received from the asker, with its standard streams."""

    message: dict[str, Any]
    streams: list[int]


def preload() -> EnvironmentReads:
    """Import the libraries that are installed; return which environment variables they looked at."""
    reads = EnvironmentReads(os.environ)
    with reads, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                logger.warning("%s is not preloaded: %s", name, error)
    return reads


def check_forkable() -> None:
    """A process may only be forked at any time if nothing in it works on its own or is shared with its children."""
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        raise RuntimeError(
            f"the preloaded libraries started threads, so that a fork is not safe: {threads}. "
            f"OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS')}; with 1 the numerical libraries start none."
        )
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if line.split()[1][3] == "s" and "w" in line.split()[1]]
    if shared:
        raise RuntimeError(f"the preloaded libraries share memory with future children: {shared}")
    stateful = [name for name in STATEFUL if name in sys.modules]
    if stateful:
        raise RuntimeError(f"the preloaded libraries imported {stateful}, which must be imported after the fork")


class Zygote:
    """Serves requests one after the other and tells each asker how its child ended."""

    def __init__(self, listener: socket.socket, reads: EnvironmentReads) -> None:
        self.listener = listener
        self.reads = reads
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[int, socket.socket]] = {}

    def serve(self, lifeline: int) -> Request | None:
        """Serve until the lifeline closes, then return nothing; in each forked child, return its request."""
        self.selector.register(lifeline, selectors.EVENT_READ, "lifeline")
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")
        while True:
            for key, _ in self.selector.select():
                if key.data == "lifeline":
                    return None
                if key.data == "listener":
                    request = self.accept()
                    if request is not None:
                        return request
                elif key.fileobj in self.children:
                    self.report(key.fd)
                else:
                    self.listen_to_asker(key.data, key.fileobj)  # type: ignore[arg-type]

    def accept(self) -> Request | None:
        """Answer one request; returns it in the child, and nothing in the zygote."""
        connection, _ = self.listener.accept()
        try:
            connection.settimeout(REQUEST_TIMEOUT)
            request = read_request(connection)
            connection.settimeout(None)
            refusal = reason_to_decline(request.message, self.reads)
            if refusal:
                self.decline(connection, request, refusal)
                return None
        except OSError as error:
            logger.warning("the asker left during its request: %s", error)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self.leave_to_parent(connection)
            return request
        close(request.streams)
        self.watch(pid, connection)
        try:
            send(connection, {"pid": pid})
        except OSError as error:
            logger.warning("the asker left before process %s was started: %s", pid, error)
        return None

    def decline(self, connection: socket.socket, request: Request, refusal: Refusal) -> None:
        close(request.streams)
        logger.info("declined %s: %s", request.message["argv"][:2], refusal.reason)
        send(connection, {"declined": refusal.reason, "another_zygote_may_help": refusal.another_zygote_may_help})
        connection.close()

    def watch(self, pid: int, connection: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, connection)
        self.selector.register(pidfd, selectors.EVENT_READ, pidfd)
        self.selector.register(connection, selectors.EVENT_READ, pidfd)

    def listen_to_asker(self, pidfd: int, connection: socket.socket) -> None:
        """An asker sends signals for its child; an asker that ends takes its child with it."""
        if self.children.get(pidfd, (0, None))[1] is not connection:
            return  # that child was reported a moment ago
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        if not signals:
            self.selector.unregister(connection)
        for number in signals or [signal.SIGKILL]:
            signal.pidfd_send_signal(pidfd, number)

    def report(self, pidfd: int) -> None:
        """Tell the asker how its child ended."""
        pid, connection = self.children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        try:
            self.selector.unregister(connection)
        except KeyError:
            pass  # the asker ended first
        try:
            connection.sendall(STATUS.pack(status))
        except OSError:
            pass
        connection.close()

    def leave_to_parent(self, connection: socket.socket) -> None:
        """In a child: close all that belongs to the zygote."""
        connection.close()
        for pidfd, (_, other) in self.children.items():
            os.close(pidfd)
            other.close()
        self.children.clear()
        self.selector.close()
        self.listener.close()


def read_request(connection: socket.socket) -> Request:
    streams = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    header += receive_exactly(connection, LENGTH.size - len(header))
    message = json.loads(receive_exactly(connection, LENGTH.unpack(header)[0]))
    return Request(message, list(streams))


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def reason_to_decline(message: dict[str, Any], reads: EnvironmentReads) -> Refusal | None:
    """Why this process cannot be forked here and still be what a new Python process would be; nothing if it can."""
    argv = message["argv"]
    if not (argv[:1] == ["-m"] and len(argv) > 1) and not (argv and argv[0].endswith(".py")):
        return Refusal(f"python {' '.join(argv[:2])} is neither a script nor a module")
    changed = reads.difference(message["env"])
    if changed:
        values = ", ".join(f"{n}={message['env'].get(n)!r} instead of {reads.before.get(n)!r}" for n in changed)
        return Refusal(f"the imports depend on environment variables that differ: {values}", True)
    shadow = shadowing_file(folders_first_on_path(message))
    return Refusal(f"a new process would import {shadow} and not the preloaded module") if shadow else None


def shadowing_file(folders: list[str]) -> Path | None:
    """A module of a preloaded name, or one that Python runs by itself at the start, in one of the folders."""
    loaded = {name.partition(".")[0] for name in sys.modules if name not in OWN} | {"sitecustomize", "usercustomize"}
    for folder in folders:
        for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path = Path(folder, entry)
            is_module = path.suffix in {".py", ".so"} or (path / "__init__.py").exists()
            if entry.partition(".")[0] in loaded and is_module:
                return path
    return None


def folders_first_on_path(message: dict[str, Any]) -> list[str]:
    """What Python puts on ``sys.path`` before its own folders: that of the script or the current one, PYTHONPATH."""
    argv, cwd = message["argv"], message["cwd"]
    first = cwd if argv[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[0])))
    extra = message["env"].get("PYTHONPATH")
    return [first, *(os.path.join(cwd, entry) for entry in (extra.split(os.pathsep) if extra else []))]


def library_path() -> list[str]:
    """``sys.path`` without what each process puts before the libraries for itself."""
    own = {os.getcwd(), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)}
    return [entry for entry in sys.path if entry not in own]


def main(folder: Path) -> None:
    handler = logging.FileHandler(folder / "log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    sys.path[:] = library_path()
    reads = preload()
    check_forkable()
    # Out of the garbage collector's sight, the imported objects stay on pages that all children share.
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "starting"))
    listener.listen(128)
    os.rename(folder / "starting", folder / "socket")
    zygote = os.getpid()
    request = Zygote(listener, reads).serve(lifeline=0)
    if request is None:
        os._exit(0)  # takes all children along
    die_with_parent(zygote)
    handler.close()
    logger.handlers.clear()
    sys_path = [*folders_first_on_path(request.message), *sys.path]
    become(request.message, request.streams, sys_path, reads.completed(request.message["env"]), str(folder / "python"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
