"""A forked child becomes the process that was asked for: its streams, environment, folder, arguments, random state."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import multiprocessing.process
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import types
from typing import Any

PR_SET_PDEATHSIG = 1


def become(message: dict[str, Any], streams: list[int], sys_path: list[str], env: dict[str, str], python: str) -> None:
    """Run the script or module that ``message`` names as ``__main__``; returns or raises as it does."""
    inherit(message, streams)
    set_environment(env)
    renew_streams(env)
    renew_random_state()
    sys.path[:] = sys_path
    importlib.invalidate_caches()
    forget_zygote()
    start_ray_workers_with(python)
    run_main(message["argv"])


def inherit(message: dict[str, Any], streams: list[int]) -> None:
    """Take over what a child of the asker would have inherited."""
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    os.chdir(message["cwd"])
    os.umask(message["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, message["nice"])
    os.sched_setaffinity(0, message["affinity"])
    for name, limits in message["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limits))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(message["oom_score_adj"]))


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the zygote ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def set_environment(env: dict[str, str]) -> None:
    import tensordict.utils

    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    tempfile.tempdir = None
    tensordict.utils._LAZY_OP = os.environ.get("LAZY_LEGACY_OP")


def renew_streams(env: dict[str, str]) -> None:
    """Open the standard streams as a new interpreter does; those of the zygote write to the same descriptors."""
    stdin = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(stdin, sys.stdin.encoding, sys.stdin.errors)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = output_stream(1, sys.stdout, env)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = output_stream(2, sys.stderr, env)  # type: ignore[misc]


def output_stream(descriptor: int, like: Any, env: dict[str, str]) -> io.TextIOWrapper:
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(descriptor, "wb", closefd=False)
    raw.name = like.name
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=unbuffered,
    )


def renew_random_state() -> None:
    """Each new process has random numbers of its own. Python's ``random`` does this itself after a fork."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def forget_zygote() -> None:
    """The child may import its own ``tests``; what runs now stays alive without being importable."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def start_ray_workers_with(python: str) -> None:
    """Have Ray call a function before it starts; it sets what the workers are started with, and nothing else."""

    def hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
        return {**(runtime_env or {}), "py_executable": (runtime_env or {}).get("py_executable") or python}

    if os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", "zygote_ray.hook") == "zygote_ray.hook":
        module = types.ModuleType("zygote_ray")
        module.__dict__["hook"] = hook
        sys.modules["zygote_ray"] = module


def run_main(argv: list[str]) -> None:
    """What ``python script.py …`` and ``python -m module …`` do."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *argv]
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    sys.argv = argv
    with io.open_code(os.path.abspath(argv[0])) as file:
        code = compile(file.read(), argv[0], "exec")
    main.__dict__.update(__file__=argv[0], __cached__=None)
    exec(code, main.__dict__)
