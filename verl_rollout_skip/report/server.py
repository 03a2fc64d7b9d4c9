"""The server of the live view: reachable only from this machine, protected by a token, read-only.

Every request must name a loopback host, which prevents DNS rebinding, and contain the token in its path. There are four
fixed URLs; nothing in a request becomes a file path.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from verl_rollout_skip.errors import EntryNotFoundError, RolloutSkipError, StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.collect import script_json
from verl_rollout_skip.report.follow import Follower
from verl_rollout_skip.report.page import policy, render_live_page

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_MORE_GROUPS = 32
_MAX_NUMBER = 2**53
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


class ViewServer(ThreadingHTTPServer):
    """Serves one variant at ``url`` until ``close`` is called."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, follower: Follower, port: int = 0) -> None:
        self.follower = follower
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"Cannot listen on {HOST}:{port}: {reason}. Choose another port with --port.") from error
        follower.start()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer.server_bind would look up the host name with DNS
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def close(self) -> None:
        """Stop following and close the socket."""
        self.server_close()
        self.follower.stop()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection failed", exc_info=True)


class _RequestError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        try:
            path, query = self._authorize()
            if self.command not in ("GET", "HEAD"):
                raise _RequestError(405, "This server is read-only: use GET or HEAD.")
            content_type, body = self._respond(path, query)
            self._send(200, content_type, body)
        except _RequestError as error:
            self._send(error.status, _TEXT, f"{error}\n".encode())
        except EntryNotFoundError as error:
            self._send(404, _TEXT, f"{error}\n".encode("utf-8", "backslashreplace"))
        except (RolloutSkipError, OSError, ValueError) as error:
            logger.debug("a request failed", exc_info=True)
            self._send(500, _TEXT, f"{error}\n".encode("utf-8", "backslashreplace"))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_GET

    def _authorize(self) -> tuple[str, str]:
        """Check host and token, and return the path after the token and the query."""
        # Bodies are not read, and must not be parsed as the next request.
        self.close_connection = self.close_connection or "Content-Length" in self.headers
        self.close_connection = self.close_connection or "Transfer-Encoding" in self.headers
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0].strip()):
            raise _RequestError(403, "This server only accepts requests to 127.0.0.1, ::1 or localhost.")
        parts = urlsplit(self.path)
        _, _, rest = parts.path.partition("/")
        token, slash, path = rest.partition("/")
        given = token.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self.server.token.encode()) or not slash:
            raise _RequestError(403, "The URL must contain the token that rollout-skip view printed.")
        return path, parts.query

    def _respond(self, path: str, query: str) -> tuple[str, bytes]:
        follower = self.server.follower
        try:
            parameters = parse_qs(query, max_num_fields=8)
        except ValueError as error:
            raise _RequestError(400, f"Invalid query: {error}.") from error

        def number(name: str) -> int:
            values = parameters.get(name, [])
            if len(values) != 1 or not re.fullmatch(r"[0-9]{1,16}", values[0]) or int(values[0]) > _MAX_NUMBER:
                raise _RequestError(400, f"{name} must be a single integer.")
            return int(values[0])

        def key() -> RolloutKey:
            return RolloutKey(number("step"), number("gen_batch"))

        routes: dict[str, Callable[[], tuple[str, bytes]]] = {
            "": lambda: (_HTML, self._page()),
            "api/changes": lambda: (_JSON, follower.changes(number("after")).encode()),
            "api/groups": lambda: (_JSON, _encode(follower.views.more_groups(key(), number("start"), _MORE_GROUPS))),
            "api/group": lambda: (_JSON, _encode(follower.views.whole_group(key(), number("number")))),
        }
        if path not in routes:
            raise _RequestError(404, "Not found.")
        return routes[path]()

    def _page(self) -> bytes:
        head = self.server.follower.variant.head(self.server.follower.sampling)
        return render_live_page(script_json({**head, "live": True, "left_out": []}))

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        if status == 405:
            headers["Allow"] = "GET, HEAD"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by http.server for malformed requests and unknown methods."""
        self.close_connection = True
        self._send(code, _TEXT, b"Bad request.\n")

    def version_string(self) -> str:
        return "rollout-skip"

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug(format, *arguments)  # only at debug level, because the path contains the token


def _encode(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
