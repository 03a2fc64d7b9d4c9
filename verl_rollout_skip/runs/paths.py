"""Names in a variant folder, and the interpretation of paths to it.

::

    {dump_dir}/{run}/{variant}/
        manifest.json   trainings/   ledgers/   columns/   tokenizer/   pins/   partial/   step_000001/ …
"""

from __future__ import annotations

MANIFEST = "manifest.json"
TRAININGS = "trainings"
LEDGERS = "ledgers"
TOKENIZER = "tokenizer"
PINS = "pins"
PARTIAL = "partial"
COLUMNS = "columns"


def variant_name(config_hash: str) -> str:
    """The name of the variant folder for rollouts with this fingerprint."""
    return config_hash[:12]


def variant_folder(path: str) -> str:
    """The variant folder that a user's path refers to: the path itself, or the folder of the manifest it names."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name == MANIFEST:
        return folder or ("/" if path.startswith("/") else ".")
    return path.rstrip("/") or "/"
