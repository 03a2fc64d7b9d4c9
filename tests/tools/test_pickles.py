"""Pickles are read without executing them: only what verl's dumps contain is allowed.

Each malicious file would create a marker file if it were executed. In addition, Python's audit events show whether
anything was looked up by an unpickler, compiled, executed or started.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import json
import operator
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict._reductions import _rebuild_tensordict_files_consolidated as _rebuild_consolidated

from tests.batches import assert_same_object
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.tools.upstream.batches import NAMES
from verl_rollout_skip.tools.upstream.pickles import DamagedDumpError, UnsafePickleError, read_pickle
from verl_rollout_skip.tools.upstream.torch_files import read_dump_file

DUMPS = sorted(
    path for path in (Path(__file__).parents[1] / "upstream_dumps").rglob("*") if path.suffix in (".dp", ".pt")
)
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "compile",
    "exec",
    "import",
)


class Watch:
    """Python's audit events while it is enabled. A hook cannot be removed, so all tests share one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in FORBIDDEN:
            self.events.append(f"{event}{arguments!r:.100}")

    def __enter__(self) -> None:
        self.events, self.is_on = [], True

    def __exit__(self, *_: Any) -> None:
        self.is_on = False
        assert self.events == []


WATCH = Watch()
b"x".decode("cp437")  # zipfile imports this codec on first use


def read(folder: Path, data: bytes, watch: bool = True) -> Any:
    """Read a dump with these bytes; fail if anything was started, looked up or executed, or if the marker exists."""
    path = folder / "dump"
    path.write_bytes(data)
    before = os.getcwd()
    os.chdir(folder)
    try:
        with WATCH if watch else contextlib.nullcontext():
            return read_dump_file(str(path))
    finally:
        os.chdir(before)
        assert not (folder / "marker").exists()


