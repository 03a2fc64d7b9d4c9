"""``FollowedFit``: knows when a training begins and ends, whichever class or object its ``fit`` comes from.

Many trainers replace ``fit`` with a loop of their own that never calls the one below it. So each ``fit`` is wrapped
where it is defined: in the class, on the class afterwards, or on the trainer. The outermost one that runs is the
training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from verl_rollout_skip.rollout import RolloutSkip
from verl_rollout_skip.samples import SampleLog
from verl_rollout_skip.trainers.weights import DeferredWeightSync

logger = logging.getLogger(__name__)

FIT = "fit"
_ITSELF = "_followed_fit"


class FollowedFit:
    """A base of the mixins. At the end of a training, also of one that fails, it waits for the dumps.

    What it adds to a trainer has names that no trainer has for something else.
    """

    rollout_skip: RolloutSkip
    _samples: SampleLog
    _weight_sync: DeferredWeightSync | None
    _skip_is_in_fit = False
    _skip_warned_outside_fit = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        follow_class(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        followed = functools.partial(_run, self, value) if name == FIT and callable(value) else value
        super().__setattr__(name, followed)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, getattr(super(), FIT), *args, **kwargs)


def warn_outside_fit(trainer: FollowedFit) -> None:
    """Called for each rollout step: a loop that is not ``fit`` has to close the recording itself."""
    if trainer._skip_is_in_fit or trainer._skip_warned_outside_fit or not trainer.rollout_skip.settings.mode.writes:
        return
    trainer._skip_warned_outside_fit = True
    logger.warning(
        "%s generates outside of fit, so the end of its training is not noticed: call trainer.rollout_skip.close() "
        "at the end of the loop, or steps that are not written yet are lost when Ray ends the process",
        type(trainer).__name__,
    )


def follow_class(trainer: type) -> None:
    """Wrap the ``fit`` of each class that is derived from a mixin, unless it is wrapped already."""
    for kind in trainer.__mro__:
        fit = vars(kind).get(FIT)
        if kind is FollowedFit:
            return  # its own fit calls what comes after it
        # Compared with itself, because functools.wraps copies such a mark to whatever wraps the function again.
        if fit is not None and issubclass(kind, FollowedFit) and getattr(fit, _ITSELF, None) is not fit:
            setattr(kind, FIT, _followed(fit))


def _followed(fit: Any) -> Any:
    @functools.wraps(fit)
    def followed(self: FollowedFit, *args: Any, **kwargs: Any) -> Any:
        return _run(self, fit.__get__(self, type(self)), *args, **kwargs)

    setattr(followed, _ITSELF, followed)
    return followed


def _run(trainer: FollowedFit, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if trainer._skip_is_in_fit:
        return fit(*args, **kwargs)  # called by another fit, whose end is the end of the training
    trainer._skip_is_in_fit = True
    try:
        result = fit(*args, **kwargs)
    except BaseException:
        _end_failed(trainer)
        raise
    finally:
        trainer._skip_is_in_fit = False
    _end(trainer)
    return result


def _end(trainer: FollowedFit) -> None:
    try:
        trainer._samples.close()
        if trainer._weight_sync is not None:
            trainer.rollout_skip.statistics.notes.append(trainer._weight_sync.describe())
    finally:
        trainer.rollout_skip.close()


def _end_failed(trainer: FollowedFit) -> None:
    try:
        _end(trainer)
    except Exception as error:  # the error that ended the training is the one to see
        logger.error("while the dumps were completed: %s", error)
