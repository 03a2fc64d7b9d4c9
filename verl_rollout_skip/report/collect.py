"""Reads the rollout steps of a variant into a ``Report``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from verl_rollout_skip._version import __version__
from verl_rollout_skip.errors import EntryNotFoundError, ManifestError, RolloutSkipError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.report.entry_view import Counted, EntryView, EntryViews, Json, broken_view
from verl_rollout_skip.report.mismatch_view import find_mismatch, mismatch_view, step_statistics
from verl_rollout_skip.report.sampling import Sampling
from verl_rollout_skip.report.tokens import TokenTexts, find_token_texts
from verl_rollout_skip.runs.manifest import Manifest, read_manifest
from verl_rollout_skip.store.reader import EntryRecord, StoreReader
from verl_rollout_skip.tools.stats import configured_limit

# Characters that could end the script element or a line of JavaScript, or that UTF-8 cannot encode.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_FACTS = {
    "model": "actor_rollout_ref.model.path",
    "engine": "actor_rollout_ref.rollout.name",
    "samples per prompt": "actor_rollout_ref.rollout.n",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "advantage": "algorithm.adv_estimator",
}

Progress = Callable[[list[RolloutKey]], Iterable[RolloutKey]]


@dataclass(frozen=True)
class OpenVariant:
    """A variant folder with its manifest and tokenizer."""

    entries: StoreReader
    manifest: Manifest | None
    manifest_error: str | None
    texts: TokenTexts

    @classmethod
    def open(cls, folder: str, tokenizer: str | None = None) -> OpenVariant:
        """Read the manifest and find a tokenizer. A damaged manifest is shown as a problem."""
        entries = StoreReader.at(folder)
        manifest, error = None, None
        try:
            manifest = read_manifest(entries.storage)
        except ManifestError as bad:
            error = str(bad)
        return cls(entries, manifest, error, find_token_texts(folder, manifest, tokenizer))

    def views(self, sampling: Sampling) -> EntryViews:
        return EntryViews(self.entries, self.texts, sampling, configured_limit(self.manifest))

    def head(self, sampling: Sampling) -> Json:
        """The metadata of the recording that the page shows at the top."""
        manifest, where = self.manifest, self.entries.storage.where().rstrip("/")
        parts = where.split("/")
        facts = [] if manifest is None else [[name, _setting(manifest, key)] for name, key in _FACTS.items()]
        facts += [] if manifest is None else [["layout", manifest.devices], ["verl", manifest.versions.get("verl")]]
        facts.append(["tokenizer", self.texts.source or f"none, so token ids are shown: {self.texts.no_tokenizer}"])
        return {
            "run": parts[-2] if manifest is None and len(parts) > 1 else manifest.run_name if manifest else where,
            "variant": parts[-1],
            "path": where,
            "recorded_at": None if manifest is None else manifest.created_at,
            "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "made_by": f"verl-rollout-skip {__version__}",
            "facts": [[name, str(value)] for name, value in facts if value is not None],
            "has_tokenizer": self.texts.source is not None,
            "no_tokenizer": self.texts.no_tokenizer,
            "problems": [] if self.manifest_error is None else [self.manifest_error],
            "sampling": {"seed": sampling.seed, "responses": sampling.responses, "tokens": sampling.tokens},
        }


@dataclass
class Report:
    """The content of a page: ``head`` describes the recording, ``entries`` has the JSON text of each rollout step."""

    head: Json
    entries: list[str] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    broken: list[tuple[RolloutKey, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, view: EntryView) -> None:
        self.entries.append(script_json(view.json))
        self.counted.add(view.counted)
        if view.broken is not None:
            self.broken.append((view.key, view.broken))


def build_report(
    folder: str,
    *,
    sampling: Sampling | None = None,
    keys: Sequence[RolloutKey] | None = None,
    tokenizer: str | None = None,
    progress: Progress = iter,
) -> Report:
    """Read a variant folder (DUMP_DIR/RUN_NAME/VARIANT; a path or a URL) into a report.

    ``keys`` are the rollout steps to read, by default all. ``tokenizer`` is a folder to use instead of the recorded
    tokenizer. ``progress`` wraps the keys in an iterator, for example a progress bar.
    """
    sampling = sampling or Sampling()
    variant = OpenVariant.open(folder, tokenizer)
    every = variant.entries.keys()
    wanted = every if keys is None else sorted(set(keys))
    if not wanted:
        raise EntryNotFoundError(f"{variant.entries.storage.where()} contains no rollouts to report.")
    report = Report(variant.head(sampling))
    records: dict[RolloutKey, EntryRecord] = {}
    for key in wanted:
        try:
            records[key] = variant.entries.record(key)
        except (RolloutSkipError, OSError) as error:
            report.add(broken_view(key, error))
    shares = dict(zip(records, sampling.groups_of_each(list(records.values())), strict=True))
    views, mismatch = variant.views(sampling), _add_mismatch(report, folder, variant, wanted)
    for key in progress(list(records)):
        view = views.view(key, shares[key])
        if key.gen_batch == 0 and view.broken is None:
            view.json["statistics"].update(mismatch.get(key.step, {}))
        report.add(view)
    report.left_out = left_out(report.counted, sampling, len(wanted), len(every), len(report.broken))
    return report


def _add_mismatch(report: Report, folder: str, variant: OpenVariant, keys: Sequence[RolloutKey]) -> dict[int, Json]:
    """Add the section about the mismatch of rollout and trainer, and return what the charts show by step."""
    try:
        found = find_mismatch(folder, keys, variant.manifest)
    except EntryNotFoundError:
        return {}  # there are columns, but not of these steps
    except (RolloutSkipError, OSError) as error:
        report.head["problems"].append(f"training columns: {error}")
        return {}
    if found is None:
        return {}
    report.head["mismatch"] = mismatch_view(found, variant.texts)
    return step_statistics(found)


def left_out(counted: Counted, sampling: Sampling, read: int, recorded: int, broken: int) -> list[str]:
    """Sentences that say what the page omits."""
    notes = []
    if read < recorded:
        notes.append(f"{recorded - read:,} of {recorded:,} recorded rollout steps are not selected.")
    if broken:
        notes.append(f"{broken:,} of {read:,} rollout steps cannot be read. They are listed but not counted.")
    if counted.shown_groups < counted.groups:
        notes.append(
            f"The charts and the table count all {counted.rows:,} responses. {counted.shown_groups:,} of "
            f"{counted.groups:,} groups are shown with text, selected by prompt with seed {sampling.seed}."
        )
    if counted.shown_responses < counted.shown_group_rows:
        names = {1: "Only the best response", 2: "Only the best and the worst response"}
        shown = names.get(sampling.responses, f"Only {sampling.responses} responses, from the best to the worst,")
        verb = "is" if sampling.responses == 1 else "are"
        notes.append(f"{shown} of each group {verb} shown with text.")
    if counted.cut_texts:
        notes.append(
            f"{counted.cut_texts:,} texts with more than {sampling.tokens:,} tokens are cut to their beginning and "
            "their end. Search does not cover the omitted tokens."
        )
    return notes


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element and in JavaScript, even if it contains hostile text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _setting(manifest: Manifest, key: str) -> Any:
    node: Any = manifest.config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node
