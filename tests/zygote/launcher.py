"""What Ray starts instead of Python: asks the zygote for a forked process and stands in for it until it ends.

Passes argv, environment, folder, limits and the three standard streams on; then signals one way and the exit status
the other. Without a zygote, or when it declines, this process becomes the plain Python process that was asked for.
Standard library only, and little of it: this runs once for every Ray worker.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def this_process() -> dict[str, Any]:
    """What a child started with fork and exec would inherit from this process, besides its open files."""
    umask = os.umask(0o77)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = int(file.read())
    return {
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom_score_adj": oom_score_adj,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    }


def ask(connection: socket.socket, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    """Send a request with open files; the answer holds the child's ``pid``, or why there is none (``declined``)."""
    body = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([LENGTH.pack(len(body))], rights)
    connection.sendall(body)
    return receive(connection)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    message: dict[str, Any] = json.loads(receive_exactly(connection, length))
    return message


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError(f"the connection ended after {len(parts)} of {size} bytes")
        parts += part
    return bytes(parts)


def stand_in(connection: socket.socket) -> None:
    """Pass signals on until the child has ended, then end in the same way."""
    for number in PASSED_ON:
        signal.signal(number, lambda received, _frame: connection.sendall(bytes([received])))
    try:
        (status,) = STATUS.unpack(receive_exactly(connection, STATUS.size))
    except OSError:
        status = signal.SIGKILL  # the zygote is gone, and its children with it
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
        answer = ask(connection, {"argv": sys.argv[1:], **this_process()}, [0, 1, 2])
    except OSError as error:
        answer = {"declined": repr(error)}
    if "pid" in answer:
        stand_in(connection)
    connection.close()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
