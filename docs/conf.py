"""Sphinx settings; build with `make docs`."""

from importlib.metadata import version as installed_version

project = "verl-rollout-skip"
author = "the verl-rollout-skip authors"
release = installed_version("verl-rollout-skip")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"{project} {release}"
