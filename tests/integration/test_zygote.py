"""Processes that a zygote forks are what plain processes would be, only sooner; Ray's workers too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import zygote
from tests.zygote.server import check_forkable

Run = Callable[..., zygote.Process]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def own_zygotes() -> Iterator[None]:
    """Those of other tests were started for other environments, and would decline what is asked for here."""
    zygote.close_all()
    yield
    zygote.close_all()


@pytest.fixture(params=["1", "0"], ids=["forked", "plain"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ROLLOUT_SKIP_TESTS_ZYGOTE", request.param)
    return "forked" if request.param == "1" else "plain"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SKIP_TESTS_ZYGOTE", "1")


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Run]:
    """Runs source code as the module ``story``; its output is in the file ``output``."""
    started: list[zygote.Process] = []

    def run(source: str, *argv: str, **env: str) -> zygote.Process:
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / "story.py").write_text(source)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        own_env = {**inherited, "PYTHONPATH": str(tmp_path / "modules"), **env}
        with open(tmp_path / "output", "wb") as output:
            started.append(zygote.run("story", argv, env=own_env, cwd=tmp_path, stdout=output))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def output(tmp_path: Path) -> Callable[[], str]:
    return (tmp_path / "output").read_text


def eventually(condition: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
    return result


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def stand_in(tmp_path: Path, source: str, **env: str) -> subprocess.Popen[str]:
    """Starts a script the way Ray starts a worker."""
    (tmp_path / "worker.py").write_text(source)
    return subprocess.Popen(
        [str(zygote.ready().python), str(tmp_path / "worker.py"), "--worker"],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SELF_PORTRAIT = """
