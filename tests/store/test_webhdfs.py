"""A store on HDFS through its HTTP API, with a small server that answers as a name node does."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.batches import assert_same_batch, rollout_output
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.errors import EntryExistsError

K = RolloutKey(1)


class NameNode(BaseHTTPRequestHandler):
    """Files in memory. The protocol: https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html"""

    files: ClassVar[dict[str, tuple[int, bytes]]] = {}
    folders: ClassVar[set[str]] = set()
    numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def do_GET(self) -> None:
        path, options = self._request()
        if options["op"] == "GETFILESTATUS" and (path in self.files or path in self.folders):
            self._answer({"FileStatus": self._status(path, "")})
        elif options["op"] == "LISTSTATUS" and path in self.folders:
            found = [name for name in {*self.files, *self.folders} if name.rpartition("/")[0] == path]
            statuses = [self._status(name, name.rpartition("/")[2]) for name in found]
            self._answer({"FileStatuses": {"FileStatus": statuses}})
        elif options["op"] == "OPEN" and path in self.files:
            start = int(options["offset"])
            self._answer(self.files[path][1][start : start + int(options["length"])])
        else:
            exception = {"exception": "FileNotFoundException", "message": f"File does not exist: {path}"}
            self._answer({"RemoteException": exception}, status=404)

    def do_PUT(self) -> None:
        path, options = self._request()
        if options["op"] == "MKDIRS":
            parts = path.split("/")
            self.folders.update("/".join(parts[:number]) for number in range(2, len(parts) + 1))
            self._answer({"boolean": True})
        elif self._is_at_data_node(options):
            self.files[path] = next(self.numbers), b""
            self._answer(b"", status=201)

    def do_POST(self) -> None:
        path, options = self._request()
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._is_at_data_node(options):
            number, content = self.files[path]
            self.files[path] = number, content + data
            self._answer(b"")

    def do_DELETE(self) -> None:
        path, _ = self._request()
        self._answer({"boolean": self.files.pop(path, None) is not None})

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _request(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        return unquote(url.path).removeprefix("/webhdfs/v1"), options

    def _is_at_data_node(self, options: dict[str, str]) -> bool:
        """A name node redirects writes to a data node."""
        if "datanode" in options:
            return True
        self.send_response(307)
        self.send_header("Location", f"http://{self.headers['Host']}{self.path}&datanode=1")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def _status(self, path: str, suffix: str) -> dict[str, Any]:
        number, data = self.files.get(path, (0, b""))
        return {
            "type": "FILE" if path in self.files else "DIRECTORY",
            "length": len(data),
            "fileId": number,
            "modificationTime": 1_700_000_000_000,
            "pathSuffix": suffix,
        }

    def _answer(self, content: Any, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NameNode) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"webhdfs://127.0.0.1:{server.server_port}/dumps/run"
        server.shutdown()
        thread.join()
    NameNode.files.clear()
    NameNode.folders.clear()


def test_a_rollout_is_recorded_replaced_and_deleted_on_hdfs(url: str) -> None:
    store = RolloutStore(url, background=False)
    assert store.keys() == []
    store.put(K, rollout_output(4, seed=1))
    with pytest.raises(EntryExistsError):
        RolloutStore(url, background=False).put(K, rollout_output(4, seed=2))
    assert_same_batch(rollout_output(4, seed=1), RolloutStore(url).get(K))
    store.put(K, rollout_output(4, seed=3), replace=True)
    assert_same_batch(rollout_output(4, seed=3), RolloutStore(url).get(K))
    assert store.keys() == [K]
    assert len(NameNode.files) == 2, "the replaced part is left"
    store.delete(K)
    assert NameNode.files == {}


def test_an_entry_that_was_recorded_again_is_not_taken_for_the_one_that_was_seen(url: str) -> None:
    """Times are in milliseconds, and sizes may be equal. The number of the file tells."""
    store = RolloutStore(url, background=False)
    store.put(K, rollout_output(4, seed=1))
    storage = store._storage
    (seen,) = [file for file in storage.files("step_000001") if file.name.endswith(".json")]
    assert seen == storage.info("step_000001", seen.name)
    assert seen.changed == 1_700_000_000
    path = "/dumps/run/step_000001/gen_000.json"
    NameNode.files[path] = next(NameNode.numbers), NameNode.files[path][1]
    assert not storage.delete("step_000001", seen)
    assert K in store
