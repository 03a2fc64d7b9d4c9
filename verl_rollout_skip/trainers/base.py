"""``SkipMixin``: what the mixins of both trainer families share.

It checks the host trainer and opens the recording before anything starts, follows ``fit``, and rejects a class whose
bases are in the wrong order, because its mixin would never run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl_rollout_skip.config import SkipConfig
from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.messages import show_messages
from verl_rollout_skip.modes import Mode
from verl_rollout_skip.rollout import RolloutSkip
from verl_rollout_skip.samples import SampleLog
from verl_rollout_skip.trainers.fit import FIT, FollowedFit, follow_class


class SkipMixin(FollowedFit):
    """Name a mixin before the trainer: ``class MyTrainer(RolloutSkipMixin, RayPPOTrainer)``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_base_order(cls)

    def _open_rollout_skip(self, config: DictConfig, check_trainer: Callable[[type], None]) -> None:
        """Read the settings, check the trainer and find the recording. Raises before anything starts."""
        show_messages()
        follow_class(type(self))
        if SkipConfig.from_config(config).mode is not Mode.OFF:
            check_trainer(type(self))
        self.rollout_skip = RolloutSkip.open(config, trainer=type(self))
        self._samples = SampleLog(config, self.rollout_skip.settings.log_samples)
        self._weight_sync = None

    @property
    def _is_on(self) -> bool:
        return self.rollout_skip.settings.mode is not Mode.OFF


def _check_base_order(trainer: type) -> None:
    """Raise if a trainer is named before the mixin, whose methods would then never run."""
    before = trainer.__mro__[: trainer.__mro__.index(SkipMixin)]
    for kind in before:
        if FIT in vars(kind) and not issubclass(kind, SkipMixin):
            named = next((base for base in trainer.__bases__ if issubclass(base, kind)), kind).__name__
            raise UnsupportedTrainerError(
                f"{trainer.__name__} names {named} before RolloutSkipMixin, whose methods then never run. "
                f"Write class {trainer.__name__}(RolloutSkipMixin, {named})."
            )
