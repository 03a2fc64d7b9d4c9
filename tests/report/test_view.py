"""The server of the live view under unauthorized and malformed requests, and ``rollout-skip view`` itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.arithmetic_run import make_training, record
from tests.environment import ROOT
from tests.trainings import contents
from verl_rollout_skip import RolloutKey, RolloutStore
from verl_rollout_skip.cli import main
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.report import ViewServer, open_view


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(*make_training(tmp_path_factory.mktemp("run")), range(1, 4), prompts=12)


@pytest.fixture(scope="module")
def server(variant: Path) -> Iterator[ViewServer]:
    found = open_view(str(variant))
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.close()


def ask(
    server: ViewServer, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server: ViewServer, request: bytes) -> bytes:
    """Send raw bytes that no HTTP library would send."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as found:
        found.sendall(request)
        found.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := found.recv(1 << 16):
            answer += piece
        return answer


def test_the_page_and_its_data_are_served_with_the_token(server: ViewServer) -> None:
    status, headers, body = ask(server, f"/{server.token}/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in body
    status, headers, body = ask(server, f"/{server.token}/api/changes?after=0")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert "revision" in json.loads(body)


def test_only_this_machine_can_connect(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 43, "256 bits"
    other = open_view(server.follower.variant.entries.storage.where())
    assert other.token != server.token
    other.close()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/index.html",
        "/{token}",
        "/{short}/",
        "/{token}x/",
        "//{token}/",
        "/?token={token}",
        "/x/{token}/",
        "/\u00e9/",
    ],
)
def test_requests_without_the_complete_token_are_rejected(server: ViewServer, path: str) -> None:
    asked = path.format(token=server.token, short=server.token[:-1]).encode("latin-1")
    answer = raw(server, b"GET " + (asked or b"/") + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    allowed = asked == f"//{server.token}/".encode()  # the library collapses several slashes into one
    assert answer.startswith(b"HTTP/1.1 200" if allowed else b"HTTP/1.1 403")
    assert allowed or b"step" not in answer.split(b"\r\n\r\n", 1)[1]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "evil@localhost",
        "",
        "10.0.0.1",
        "[::2]",
        "0.0.0.0",
    ],
)
def test_other_host_names_are_rejected_even_with_the_token(server: ViewServer, host: str) -> None:
    """A web page can send such requests after DNS rebinding."""
    status, _, body = ask(server, f"/{server.token}/api/changes?after=0", headers={"Host": host})
    assert status == 403
    assert b"entries" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:8765"])
def test_the_names_of_this_machine_are_accepted_with_any_port(server: ViewServer, host: str) -> None:
    assert ask(server, f"/{server.token}/", headers={"Host": host})[0] == 200


def test_a_missing_or_duplicate_host_is_rejected(server: ViewServer) -> None:
    start = f"GET /{server.token}/ HTTP/1.1\r\n".encode()
    assert raw(server, start + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 403")
    two = b"Host: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(server, start + two).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "..%2f..%2fetc/passwd",
        "api/../../../etc/passwd",
        "/etc/passwd",
        "manifest.json",
        "step_000001/gen_000.json",
        "static/main.js",
        "api/changes/../x",
        "%00",
        "api/",
    ],
)
def test_no_url_serves_a_file(server: ViewServer, path: str) -> None:
    status, _, body = ask(server, f"/{server.token}/{path}")
    assert (status, body) == (404, b"Not found.\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_allowed(server: ViewServer, variant: Path, method: str) -> None:
    before = contents(variant)
    status, headers, _ = ask(server, f"/{server.token}/", method, {"Content-Length": "0"})
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert ask(server, "/", method)[0] == 403
    assert contents(variant) == before


def test_head_returns_the_same_headers_without_a_body(server: ViewServer) -> None:
    status, headers, body = ask(server, f"/{server.token}/api/changes?after=0", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize("path", ["", "api/changes?after=0", "nothing"])
def test_every_response_has_security_headers(server: ViewServer, path: str) -> None:
    _, headers, _ = ask(server, f"/{server.token}/{path}")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"] == "rollout-skip"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "query",
    [
        "",
        "after=",
        "after=-1",
        "after=x",
        "after=1&after=2",
        "after=99999999999999999999",
        "after=1e3",
        "after=0x1",
        "after=١",
        "after=1" + 8 * "&x=1",
    ],
)
def test_invalid_numbers_are_rejected(server: ViewServer, query: str) -> None:
    from urllib.parse import quote

    assert ask(server, f"/{server.token}/api/changes?{quote(query, safe='=&')}")[0] == 400


def test_more_groups_and_whole_groups_are_served(server: ViewServer) -> None:
    status, _, body = ask(server, f"/{server.token}/api/groups?step=2&gen_batch=0&start=8")
    assert (status, len(json.loads(body)["groups"])) == (200, 4)
    status, _, body = ask(server, f"/{server.token}/api/group?step=2&gen_batch=0&number=3")
    assert (status, len(json.loads(body)["groups"][0]["responses"])) == (200, 4)
    status, _, body = ask(server, f"/{server.token}/api/groups?step=99&gen_batch=0&start=0")
    assert status == 404
    assert b"step 99, generation batch 0 is not recorded" in body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0\0\0\n\n",
        b"GET\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 70_000,
    ],
    ids=["noise", "no path", "not an HTTP method", "no version", "endless"],
)
def test_the_server_survives_malformed_requests(server: ViewServer, request_bytes: bytes) -> None:
    try:
        answer = raw(server, request_bytes)
    except ConnectionResetError:
        answer = b""
    assert b"Traceback" not in answer
    assert b"Python" not in answer
    assert ask(server, f"/{server.token}/")[0] == 200


