"""verl's V1 trainers with recorded rollouts, at the path users import. See ``verl_rollout_skip.trainers.v1``."""

from typing import TYPE_CHECKING

from verl_rollout_skip.trainers.v1 import __all__, __dir__, __getattr__  # noqa: F401 - the names are imported lazily

if TYPE_CHECKING:
    from verl_rollout_skip.trainers.v1 import (  # noqa: F401
        RolloutSkipMixin,
        SkipPPOTrainerColocateAsync,
        SkipPPOTrainerSeparateAsync,
        SkipPPOTrainerSync,
    )
