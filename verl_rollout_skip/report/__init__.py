"""Recorded rollouts as a page for people: ``build_report`` and ``write_report`` make a file, ``open_view`` a live view.

The page is one HTML document that loads nothing. Model output is hostile text and is never taken for markup.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.collect import OpenVariant, Report, build_report
from verl_rollout_skip.report.follow import Follower
from verl_rollout_skip.report.page import render_page, write_report
from verl_rollout_skip.report.sampling import Sampling
from verl_rollout_skip.report.server import ViewServer

__all__ = ["Report", "Sampling", "ViewServer", "build_report", "open_view", "render_page", "write_report"]


def open_view(
    folder: str,
    *,
    sampling: Sampling | None = None,
    tokenizer: str | None = None,
    port: int = 0,
    wanted: Callable[[RolloutKey], bool] = lambda key: True,
) -> ViewServer:
    """A server for one variant folder on this machine's loopback; ``serve_forever`` runs it, ``close`` ends it.

    ``port`` 0 takes any free one; ``url`` is the address with its token. ``wanted`` tells which rollout steps to show.
    """
    follower = Follower(OpenVariant.open(folder, tokenizer), sampling or Sampling(), wanted)
    return ViewServer(follower, port)
