"""Messages about recorded rollouts that do not match a training, and about differences that do not matter."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from omegaconf import DictConfig

from verl_rollout_skip.config.modes import OnMismatch
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig
from verl_rollout_skip.errors import EntryNotFoundError, MismatchError
from verl_rollout_skip.fingerprint.fingerprint import Fingerprint, difference
from verl_rollout_skip.fingerprint.layout import gpu_layout, layout_difference, versions
from verl_rollout_skip.runs.manifest import Manifest
from verl_rollout_skip.runs.neighbors import Neighbors

logger = logging.getLogger(__name__)

_SHOWN = 8
_SHOWN_NEIGHBORS = 3

Differences = Mapping[str, list[str]]
"""How variants differ from the current settings: the lines of each, by the path of its manifest."""


def refuse_variants(settings: SkipConfig, folder: str, differences: Differences) -> None:
    """Raise if ``on_mismatch`` does not allow a new variant next to the existing ones. None of them matches."""
    if not differences:
        return
    if settings.on_mismatch is OnMismatch.REUSE:
        raise MismatchError(
            f"{BLOCK}.on_mismatch is 'reuse' and {folder} has {len(differences)} variants, none with the current "
            f"settings. Choose one by setting {BLOCK}.source to its manifest:\n{_list_variants(differences)}"
        )
    if settings.on_mismatch is OnMismatch.ERROR:
        raise MismatchError(
            f"{folder} contains rollouts recorded with different settings, and {BLOCK}.on_mismatch is 'error':\n"
            f"{_list_variants(differences)}\nUse the same settings, or set {BLOCK}.on_mismatch=new to start another "
            "variant."
        )


def explain_no_match(settings: SkipConfig, folder: str, differences: Differences, neighbors: Neighbors) -> None:
    """Raise if the mode needs recorded rollouts; otherwise log why a new variant is started."""
    # A dump_dir may contain unrelated trainings, so only the most similar of the other runs are listed.
    similar = {path: lines for path, lines in neighbors.others.items() if len(lines) <= _SHOWN}
    listed = {} if neighbors.same else {**differences, **dict(_most_similar(similar)[:_SHOWN_NEIGHBORS])}
    variants = _list_variants(listed)
    found = "\n".join(part for part in (variants, neighbors.describe()) if part)
    if not settings.mode.generates:
        raise _no_match_error(settings.mode.value, folder, found, is_empty=not differences)
    if variants:
        logger.info("no recorded rollouts match, so a new variant is started; the differences:\n%s", variants)
    if neighbors.same or neighbors.notes:
        logger.warning("nothing recorded in %s matches, so every step is generated. %s", folder, neighbors.describe())


def _no_match_error(mode: str, folder: str, found: str, is_empty: bool) -> EntryNotFoundError | MismatchError:
    if not is_empty:
        return MismatchError(
            f"Mode {mode!r} loads recorded rollouts, but those in {folder} were recorded with different settings:\n"
            f"{found}\nUse the same settings, or use these rollouts anyway with {BLOCK}.on_mismatch=reuse."
        )
    return EntryNotFoundError(
        f"Mode {mode!r} loads recorded rollouts, but nothing is recorded in {folder}."
        + (f" Nearby:\n{found}\n" if found else " ")
        + f"Record first ({BLOCK}.mode=cache), or check {BLOCK}.dump_dir and the settings in the folder's name: "
        "trainer.experiment_name, trainer.project_name, data.train_batch_size, data.gen_batch_size and "
        "actor_rollout_ref.rollout.n."
    )


def report_differences(manifest: Manifest, fingerprint: Fingerprint, config: DictConfig) -> None:
    """Log what differs between the recording and this training although its rollouts match."""
    layout = layout_difference(manifest.gpu_layout, gpu_layout(config))
    if layout:
        logger.info(
            "%s was recorded on a different layout, which does not affect the rollouts:\n%s",
            manifest.folder,
            indented(layout),
        )
    software = difference(manifest.versions, versions())
    if software:
        logger.info("%s was recorded with different versions:\n%s", manifest.folder, indented(software))
    training = difference(manifest.training, fingerprint.training)
    if training:
        logger.warning(
            "the training differs from the one that recorded %s, so those rollouts are off-policy from the second step "
            "on:\n%s",
            manifest.folder,
            indented(training),
        )


def all_differences(manifest: Manifest, fingerprint: Fingerprint, config: DictConfig) -> list[str]:
    """Everything that is known to differ between a recording and this training, one line each."""
    return [
        *difference(manifest.fingerprint, fingerprint.rollout),
        *difference(manifest.versions, versions()),
        *layout_difference(manifest.gpu_layout, gpu_layout(config)),
        *difference(manifest.training, fingerprint.training),
    ]


def indented(lines: list[str]) -> str:
    """Differences as part of a message: one line each, the first few only."""
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  {line}" for line in lines[:_SHOWN]] + more)


def _list_variants(differences: Differences) -> str:
    return "\n".join(f"{path}:\n{indented(lines)}" for path, lines in _most_similar(differences))


def _most_similar(differences: Differences) -> list[tuple[str, list[str]]]:
    return sorted(differences.items(), key=lambda item: len(item[1]))
