"""``SkipMixin``: the base class of the V0 and V1 mixins.

It reads the settings, checks the host trainer and opens the recording before anything starts. It then numbers the
rollout steps, raises if nothing is recorded or replayed, and closes the recording when ``fit`` ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.config.skip_config import BLOCK, SkipConfig
from verl_rollout_skip.errors import InertError, UnsupportedTrainerError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.rollout import RolloutSkip
from verl_rollout_skip.replay.sources import Loader
from verl_rollout_skip.trainers.compat import LoggedMetrics, observe_metrics
from verl_rollout_skip.trainers.console import show_messages
from verl_rollout_skip.trainers.fit import FIT, FitHooks, wrap_fit
from verl_rollout_skip.trainers.samples import SampleLog
from verl_rollout_skip.trainers.weights import DeferredWeightSync

logger = logging.getLogger(__name__)


class KeyCounter:
    """Numbers the rollout steps of a training: a key is the training step and the generation batch within it.

    ``start`` is the step of the checkpoint that the training resumes from, 0 without one, None if it is unknown.
    """

    def __init__(self, start: int | None = None) -> None:
        self._start = start
        self._gen_batches: Counter[int] = Counter()

    def __contains__(self, step: int) -> bool:
        return step in self._gen_batches

    def next_key(self, step: int) -> RolloutKey:
        """The key of the next rollout step in a training step."""
        key = RolloutKey(step, self._gen_batches[step])
        self._gen_batches[step] += 1
        return key

    def first_without_rollout(self, end: int) -> int | None:
        """The first training step before ``end`` that had no rollout step; None if all had one."""
        start = min(self._gen_batches, default=1) - 1 if self._start is None else self._start
        return next((step for step in range(start + 1, end) if step not in self), None)


class SkipMixin(FitHooks):
    """The mixin must precede the trainer: ``class MyTrainer(RolloutSkipMixin, RayPPOTrainer)``."""

    rollout_skip: RolloutSkip
    _samples: SampleLog
    _weight_sync: DeferredWeightSync | None
    _rollout_keys: KeyCounter
    _logged_metrics: LoggedMetrics | None = None
    _skip_warned_outside_fit = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_base_order(cls)

    def _open_rollout_skip(
        self,
        config: DictConfig,
        check_trainer: Callable[[type], None],
        resume_hint: str | None = "",
        loader: Loader | None = None,
    ) -> None:
        """Read the settings, check the trainer and find the recording. Raises before anything starts."""
        show_messages()
        wrap_fit(type(self))
        if SkipConfig.from_config(config).mode is not Mode.OFF:
            check_trainer(type(self))
        self.rollout_skip = RolloutSkip.open(config, type(self), resume_hint, loader)
        self._samples = SampleLog(config, self.rollout_skip.settings.log_samples)
        self._weight_sync = None
        self._rollout_keys = KeyCounter()

    def _report_off(self, config: DictConfig) -> None:
        """Log that nothing is recorded or replayed, and how to change that."""
        logger.info(
            "%s records and replays nothing, because %s. To record, set %s.mode=cache and %s.dump_dir (with a plus "
            "sign if the configuration has no such block).",
            type(self).__name__,
            f"{BLOCK}.mode is off" if BLOCK in config else f"the configuration has no block {BLOCK}",
            BLOCK,
            BLOCK,
        )

    @property
    def _is_on(self) -> bool:
        return self.rollout_skip.settings.mode is not Mode.OFF

    @property
    def _rollout_call(self) -> str:
        """The call in verl's loop that the mixin replaces, for messages."""
        raise NotImplementedError

    def _next_key(self, step: int) -> RolloutKey:
        """The key of the rollout step that starts now. A loop other than ``fit`` must close the recording itself."""
        if not self._skip_is_in_fit and not self._skip_warned_outside_fit and self.rollout_skip.settings.mode.writes:
            self._skip_warned_outside_fit = True
            logger.warning(
                "%s generates outside of fit, so the end of the training is not detected: call "
                "trainer.rollout_skip.close() at the end of the loop, or steps that are not written yet are lost when "
                "Ray ends the process",
                type(self).__name__,
            )
        return self._rollout_keys.next_key(step)

    def _check_rollout_step(self, step: int) -> None:
        """Raise if a training step had no rollout step, because nothing would be recorded or replayed."""
        if self._is_on and step not in self._rollout_keys:
            raise InertError(
                f"Step {step} has no rollout step that goes through {type(self).__name__}: its loop does not call "
                f"{self._rollout_call}, so nothing is recorded or replayed. Derive from a trainer whose loop does, or "
                "call RolloutSkip.step in your own loop (docs/configuration.md)."
            )

    def _start_training(self) -> None:
        self._rollout_keys = KeyCounter()
        if self._is_on:
            self._logged_metrics = observe_metrics(self.rollout_skip.ledger.observe_metrics)

    def _end_training(self) -> None:
        self._close_recording()

    def _end_failed_training(self) -> None:
        self.rollout_skip.ledger.fail()
        try:
            self._close_recording()
        except Exception as error:  # the error that ended the training is more important
            logger.error("while waiting for the dumps: %s", error)

    def _close_recording(self) -> None:
        if self._logged_metrics is not None:
            self._logged_metrics.stop()
        try:
            self._samples.close()
        finally:
            self.rollout_skip.close(note=None if self._weight_sync is None else self._weight_sync.describe())


def _check_base_order(trainer: type) -> None:
    """Raise if a trainer precedes the mixin, because the mixin's methods would never run."""
    before = trainer.__mro__[: trainer.__mro__.index(SkipMixin)]
    for kind in before:
        if FIT in vars(kind) and not issubclass(kind, SkipMixin):
            named = next((base for base in trainer.__bases__ if issubclass(base, kind)), kind).__name__
            raise UnsupportedTrainerError(
                f"{trainer.__name__} names {named} before RolloutSkipMixin, whose methods then never run. "
                f"Write class {trainer.__name__}(RolloutSkipMixin, {named})."
            )
