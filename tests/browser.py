"""A real browser for tests: Debian's Chromium without a window, driven through its debugging pipe.

The protocol (CDP) goes over two pipes that only this process has: no port, no driver program whose version must fit,
and nothing to install but the browser. ``Page`` acts as a person does, with a mouse and a keyboard, and keeps what must
not happen: errors, violations of the policy, dialogs, and every request.
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
    "--no-sandbox",  # root has none, and what is opened is this project's own
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
        """A tab of its own, with nothing kept from others."""
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
        """One command, and its answer."""
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
        """End the browser and everything that it started."""
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
                    self._pages[message["sessionId"]].notice(message["method"], message["params"])

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


class Page:
    """A tab. ``problems`` lists what must not happen, ``requests`` every address that was asked for."""

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
        """What the system asks for: a light or a dark look."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Go to an address and wait until the page has drawn itself."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = WAIT_S) -> Any:
        """Wait until an expression is true; returns its value."""
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
        """Click in the middle of an element with the mouse, as a person can: it must be there to be hit."""
        quoted = json.dumps(selector)
        place = self.run(
            f"(() => {{ const e = document.querySelector({quoted}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); const p = [b.x + b.width / 2, b.y + b.height / 2];"
            "const hit = document.elementFromPoint(...p); return e.contains(hit) || hit?.contains(e) ? p : null })()"
        )
        assert place, f"{selector} is covered or not visible"
        self.move(*place)
        for kind in ("mousePressed", "mouseReleased"):
            point = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **point)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.press("Backspace")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key, wherever the focus is."""
        name, code, text = _KEYS.get(key, (key, ord(key[0].upper()), key))
        described = {"key": name, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **described)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def screenshot(self, whole: bool = False) -> bytes:
        """What the page looks like, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **arguments)

    def notice(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {told['exceptionDetails']}")
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {told['args']}")
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {told['entry']}")
        elif event == "Audits.issueAdded":
            self.problems.append(f"issue: {told['issue']}")
        elif event == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {told['message']}")
            threading.Thread(target=lambda: self.call("Page.handleJavaScriptDialog", accept=False)).start()


def _high_pipe() -> tuple[int, int]:
    """A pipe whose numbers are out of the way of those that the browser expects, 3 and 4."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
