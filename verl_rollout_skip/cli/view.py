"""``rollout-skip view``: the page of ``report`` from a server on this machine, while the training goes on recording."""

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
from verl_rollout_skip.cli.report import Page, page_options
from verl_rollout_skip.cli.text import line


@click.command(
    cls=Command,
    examples="rollout-skip view /data/dumps/RUN/VARIANT\n"
    "rollout-skip view /data/dumps/RUN/VARIANT --port 8765 --no-browser\n"
    "                   then, from elsewhere: ssh -L 8765:127.0.0.1:8765 HOST",
)
@path_argument()
@number_option("--port", "default: any that is free", 0)
@click.option("--no-browser", is_flag=True, help="print the address and open nothing")
@page_options(groups="8")
def command(page: Page, port: int, no_browser: bool) -> Result:
    """Show recorded rollouts in the browser and follow a training while it records.

    The server answers only on this machine, only to those who know the token in the address, and only reads. Ctrl-C
    stops it.
    """
    from verl_rollout_skip.report import open_view

    variant = page.variant
    server = open_view(
        variant.path, sampling=page.sampling, tokenizer=page.tokenizer, port=port, wanted=page.place.means
    )
    opened = None
    try:
        _stop_on_signals(server)
        print(json.dumps({"url": server.url}) if wants_json() else f"{server.url}\nCtrl-C stops it.", flush=True)
        opened = None if no_browser else _open_browser(server.url)
        server.serve_forever(poll_interval=0.2)
    finally:
        server.close()
        if opened is not None:
            shutil.rmtree(opened, ignore_errors=True)
    return Result({"path": variant.path, "stopped": True}, render)


def render(console: Console, data: dict[str, Any]) -> None:
    line(console, "Stopped.")


def _stop_on_signals(server: Any) -> None:
    """Ctrl-C and SIGTERM end the loop in an orderly way, whatever it is doing."""

    def stop(number: int, frame: Any) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for the loop, which is below us

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


def _open_browser(url: str) -> str | None:
    """Open the address through a file that only this user can read; returns the folder of that file.

    On a command line the address, and with it the token, could be seen by every user of the machine.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return None
    folder = tempfile.mkdtemp(prefix="rollout-skip-")
    page = Path(folder, "open.html")
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><title>Rollouts</title>')
    webbrowser.open(page.as_uri())
    return folder
