"""Headless Chromium for tests, controlled through its debugging pipe.

The DevTools protocol runs over two pipes, so there is no open port and nothing to install except the browser. ``Page``
uses mouse and keyboard events like a user, and collects errors, policy violations, dialogs and requests.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # not available to root; only this project's own pages are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "Backspace": ("Backspace", 8, ""),
}
WAIT_S = 30.0


class Browser:
    """One Chromium process."""

    def __init__(self) -> None:
        program = shutil.which("chromium")
        if program is None:
            raise RuntimeError("These tests need Chromium: apt-get install chromium.")
        self._home = tempfile.mkdtemp(prefix="rollout-skip-browser-")
        from_browser, to_us = _high_pipe()
        from_us, to_browser = _high_pipe()
        self._log = Path(self._home, "log")
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self.pid = os.posix_spawn(
            program,
            [program, *_FLAGS, f"--user-data-dir={self._home}/profile"],
            {**os.environ, "HOME": self._home},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, from_us, 3),
                (os.POSIX_SPAWN_DUP2, to_us, 4),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setpgroup=0,
        )
        for fd in (from_us, to_us, log):
            os.close(fd)
        self._out, self._in = os.fdopen(from_browser, "rb", 0), os.fdopen(to_browser, "wb", 0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, name="browser", daemon=True)
        self._reader.start()

    @contextmanager
    def page(self, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Page]:
        """A new tab with an empty profile."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        asked = {"url": "about:blank", "browserContextId": context, "width": width, "height": height}
        target = self.call("Target.createTarget", **asked)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.start(width, height, dark)
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)
            self.call("Target.disposeBrowserContext", browserContextId=context)
            del self._pages[session]

    def call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if session is not None:
            message["sessionId"] = session
        answers = self._answers[number] = Queue()
        self._in.write(json.dumps(message).encode() + b"\0")
        try:
            answer = answers.get(timeout=WAIT_S)
        except Empty:
            raise TimeoutError(f"The browser did not answer {method}. Its log: {self._log_end()}") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """Stop the browser and all its processes."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(self.pid, 0)
        self._reader.join(10)
        self._in.close()
        self._out.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _read(self) -> None:
        pending = b""
        while piece := self._out.read(1 << 16):
            *messages, pending = (pending + piece).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    answers = self._answers.get(message["id"])
                    if answers is not None:
                        answers.put(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].on_event(message["method"], message["params"])

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


class Page:
    """A tab. ``problems`` lists errors and violations, ``requests`` every requested URL."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.requests: list[str] = []

    def start(self, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.prefer("dark" if dark else "light")

    def prefer(self, scheme: str) -> None:
        """Emulate the system's light or dark color scheme."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Open a URL and wait until the page is ready."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        """Evaluate an expression on the page; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = WAIT_S) -> Any:
        """Wait until an expression is true and return its value."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if found:
                return found
            assert time.monotonic() < deadline, f"never true: {script}; problems: {self.problems}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        found = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    def texts(self, selector: str) -> list[str]:
        found = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        assert isinstance(found, list)
        return found

    def click(self, selector: str) -> None:
        """Click on the center of an element, which must be visible and not covered."""
        quoted = json.dumps(selector)
        center = self.run(
            f"(() => {{ const e = document.querySelector({quoted}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); const p = [b.x + b.width / 2, b.y + b.height / 2];"
            "const hit = document.elementFromPoint(...p); return e.contains(hit) || hit?.contains(e) ? p : null })()"
        )
        assert center, f"{selector} is covered or not visible"
        self.move(*center)
        for kind in ("mousePressed", "mouseReleased"):
            point = {"x": center[0], "y": center[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **point)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, selector: str, text: str) -> None:
        """Replace the text in a field."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.press("Backspace")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key in the focused element."""
        name, code, text = _KEYS.get(key, (key, ord(key[0].upper()), key))
        described = {"key": name, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **described)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def screenshot(self, whole: bool = False) -> bytes:
        """A screenshot of the page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **arguments)

    def on_event(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {parameters['exceptionDetails']}")
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {parameters['args']}")
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {parameters['entry']}")
        elif event == "Audits.issueAdded":
            self.problems.append(f"issue: {parameters['issue']}")
        elif event == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {parameters['message']}")
            threading.Thread(target=lambda: self.call("Page.handleJavaScriptDialog", accept=False)).start()


def _high_pipe() -> tuple[int, int]:
    """A pipe whose file descriptors differ from those that the browser expects, 3 and 4."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
