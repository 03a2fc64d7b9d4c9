"""``rollout-skip view``: serves the page of ``report`` on this machine and updates it while a training records."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, number_option, path_argument, wants_json
from verl_rollout_skip.cli.commands.report import Page, page_options
from verl_rollout_skip.cli.output import print_line


@click.command(
    cls=Command,
    examples="rollout-skip view /data/dumps/RUN/VARIANT\n"
    "rollout-skip view /data/dumps/RUN/VARIANT --port 8765 --no-browser\n"
    "                   then, on another machine: ssh -L 8765:127.0.0.1:8765 HOST",
)
@path_argument()
@number_option("--port", "default: any free port", 0)
@click.option("--no-browser", is_flag=True, help="print the URL, but do not open a browser")
@page_options(groups="8")
def command(page: Page, port: int, no_browser: bool) -> Result:
    """Show recorded rollouts in the browser, updated while a training records.

    The server is reachable only from this machine, requires the token in the URL, and is read-only. Stop it with
    Ctrl-C.
    """
    from verl_rollout_skip.report import open_view

    variant = page.variant
    server = open_view(
        variant.path, sampling=page.sampling, tokenizer=page.tokenizer, port=port, wanted=page.selection.includes
    )
    opened = None
    try:
        _stop_on_signals(server)
        print(json.dumps({"url": server.url}) if wants_json() else f"{server.url}\nPress Ctrl-C to stop.", flush=True)
        opened = None if no_browser else _open_browser(server.url)
        server.serve_forever(poll_interval=0.2)
    finally:
        server.close()
        if opened is not None:
            shutil.rmtree(opened, ignore_errors=True)
    return Result({"path": variant.path, "stopped": True}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    print_line(console, "Stopped.")


def _stop_on_signals(server: Any) -> None:
    """Make Ctrl-C and SIGTERM end the server loop cleanly."""

    def stop(number: int, frame: Any) -> None:
        # shutdown waits for the loop, which runs on this thread.
        threading.Thread(target=server.shutdown, daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def _open_browser(url: str) -> str | None:
    """Open the URL through a file that only this user can read. Returns the folder that contains the file.

    If the URL were an argument of the browser, every user of the machine could see its token.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return None
    folder = tempfile.mkdtemp(prefix="rollout-skip-")
    page = Path(folder, "open.html")
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><title>Rollouts</title>')
    webbrowser.open(page.as_uri())
    return folder