class Reduces:
    """An object whose pickle requests a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.asked = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.asked

    def __call__(self) -> None:
        """pickle only accepts callables."""


def runs_a_command() -> Any:
    return Reduces(os.system, "touch marker")


def evaluates() -> Any:
    return Reduces(builtins.eval, "open('marker', 'w')")


def executes() -> Any:
    return Reduces(builtins.exec, "open('marker', 'w')")


def imports() -> Any:
    return Reduces(__import__, "antigravity")


def gets_attributes() -> Any:
    """getattr(__import__('os'), 'system')('touch marker'): nested calls."""
    return Reduces(Reduces(builtins.getattr, Reduces(__import__, "os"), "system"), "touch marker")


def gets_attributes_otherwise() -> Any:
    return Reduces(Reduces(operator.attrgetter, "system"), Reduces(__import__, "os"))


def calls_partially() -> Any:
    return Reduces(Reduces(functools.partial, os.system, "touch marker"))


def maps() -> Any:
    return Reduces(list, Reduces(map, os.system, ["touch marker"]))


def loads_with_torch() -> Any:
    return Reduces(torch.load, "marker")


def loads_with_numpy() -> Any:
    return Reduces(np.load, "marker", None, True)


def loads_a_pickle_within() -> Any:
    return Reduces(pickle.loads, pickle.dumps(runs_a_command()))


def loads_a_dump_within() -> Any:
    from verl import DataProto

    return Reduces(DataProto.load_from_disk, "marker")


def opens_a_file() -> Any:
    return Reduces(open, "marker", "w")


HOSTILE: list[Callable[[], Any]] = [
    runs_a_command,
    evaluates,
    executes,
    imports,
    gets_attributes,
    gets_attributes_otherwise,
    calls_partially,
    maps,
    loads_with_torch,
    loads_with_numpy,
    loads_a_pickle_within,
    loads_a_dump_within,
    opens_a_file,
]


def data_proto(batch: Any = None, columns: Any = None, meta: Any = None) -> bytes:
    """The pickle of a DataProto with this state."""
    state = pickle.dumps((batch, {} if columns is None else columns, {} if meta is None else meta), 4)
    return b"\x80\x04\x8c\x0dverl.protocol\x8c\x09DataProto\x93)\x81" + state[2:-1] + b"b."


def cell(value: Any) -> np.ndarray:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def torch_file(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def as_it_is(value: Any) -> bytes:
    return pickle.dumps(value)


def old_protocol(value: Any) -> bytes:
    return pickle.dumps(value, 0)


def in_a_list(value: Any) -> bytes:
    return pickle.dumps([1, {"a": (value,)}], 2)


def in_a_column(value: Any) -> bytes:
    return data_proto(columns={"raw_prompt": cell({"deep": [value]})})


def in_meta_info(value: Any) -> bytes:
    return data_proto(meta={"timing": value})


def in_the_tensors(value: Any) -> bytes:
    return data_proto(torch_file({"responses": value}))


def in_a_torch_file(value: Any) -> bytes:
    return torch_file({"tensordict": value, "keys": [], "tags": []})


@pytest.mark.parametrize(
    "where", [as_it_is, old_protocol, in_a_list, in_a_column, in_meta_info, in_the_tensors, in_a_torch_file]
)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_malicious_file_is_rejected_and_executes_nothing(
    tmp_path: Path, where: Callable[[Any], bytes], hostile: Callable[[], Any]
) -> None:
    data = where(hostile())
    with pytest.raises(UnsafePickleError, match=r"It asks for .* which no dump of rollouts needs"):
        read(tmp_path, data)


def test_malicious_files_work_with_pythons_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    for where in (as_it_is, old_protocol, in_a_list):
        pickle.loads(where(runs_a_command()))
        assert (tmp_path / "marker").exists()
        (tmp_path / "marker").unlink()
    torch.load(io.BytesIO(in_a_torch_file(runs_a_command())), weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"(S'touch marker'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch marker'\no.",
        b"cos\nsystem\n(S'touch marker'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch marker\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.",
        b"\x80\x02\x82\x01.",
        b"Pmarker\n.",
        b"\x80\x05\x97.",
        b"\x80\x04\x8c\x0dverl.protocol\x8c\x18DataProto.load_from_disk\x93\x8c\x06marker\x85R.",
        b"\x80\x04\x8c\x0dtorch.storage\x8c\x1e_load_from_bytes.__globals__.x\x93.",
    ],
    ids=["INST", "OBJ", "GLOBAL", "STACK_GLOBAL", "NEWOBJ_EX", "EXT1", "PERSID", "BUFFER", "dotted", "dunder"],
)
def test_every_opcode_that_can_call_something_is_rejected(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        read(tmp_path, data)


@pytest.mark.parametrize(
    "value",
    [
        Reduces(torch.storage._load_from_bytes, pickle.dumps(runs_a_command())),
        Reduces(torch.storage._load_from_bytes, torch_file(runs_a_command())),
        Reduces(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, ("touch marker",), {}),
        Reduces(np.dtype, "O8", state=(3, "|", (runs_a_command(), ()), None, None, -1, -1, 63)),
        Reduces(torch.Size, runs_a_command()),
    ],
    ids=["storage is a pickle", "storage is a file of torch", "type", "dtype", "size"],
)
def test_allowed_names_cannot_be_abused(tmp_path: Path, value: Any) -> None:
    data = pickle.dumps(value)
    with pytest.raises((UnsafePickleError, DamagedDumpError)):
        read(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93\x8c\x01x\x8c\x05rot13\x86R.",
        b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93}b.",
        b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93\x8c\x08__code__N\x86b.",
        b"\x80\x04]}b.",
        b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93Ka.",
        b"\x80\x04}(Ka.",
        b"\x80\x04\x8c\x0btorch._utils\x8c\x12_rebuild_tensor_v2\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93)R.",
        b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93(K\x05tR.",
    ],
    ids=[
        "codec",
        "state of a name",
        "attribute of a name",
        "state of a list",
        "append to a name",
        "no mark",
        "name",
        "type",
        "array",
    ],
)
def test_allowed_names_work_only_for_their_purpose(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((UnsafePickleError, DamagedDumpError)):
        read(tmp_path, data)


def test_no_allowed_name_can_execute_anything() -> None:
    """The list is short enough to review; its only builtins are set and bytes."""
    modules = {name.split(".")[0] for name in NAMES}
    assert modules == {
        "PIL",
        "__builtin__",
        "_codecs",
        "builtins",
        "collections",
        "numpy",
        "tensordict",
        "torch",
        "verl",
    }
    own = {name.split(".")[1] for name in NAMES if name.startswith(("builtins", "__builtin__"))}
    assert own == {"set", "bytes"}


def test_file_that_expands_through_shared_objects_is_rejected(tmp_path: Path) -> None:
    """Ten lists of ten lists of …: a kilobyte that would be a hundred billion items."""
    value: Any = ["x"]
    for _ in range(11):
        value = [value] * 10
    with pytest.raises(DamagedDumpError, match="repeats parts of itself"):
        read(tmp_path, data_proto(meta={"timing": value}))


@pytest.mark.parametrize("depth", [150, 100_000], ids=["deep", "very deep"])
def test_file_that_is_nested_too_deeply_is_rejected(tmp_path: Path, depth: int) -> None:
    data = b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."
    with pytest.raises(DamagedDumpError, match="nested too deeply"):
        read(tmp_path, data)


def test_list_that_contains_itself_is_rejected(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(DamagedDumpError, match="within itself"):
        read(tmp_path, pickle.dumps(value))


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((1 << 40,), (0,), 0), ((3,), (1,), 0), ((2,), (5,), 0), ((1,), (1,), 2), ((-1,), (1,), 0), ((2,), (-1,), 1)],
)
def test_tensor_cannot_exceed_its_storage(tmp_path: Path, size: Any, stride: Any, offset: int) -> None:
    storage = torch.arange(2)
    asked = (torch._utils._rebuild_tensor_v2, (storage._typed_storage(), offset, size, stride, False, OrderedDict()))
    with pytest.raises(DamagedDumpError, match=r"exceeds|a size is negative"):
        read(tmp_path, pickle.dumps(Reduces(*asked[:1], *asked[1])))


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: "/".join(path.parts[-4:]))
def test_real_dump_stays_within_its_budget_at_any_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget grows with the file. Without its constant part, a small file is like one of gigabytes."""
    monkeypatch.setattr("verl_rollout_skip.tools.upstream.tensors._FREE_WEIGHT", 0)
    read_dump_file(str(path))


