"""Recorded rollouts as an HTML page: ``build_report`` and ``write_report`` write a file, ``open_view`` serves it.

The page is self-contained. Model output is untrusted and is never interpreted as markup.
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
    """Create a server for one variant folder on the loopback interface.

    ``serve_forever`` runs it, ``close`` stops it, and ``url`` is its address including the token. ``port`` 0 selects
    any free port. ``wanted`` decides which rollout steps are shown.
    """
    follower = Follower(OpenVariant.open(folder, tokenizer), sampling or Sampling(), wanted)
    return ViewServer(follower, port)