def test_a_request_body_is_not_parsed_as_the_next_request(server: ViewServer) -> None:
    inner = f"GET /{server.token}/api/changes?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    outer = f"GET /{server.token}/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    answer = raw(server, outer + inner)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_port_in_use_is_an_error(server: ViewServer, variant: Path, capsys: Any) -> None:
    with pytest.raises(StoreError, match=f"Cannot listen on 127.0.0.1:{server.server_port}"):
        open_view(str(variant), port=server.server_port)
    assert main(["view", str(variant), "--no-browser", "--port", str(server.server_port)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["view", str(variant), "--no-browser", "--port", "99999"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["/does/not/exist"], "does not exist"), (["{variant}", "--tokenizer", "/nowhere"], "is not a tokenizer folder")],
)
def test_an_error_is_one_line_with_exit_code_2(variant: Path, capsys: Any, arguments: list[str], words: str) -> None:
    assert main(["view", "--no-browser", *(text.format(variant=variant) for text in arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert words in output.err


class Viewing:
    """``rollout-skip view`` in its own process."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "verl_rollout_skip.cli", "view", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, env={**os.environ, **(env or {})}
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()

    def stop(self, number: int) -> tuple[int, str, str]:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_view_prints_the_url_and_stops_cleanly(variant: Path, number: int) -> None:
    viewing = Viewing(str(variant), "--no-browser")
    parts = urlsplit(viewing.line)
    assert (parts.scheme, parts.hostname) == ("http", "127.0.0.1")
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=30)
    connection.request("GET", f"{parts.path}api/changes?after=0")
    assert connection.getresponse().status == 200  # the connection stays open, as in a browser
    code, output, errors = viewing.stop(number)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == "Stopped."
    connection.close()


def test_view_prints_the_url_as_json_on_the_given_port(variant: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewing = Viewing(str(variant), "--no-browser", "--json", "--port", str(port))
    assert json.loads(viewing.line)["url"].startswith(f"http://127.0.0.1:{port}/")
    assert viewing.stop(signal.SIGINT)[0] == 0


def test_the_browser_gets_the_token_through_a_file_that_only_the_user_can_read(variant: Path, tmp_path: Path) -> None:
    """Every user of the machine can read command lines."""
    seen = tmp_path / "seen"
    program = tmp_path / "browser"
    script = [
        "#!/bin/sh",
        'file="${1#file://}"',
        f'{{ stat -c %a "$(dirname "$file")"; echo "$1"; cat "$file"; }} >{seen}',
    ]
    program.write_text("\n".join(script))
    program.chmod(0o755)
    viewing = Viewing(str(variant), env={"BROWSER": str(program), "DISPLAY": ":0"})
    for _ in range(600):
        if seen.exists() and viewing.line in seen.read_text():
            break
        threading.Event().wait(0.05)
    mode, address, page = seen.read_text().split("\n", 2)
    token = urlsplit(viewing.line).path
    assert mode == "700"
    assert token not in address
    assert viewing.line in page
    viewing.stop(signal.SIGINT)
    assert not Path(address.removeprefix("file://")).exists()


def test_the_view_does_not_change_the_recording(server: ViewServer, variant: Path) -> None:
    before = contents(variant)
    for path in (
        "",
        "api/changes?after=0",
        "api/groups?step=1&gen_batch=0&start=0",
        "api/group?step=1&gen_batch=0&number=0",
    ):
        assert ask(server, f"/{server.token}/{path}")[0] == 200
    assert contents(variant) == before
    assert RolloutStore(variant).keys() == [RolloutKey(1), RolloutKey(2), RolloutKey(3)]
