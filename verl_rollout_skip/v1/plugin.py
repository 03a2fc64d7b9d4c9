"""An earlier import path of ``verl_rollout_skip.trainers.plugin``, which older installations name as verl's plugin."""

import verl_rollout_skip.trainers.plugin  # noqa: F401 - loading it is all that verl does