import json, os, resource, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "executable": sys.executable, "name": __name__, "file": __file__,
    "cwd": os.getcwd(), "path": sys.path, "env": dict(os.environ), "flags": str(sys.flags), "umask": os.umask(0o77),
    "nice": os.getpriority(os.PRIO_PROCESS, 0), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "leads_session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(), "threads": threading.active_count(),
    "interrupt": str(signal.getsignal(signal.SIGINT)), "pipe": str(signal.getsignal(signal.SIGPIPE)),
    "tests_imported": "tests" in sys.modules, "encodings": [sys.stdout.encoding, sys.stderr.errors, sys.stdout.name],
    "open_files": sorted(os.listdir("/proc/self/fd"), key=int)[:3], "count": len(os.listdir("/proc/self/fd")),
    "main": sys.modules["__main__"].__dict__ is globals(), "annotations": __builtins__.__name__,
}))
"""


def test_a_forked_process_cannot_be_told_from_a_plain_one(
    script: Run, output: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    portraits = []
    for switch in ("1", "0"):
        monkeypatch.setenv("ROLLOUT_SKIP_TESTS_ZYGOTE", switch)
        process = script(SELF_PORTRAIT, "--some", "argument", STORY="told")
        assert process.wait(60) == 0, output()
        portraits.append(json.loads(output()))
    forked, plain = portraits
    assert forked["env"].pop("RAY_RUNTIME_ENV_HOOK") == "zygote_ray.hook"
    for portrait in portraits:
        assert portrait["env"].pop("ROLLOUT_SKIP_TESTS_ZYGOTE")
        # The libraries that are imported already have made this known to the processes that they may start.
        portrait["env"].pop("TORCHINDUCTOR_CACHE_DIR", None)
    assert forked == plain


def test_the_heavy_libraries_are_there_already_and_ray_and_verl_are_not(
    forked: None, script: Run, output: Callable[[], str]
) -> None:
    process = script("import sys; print([n in sys.modules for n in ('torch', 'transformers', 'ray', 'verl')])")
    assert process.wait(60) == 0
    assert isinstance(process, zygote.ForkedProcess)
    assert output() == "[True, True, False, False]\n"


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("print('done')", 0, "done"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("def f():\n    raise ValueError('broken')\nf()", 1, "ValueError: broken"),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'last words')", 0, "last words"),
        ("import os; print('unsaid', end=''); os._exit(7)", 7, ""),
    ],
)
def test_the_end_of_a_process_is_seen_as_it_was(
    script: Run, output: Callable[[], str], source: str, code: int, says: str
) -> None:
    assert script(source).wait(60) == code
    assert says in output()
    assert "unsaid" not in output()


@pytest.mark.usefixtures("either_way")
def test_a_process_can_be_waited_for_stopped_and_killed(script: Run, output: Callable[[], str]) -> None:
    polite = script(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    eventually(lambda: "ready" in output())
    assert polite.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        polite.wait(0.1)
    polite.terminate()
    assert polite.wait(30) == 5
    stubborn = script("import time; print('ready', flush=True); time.sleep(60)")
    eventually(lambda: "ready" in output())
    assert is_running(stubborn.pid)
    stubborn.kill()
    assert stubborn.wait(30) == -signal.SIGKILL
    assert stubborn.poll() == -signal.SIGKILL
    assert not is_running(stubborn.pid)


@pytest.mark.usefixtures("either_way")
def test_output_appears_at_once_if_the_environment_asks_for_it(script: Run, output: Callable[[], str]) -> None:
    script("import time; print('now'); time.sleep(60)", PYTHONUNBUFFERED="1")
    eventually(lambda: output() == "now\n")


RANDOM_NUMBERS = """
import json, multiprocessing, random, tempfile, uuid
import numpy, torch, ray
print(json.dumps({
    "python": random.random(), "numpy": numpy.random.rand(), "numpy seed": numpy.random.get_state()[1].tolist(),
    "torch": torch.rand(1).item(), "torch seed": torch.initial_seed(), "uuid": str(uuid.uuid4()),
    "ray": ray.NodeID.from_random().hex(), "authkey": multiprocessing.current_process().authkey.hex(),
    "file": next(tempfile._get_candidate_names()), "same in all": torch.Generator().initial_seed(),
}))
"""


@pytest.mark.usefixtures("either_way")
def test_no_two_processes_draw_the_same_random_numbers(script: Run, output: Callable[[], str]) -> None:
    draws = []
    for _ in range(2):
        assert script(RANDOM_NUMBERS).wait(60) == 0, output()
        draws.append(json.loads(output()))
    assert {name for name in draws[0] if draws[0][name] == draws[1][name]} == {"same in all"}


def test_settings_of_ray_are_read_from_the_environment_of_the_process(
    forked: None, script: Run, output: Callable[[], str]
) -> None:
    source = "from ray._raylet import Config; print(Config.kill_worker_timeout_milliseconds())"
    for value in ("777", "888"):
        assert script(source, RAY_kill_worker_timeout_milliseconds=value).wait(60) == 0
        assert output() == f"{value}\n"


def test_a_module_that_hides_a_library_is_imported_as_in_a_plain_process(
    forked: None, script: Run, output: Callable[[], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "requests.py").write_text("hidden = 'by the current folder'")
    assert script("import requests; print(requests.hidden)").wait(60) == 0
    assert output() == "by the current folder\n"
    assert f"a new process would import {tmp_path / 'requests.py'}" in caplog.text


def test_a_worker_whose_imports_need_another_environment_is_a_plain_process(forked: None, tmp_path: Path) -> None:
    source = "import os, sys; print(os.environ['HF_HOME'], 'torch' in sys.modules, sys.argv[1])"
    same = os.environ.get("HF_HOME")
    process = stand_in(tmp_path, source, HF_HOME="/elsewhere")
    assert process.communicate(timeout=60)[0] == "/elsewhere False --worker\n"
    assert "HF_HOME='/elsewhere' instead of " + repr(same) in (zygote.ready().folder / "log").read_text()


def test_a_worker_starts_without_a_zygote_too(tmp_path: Path) -> None:
    lonely = tmp_path / "python"
    lonely.write_bytes(zygote.ready().python.read_bytes())
    lonely.chmod(0o755)
    command = [str(lonely), "-c", "import sys; print(sys.executable); sys.exit(4)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (4, f"{sys.executable}\n")


@pytest.mark.parametrize(("source", "code"), [("import sys; sys.exit(3)", 3), ("import os; os.abort()", -6)])
def test_the_stand_in_of_a_worker_ends_as_the_worker_did(forked: None, tmp_path: Path, source: str, code: int) -> None:
    assert stand_in(tmp_path, source).wait(60) == code


SLEEPER = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"


def test_a_worker_ends_with_its_stand_in(forked: None, tmp_path: Path) -> None:
    process = stand_in(tmp_path, SLEEPER)
    assert process.stdout is not None
    worker, parent = map(int, process.stdout.readline().split())
    assert parent == zygote.ready().pid
    assert worker != process.pid
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    eventually(lambda: not is_running(worker))


def test_a_stand_in_passes_signals_on(forked: None, tmp_path: Path) -> None:
    source = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    process = stand_in(tmp_path, source)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(30) == 5


def test_a_process_that_works_on_its_own_is_not_forked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="started threads, so that a fork is not safe"):
            check_forkable()
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_all_processes_end_with_their_zygote(tmp_path: Path) -> None:
    own = zygote.Zygote(os.environ)
    try:
        (tmp_path / "worker.py").write_text(SLEEPER)
        command = [str(own.python), str(tmp_path / "worker.py")]
        process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        worker, parent = map(int, process.stdout.readline().split())
        assert parent == own.pid, (own.folder / "log").read_text()
        os.kill(own.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        eventually(lambda: not is_running(worker))
    finally:
        own.close()


RAY_DRIVER = """
import ctypes, json, os, signal, sys, time
import psutil, ray

ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"FOR_WORKERS": "yes"}})

