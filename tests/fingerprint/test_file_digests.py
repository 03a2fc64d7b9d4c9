"""Weights and data are read in full, but only once: digests of unchanged files are cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_rollout_skip.fingerprint import file_digests
from verl_rollout_skip.fingerprint.file_digests import digest_files

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VERL_ROLLOUT_SKIP_CACHE", str(folder))
    return folder


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file that was written some time ago. Its change time cannot be set, so the clock is moved forward instead."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 * MIB))
    return file


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = file_digests.time.time_ns
    monkeypatch.setattr(file_digests.time, "time_ns", lambda: clock() + 10 * 10**9)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read."""
    names: list[str] = []

    def open_and_note(file: Path, *args: object, **kwargs: object) -> object:
        names.append(Path(file).name)
        return open(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(file_digests, "open", open_and_note, raising=False)
    return names


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("digests/*/*.json"))


def test_digest_covers_the_whole_file(tmp_path: Path) -> None:
    files = [tmp_path / f"{size}" for size in (0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 17 * MIB)]
    for file in files:
        file.write_bytes(os.urandom(int(file.name)))
    gone, pipe = tmp_path / "gone", tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would block
    assert digest_files([*files, gone, pipe, files[0]]) == [*map(sha256, files), None, None, sha256(files[0])]


@pytest.mark.usefixtures("later")
def test_unchanged_file_is_read_once(shard: Path, opened: list[str]) -> None:
    assert digest_files([shard]) == digest_files([shard]) == [sha256(shard)]
    assert opened == ["model.safetensors"]


@pytest.mark.usefixtures("later")
def test_another_process_uses_the_cached_digest(shard: Path) -> None:
    digest_files([shard])
    script = (
        "import sys; from pathlib import Path; from verl_rollout_skip.fingerprint import file_digests\n"
        "file_digests._read_once = None\n"  # reading the file would fail
        "print(*file_digests.digest_files([Path(sys.argv[1])]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", script, str(shard)], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == sha256(shard)


def rewrite_keeping_size_and_time(shard: Path) -> None:
    stat = shard.stat()
    with shard.open("r+b") as stream:
        stream.seek(MIB)
        stream.write(os.urandom(8))
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace_keeping_size_and_time(shard: Path) -> None:
    stat = shard.stat()
    other = shard.with_name("other")
    other.write_bytes(os.urandom(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, shard)


def grow(shard: Path) -> None:
    with shard.open("ab") as stream:
        stream.write(b"more")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", [rewrite_keeping_size_and_time, replace_keeping_size_and_time, grow])
def test_changed_file_under_the_same_path_is_read_again(shard: Path, change: Callable[[Path], None]) -> None:
    (before,) = digest_files([shard])
    change(shard)
    assert digest_files([shard]) == [sha256(shard)] != [before]


def test_digest_of_a_file_that_was_just_written_is_not_cached(shard: Path, cache: Path, opened: list[str]) -> None:
    """It could change again within the resolution of its timestamps."""
    digest_files([shard])
    digest_files([shard])
    assert opened == ["model.safetensors"] * 2
    assert entries(cache) == []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"sha256": "00"}', b"\xff\xfe", b"null"])
