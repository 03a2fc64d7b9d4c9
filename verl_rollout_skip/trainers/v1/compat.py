"""Which of verl's V1 trainers a class is made of."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_rollout_skip.errors import UnsupportedTrainerError
from verl_rollout_skip.trainers.fit import explain_unfollowable, find_fit
from verl_rollout_skip.trainers.plugin import MODES

SYNC = "sync"
SKIP = "skip_"
SUPPORTED = "0.9.1"


def check_bases(trainer: type, mixin: type) -> None:
    """Raise if a trainer is named before the mixin, whose methods would then never run."""
    places = {kind: place for place, kind in enumerate(trainer.__mro__)}
    for kind, place in places.items():
        if place < places[mixin] and not issubclass(kind, mixin) and "fit" in vars(kind):
            named = next((base for base in trainer.__bases__ if issubclass(base, kind)), kind).__name__
            raise TypeError(
                f"{trainer.__name__} names {named} before {mixin.__name__}, whose methods then never run. "
                f"Write class {trainer.__name__}({mixin.__name__}, {named})."
            )


def check_fit(trainer: type) -> None:
    """Raise if the end of a training cannot be noticed."""
    reason = explain_unfollowable(find_fit(trainer))
    if reason is not None:
        raise UnsupportedTrainerError(
            f"{trainer.__name__} cannot be recorded or replayed: its fit {reason}. Give it a fit that returns when the "
            "training is done."
        )


def use_skip_trainer(config: DictConfig) -> None:
    """Let verl choose the trainer with recorded rollouts for the mode that a configuration names. A mode that is not
    one of verl's own is the name of somebody's trainer, and stays."""
    mode = f"{SKIP}{config.trainer.v1.trainer_mode}"
    if mode in MODES:
        config.trainer.v1.trainer_mode = mode


def base_mode(trainer: type) -> str:
    """The trainer mode under which verl knows the trainer that a class adds recorded rollouts to."""
    import verl
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_rollout_skip.trainers.v1.mixin import RolloutSkipMixin

    if verl.__version__ != SUPPORTED:
        raise UnsupportedTrainerError(
            f"verl {verl.__version__} is installed, and where its V1 trainers generate is known here for {SUPPORTED} "
            "only. Install that one, or a later version of verl-rollout-skip."
        )
    names = {kind: name for name, kind in TRAINER_REGISTRY.items()}
    for kind in trainer.__mro__:
        if kind in names and not issubclass(kind, RolloutSkipMixin):
            return names[kind]
    raise UnsupportedTrainerError(
        f"{trainer.__name__} has none of verl's V1 trainers among its bases ({', '.join(sorted(TRAINER_REGISTRY))}). "
        f"Write class {trainer.__name__}(RolloutSkipMixin, PPOTrainerSync), or register your own trainer first."
    )