@ray.remote(max_restarts=0, max_task_retries=0, num_cpus=0)
class Worker:
    preloaded = "torch" in sys.modules
    def portrait(self):
        import torch
        return dict(pid=os.getpid(), parent=os.getppid(), preloaded=self.preloaded, env=os.environ["FOR_WORKERS"],
                    own=os.environ.get("OWN"), seed=torch.initial_seed(), id=ray.NodeID.from_random().hex())
    def crash(self):
        ctypes.string_at(0)
    def sleep(self):
        time.sleep(600)

first, second = Worker.remote(), Worker.options(runtime_env={"env_vars": {"OWN": "mine"}}).remote()
report = {"portraits": ray.get([first.portrait.remote(), second.portrait.remote()])}
for worker, end in ((first, "crash"), (second, "kill")):
    pid = ray.get(worker.portrait.remote())["pid"]
    try:
        reference = worker.crash.remote() if end == "crash" else worker.sleep.remote()
        if end == "kill":
            os.kill(pid, signal.SIGKILL)
        ray.get(reference, timeout=60)
    except ray.exceptions.RayActorError as error:
        report[end] = type(error).__name__
third = Worker.remote()
report["third"] = ray.get(third.portrait.remote())["pid"]
# The two agents of Ray outlive a killed driver for a minute, with or without a zygote.
family = [p for p in psutil.Process().children(recursive=True) if "Agent" not in p.cmdline()[0]]
report["family"] = sorted({p.pid for p in family} | {report["third"]})
print(json.dumps(report), flush=True)
if len(sys.argv) > 1:
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_workers_of_ray_are_forked_and_their_deaths_are_seen(
    forked: None, script: Run, output: Callable[[], str]
) -> None:
    driver = script(RAY_DRIVER, RAY_DEDUP_LOGS="0")
    assert driver.wait(120) == 0, output()
    report = json.loads(next(line for line in output().splitlines() if line.startswith("{")))
    first, second = report["portraits"]
    assert first["preloaded"]
    assert second["preloaded"]
    assert first["parent"] == second["parent"] == zygote.ready().pid
    assert (first["env"], first["own"], second["own"]) == ("yes", None, "mine")
    assert first["seed"] != second["seed"]
    assert first["id"] != second["id"]
    assert report["crash"] == "ActorDiedError"
    assert report["kill"] == "ActorDiedError"
    eventually(lambda: not any(is_running(pid) for pid in report["family"]))


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
def test_a_killed_driver_leaves_no_process_of_ray_behind(script: Run, output: Callable[[], str]) -> None:
    driver = script(RAY_DRIVER, "stay", RAY_DEDUP_LOGS="0")
    line = eventually(lambda: next((t for t in output().splitlines() if t.startswith("{")), None), 120)
    family = json.loads(line)["family"]
    assert all(is_running(pid) for pid in family)
    driver.kill()
    assert driver.wait(30) == -signal.SIGKILL
    eventually(lambda: not any(is_running(pid) for pid in family), 60)