def test_data_shared_by_the_rollouts_of_a_prompt_stays_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl import DataProto

    monkeypatch.setattr("verl_rollout_skip.tools.upstream.tensors._FREE_WEIGHT", 0)
    image, tests = (
        np.zeros((64, 64, 3), dtype=np.uint8),
        [{"input": [number], "output": number} for number in range(99)],
    )
    rows = [{"image": image, "tests": tests}] * 64
    batch = DataProto.from_dict({"responses": torch.arange(64 * 4096).reshape(64, 4096)})
    batch.non_tensor_batch = {"extra": np.array([*rows, None], dtype=object)[:64]}
    batch.save_to_disk(tmp_path / "dump")
    found = read_dump_file(str(tmp_path / "dump"))
    assert torch.equal(found.batch["responses"], batch.batch["responses"])
    assert found.non_tensor_batch["extra"][63]["tests"] == tests


def test_many_tensors_of_one_storage_stay_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_rollout_skip.tools.upstream.tensors._FREE_WEIGHT", 0)
    whole = torch.arange(1 << 17)
    torch.save(list(whole.chunk(1024)), tmp_path / "dump")
    assert torch.equal(torch.cat(read_dump_file(str(tmp_path / "dump"))), whole)


def name_of(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"


def call_of(module: str, name: str, *arguments: bytes) -> bytes:
    return name_of(module, name) + b"(" + b"".join(arguments) + b"tR"


def text_of(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def long_bytes(data: bytes) -> bytes:
    return b"B" + len(data).to_bytes(4, "little") + data


def zip_of(data: bytes, storage: bytes = b"") -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", storage)
    return sink.getvalue()


def torch_files_within_each_other(depth: int) -> bytes:
    data = zip_of(b"N.")
    for _ in range(depth):
        data = zip_of(data_proto(data))
    return data


def announced_by_the_directory() -> bytes:
    """A zip directory that claims 1 GB for an item of one byte."""
    data = bytearray(zip_of(b"N.", b"x"))
    offset = data.rindex(b"PK\x01\x02")
    data[offset + 20 : offset + 28] = (1 << 30).to_bytes(4, "little") * 2
    return bytes(data)


def shared_metadata() -> bytes:
    """Nested TensorDicts that contain the same one twice at each level: a kilobyte with 2^60 leaves."""
    described = {"leaves": {}, "non_tensors": {}, "cls": "TensorDict", "cls_metadata": {"batch_size": [1]}}
    level: dict[str, Any] = described
    for _ in range(60):
        level = {"a": level, "b": level, **described}
    return pickle.dumps(Reduces(_rebuild_consolidated, level, torch.zeros(1, dtype=torch.uint8)))


TWICE = b"N" + b"2\x86" * 60
"""A tuple that contains the previous one twice, 60 times: hashing, comparing or printing it takes 2^60 steps."""
DEEP = b"N" + b"\x85" * 150_000
"""Deeply nested tuples: C code that recurses into them without a limit overflows the stack."""
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n)R"
I1 = b"cnumpy\ndtype\n(X\x02\x00\x00\x00i1tR"
STORAGE_HEAD = b"".join(pickle.dumps(part) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
STORAGE_NAME = b"(" + text_of("storage") + name_of("torch", "FloatStorage")
HEAVY = {
    "deep key": b"}" + DEEP + b"Ns.",
    "shared key": b"}" + TWICE + b"Ns.",
    "shared key among many": b"}(" + TWICE + b"Nu.",
    "shared key of an old dict": b"(" + TWICE + b"Nd.",
    "shared key of an OrderedDict": call_of("collections", "OrderedDict") + TWICE + b"Ns.",
    "shared key in a pair": call_of("collections", "OrderedDict", b"](" + TWICE + b"Nta") + b".",
    "shared item of a set": b"\x8f(" + TWICE + b"\x90.",
    "shared item of a frozenset": b"(" + TWICE + b"\x91.",
    "shared module": TWICE + text_of("x") + b"\x93.",
    "shared size": call_of("torch", "Size", TWICE) + b".",
    "shared text": call_of("_codecs", "encode", TWICE, text_of("latin1")) + b".",
    "shared encoding": call_of("_codecs", "encode", text_of("x"), TWICE) + b".",
    "shared dtype": call_of("numpy", "dtype", TWICE) + b".",
    "shared byte order": call_of("numpy", "dtype", text_of("i1")) + b"(K\x03" + TWICE + b"NNNtb.",
    "shared order": call_of("numpy.core.numeric", "_frombuffer", b"C\x00", I1, b"K\x00\x85", TWICE) + b".",
    "shared storage": TWICE + b"Q.",
    "shared storage in an archive": zip_of(TWICE + b"Q."),
    "shared key of a storage in an archive": zip_of(STORAGE_NAME + TWICE + b"NK\x00tQ."),
    "shared storage of its own": call_of(
        "torch.storage",
        "_load_from_bytes",
        long_bytes(STORAGE_HEAD + STORAGE_NAME + TWICE + b"NK\x00tQ." + b"]" + TWICE + b"a."),
    )
    + b".",
    "shared maker": call_of("torch._tensor", "_rebuild_from_type_v2", TWICE, b"N", b")", b"}") + b".",
    "shared class": call_of("tensordict._reductions", "_make_td", TWICE, b"}") + b".",
    "shared metadata": shared_metadata(),
    "shared pairs as metadata": call_of(
        "tensordict._reductions", "_rebuild_tensordict_files_consolidated", b"](" + TWICE + b"Nta", b"N"
    )
    + b".",
    "shared mode of an image": name_of("PIL.Image", "Image") + b")\x81(}" + TWICE + b"K\x01K\x01\x86NC\x01xtb.",
    "shared layout": name_of("verl.protocol", "DataProto")
    + b")\x81(](K\x01\x85N}"
    + text_of("a")
    + TWICE
    + b"]\x86se}}tb.",
    "shared dtype of bytes": name_of("verl.protocol", "DataProto")
    + b")\x81(](K\x01\x85N}"
    + text_of("a")
    + TWICE
    + b"NN\x87se}}tb.",
    "deep tuples": DEEP + b".",
    "deep lists": b"]" * 40_000 + b"a" * 39_999 + b".",
    "deep dicts": b"}K\x01" * 40_000 + b"N" + b"s" * 40_000 + b".",
    "deep calls": name_of("torch", "Size") + b"\x940" + b"h\x00" * 40_000 + b")" + b"R\x85" * 39_999 + b"R.",
    "deep storages": b"N" + b"Q" * 100_000 + b".",
    "deep sets": b"\x8f(" * 20_000 + b"N" + b"\x90" * 20_000 + b".",
    "announced integer": b"\x8b\xff\xff\xff\x7f\x01.",
    "announced bytes": b"\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
    "announced gigabytes": b"\x8e" + (1 << 34).to_bytes(8, "little") + b"x.",
    "announced text": b"\x8d" + (1 << 34).to_bytes(8, "little") + b"x.",
    "announced bytearray": b"\x96" + (1 << 34).to_bytes(8, "little") + b"x.",
    "announced by the directory": announced_by_the_directory(),
    "digits": b"L" + b"9" * 3_000_000 + b"L\n.",
    "huge integer as a size": call_of(
        "torch", "Size", b"(\x8b" + (2_000_000).to_bytes(4, "little") + b"\x7f" * 2_000_000 + b"t"
    )
    + b".",
    "huge integer as a key": b"}\x8b" + (2_000_000).to_bytes(4, "little") + b"\x7f" * 2_000_000 + b"Ns.",
    "keys with the same hash": b"}("
    + b"".join(b"\x8a\x0a" + (number * (2**61 - 1)).to_bytes(10, "little") + b"N" for number in range(8, 50_000))
    + b"u.",
    "overflowing shape": ARRAY + b"(K\x01\x8a\x05\x00\x00\x00\x00\x012\x86" + I1 + b"\x89C\x00tb.",
    "rows of nothing": ARRAY + b"(K\x01\x8a\x06\x00\x00\x00\x00\x00\x01K\x00\x86" + I1 + b"\x89C\x00tb.",
    "too many dimensions": ARRAY + b"(K\x01(" + b"K\xff" * 20_000 + b"t" + I1 + b"\x89C\x00tb.",
    "text over and over": long_bytes(bytes(1 << 20)) + b"\x940](" + b"h\x00" * 20_000 + b"e.",
    "pairs over and over": b"]("
    + b"K\x01N\x86" * 3_000
    + b"e\x85\x940"
    + name_of("collections", "OrderedDict")
    + b"\x940]("
    + b"h\x01h\x00R" * 3_000
    + b"e.",
    "array over and over": long_bytes(bytes(1 << 20))
    + b"\x940]("
    + (ARRAY + b"(K\x01J\x00\x00\x10\x00\x85" + I1 + b"\x89h\x00tb") * 2_000
    + b"e.",
    "growing set": b"\x8f" + b"(K\x01\x90" * 50_000 + b".",
    "torch files within each other": torch_files_within_each_other(60),
    "torch file over and over": long_bytes(zip_of(b"N.", bytes(1 << 20)))
    + b"\x940]("
    + (name_of("verl.protocol", "DataProto") + b")\x81h\x00}}\x87b") * 2_000
    + b"e.",
    "mark as a value": b"](a.",
    "mark as a result": b"(.",
    "long name": b"cos\n" + b"x" * 1_000_000 + b"\n.",
    "long text of a number": b"F" + b"x" * 1_000_000 + b"\n.",
}
CHILD = """
import json, os, resource, sys
import torch, tensordict, PIL.Image
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.tools.upstream.torch_files import read_dump_file

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

verdicts = {}
for path in sys.argv[1:]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (15, 15))
        resource.setrlimit(resource.RLIMIT_AS, (used() + (1 << 30),) * 2)
        try:
            read_dump_file(path)
            verdict = "it was read"
        except BaseException as error:
            verdict = f"{type(error).__name__}: {error}"
        os.write(writing, verdict[:2000].encode())
        os._exit(0)
    os.close(writing)
    verdict = os.fdopen(reading, "rb").read().decode()
    status = os.waitpid(child, 0)[1]
    verdicts[os.path.basename(path)] = verdict if status == 0 else f"ended by signal {os.WTERMSIG(status)}"
print(json.dumps(verdicts))
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of each expensive file, read in a separate process with 15 seconds of CPU time and 1 GiB."""
    folder = tmp_path_factory.mktemp("heavy")
    for name, data in HEAVY.items():
        (folder / name).write_bytes(data)
    paths = [str(folder / name) for name in HEAVY]
    command, root = [sys.executable, "-c", CHILD, *paths], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)  # the limit above is CPU time, and the machine may be busy
@pytest.mark.parametrize("name", HEAVY)
def test_small_file_cannot_crash_the_reader_or_exhaust_time_or_memory(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name].startswith(("DamagedDumpError: ", "UnsafePickleError: "))
    assert "MemoryError" not in verdicts[name]
    assert len(verdicts[name]) < 600, "quoted file content is cut to a readable length"


def test_compressed_archive_is_rejected(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(1 << 20))
    with pytest.raises(DamagedDumpError, match="compressed"):
        read(tmp_path, sink.getvalue())


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: "/".join(path.parts[-4:]))
def test_truncated_or_changed_dump_only_raises_an_error(path: Path, tmp_path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(5)
    read_dump_file(str(path))
    for length in sorted(chance.sample(range(len(whole)), 40)):
        with pytest.raises(StoreError):
            read(tmp_path, whole[:length])
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            read(tmp_path, bytes(changed))
        except StoreError:
            pass


VALUES = {
    "containers": {"a": [1, (2.5, None)], "b": {"c": b"bytes", "d": True}, "e": "é", "f": 10**30, "g": -1},
    "arrays": [np.arange(6).reshape(2, 3), np.float32(1.5), np.array(["ab", "c"]), np.array([True]), np.zeros((0, 2))],
    "order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "objects": cell({"x": np.int64(5), "y": [np.bool_(True)]}),
    "tensors": [torch.arange(6).reshape(2, 3)[:, 1:], torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3)],
    "kinds": [
        torch.ones(2, dtype=kind) for kind in (torch.float16, torch.float64, torch.bool, torch.uint8, torch.int8)
    ],
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", VALUES)
def test_values_equal_those_of_pythons_unpickler(tmp_path: Path, name: str, protocol: int) -> None:
    data = pickle.dumps(VALUES[name], protocol)
    assert_same_object(pickle.loads(data), read(tmp_path, data, watch=False))


@pytest.mark.parametrize("name", VALUES)
def test_values_in_a_torch_file_are_read_back(tmp_path: Path, name: str) -> None:
    data = torch_file(VALUES[name])
    assert_same_object(torch.load(io.BytesIO(data), weights_only=False), read(tmp_path, data, watch=False))


def test_big_endian_numbers_keep_their_values(tmp_path: Path) -> None:
    assert read(tmp_path, pickle.dumps(np.arange(300, 303, dtype=">i4"))).tolist() == [300, 301, 302]


def test_objects_shared_by_rows_stay_shared(tmp_path: Path) -> None:
    shared = {"answer": 5}
    one, two = read(tmp_path, pickle.dumps([shared, shared]))
    assert one is two


def test_image_is_read_back(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGB", (3, 2), (10, 20, 30))
    found = read(tmp_path, pickle.dumps(image), watch=False)
    assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())


def test_stream_is_left_at_the_end_of_the_pickle() -> None:
    stream = io.BytesIO(pickle.dumps([1]) + b"rest")
    assert read_pickle(stream, ()) == [1]
    assert stream.read() == b"rest"