def test_damaged_cache_is_ignored_with_a_warning(
    shard: Path, cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    digest_files([shard])
    (entry,) = entries(cache)
    entry.write_bytes(content)
    assert digest_files([shard]) == [sha256(shard)]
    assert "its cached digest in" in caplog.text
    assert json.loads(entry.read_bytes())["sha256"] == sha256(shard)


@pytest.mark.usefixtures("later")
def test_edited_digest_is_not_used(shard: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest_files([shard])
    (entry,) = entries(cache)
    entry.write_text(json.dumps({**json.loads(entry.read_bytes()), "sha256": "0" * 64}))
    assert digest_files([shard]) == [sha256(shard)]
    assert "checksum" in caplog.text


@pytest.mark.usefixtures("later")
def test_cache_of_another_machine_is_not_used(
    shard: Path, cache: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a home folder on a network share, inode and times of local files may be equal by chance."""
    digest_files([shard])
    (entry,) = entries(cache)
    monkeypatch.setattr(file_digests.platform, "node", lambda: "another-machine")
    digest_files([shard])
    assert opened == ["model.safetensors"] * 2
    theirs = next(other for other in entries(cache) if other != entry)
    theirs.write_bytes(entry.read_bytes())
    digest_files([shard])
    assert opened == ["model.safetensors"] * 3


@pytest.mark.usefixtures("later")
def test_read_only_cache_only_costs_time(shard: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    assert digest_files([shard]) == [sha256(shard)]
    assert "digests cannot be cached" in caplog.text
    assert "VERL_ROLLOUT_SKIP_CACHE" in caplog.text


@pytest.mark.usefixtures("later")
@pytest.mark.usefixtures("later")
def test_user_without_a_home_folder_can_train(
    shard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example in a container that runs under an arbitrary user id."""
    for name in ("VERL_ROLLOUT_SKIP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert digest_files([shard]) == [sha256(shard)]
    assert "digests cannot be cached" in caplog.text
    assert "no home directory" in caplog.text
    assert "Set VERL_ROLLOUT_SKIP_CACHE to a writable folder" in caplog.text


def test_many_processes_can_write_the_cache_at_once(tmp_path: Path, cache: Path) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for file in files:
        file.write_bytes(os.urandom(2 * MIB))
    script = (
        "import sys; from pathlib import Path; from verl_rollout_skip.fingerprint import file_digests\n"
        "clock = file_digests.time.time_ns; file_digests.time.time_ns = lambda: clock() + 10 * 10**9\n"
        "for _ in range(20):\n"
        "    for entry in Path(sys.argv[1]).glob('digests/*/*.json'): entry.unlink(missing_ok=True)\n"
        "    print(*file_digests.digest_files([Path(name) for name in sys.argv[2:]]))"
    )
    command = [sys.executable, "-c", script, str(cache), *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert set(output.splitlines()) == {" ".join(map(sha256, files))}
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".json"] * len(entries(cache))


def test_blob_in_the_hub_cache_is_identified_by_its_name(tmp_path: Path, opened: list[str]) -> None:
    """The Hub names large files after their SHA-256, so a copy elsewhere, which is read, has the same digest."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    content = os.urandom(2 * MIB)
    name = hashlib.sha256(content).hexdigest()
    (blobs / name).write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(content)
    small = snapshot / "config.json"  # named after a git hash, which is not a hash of the content alone
    (blobs / ("a" * 40)).write_text("{}")
    small.symlink_to(f"../../blobs/{'a' * 40}")
    assert digest_files([snapshot / "model.safetensors"]) == [name]
    assert opened == []
    assert digest_files([copy, small]) == [name, hashlib.sha256(b"{}").hexdigest()]
    (blobs / name).unlink()
    assert digest_files([snapshot / "model.safetensors"]) == [None]


def test_progress_of_long_reads_is_logged(
    shard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_digests, "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, logger="verl_rollout_skip"):
        digest_files([shard])
    assert "reading weights and data to identify them by content: 3.1 MB of 3.1 MB" in caplog.text
    assert "unchanged files are not read again" in caplog.text


def test_file_that_changes_while_it_is_read_is_reported(
    shard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = file_digests._Progress.add

    def write_too(progress: file_digests._Progress, count: int) -> None:
        grow(shard)
        read(progress, count)

    monkeypatch.setattr(file_digests._Progress, "add", write_too)
    digest_files([shard])
    assert "changes while it is being read" in caplog.text


def test_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_ROLLOUT_SKIP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert file_digests.cache_folder() == tmp_path / "verl_rollout_skip"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert file_digests.cache_folder() == Path.home() / ".cache" / "verl_rollout_skip"
