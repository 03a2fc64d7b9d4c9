"""Checks that the installed verl has the functions this package uses, instead of comparing version numbers.

Each trainer family lists its functions in its own ``compat`` module. A function that is missing or takes different
parameters raises an error that says who needs it; an untested version causes a warning.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from verl_rollout_skip.errors import UnsupportedTrainerError

logger = logging.getLogger(__name__)

_OWN_CODE = "verl_rollout_skip.trainers."


@dataclass(frozen=True)
class Need:
    """A function that this package calls or overrides: the arguments of the call, why it is needed, and by whom.

    ``positional`` is None if the arguments are passed through unchanged.
    """

    name: str
    purpose: str
    positional: tuple[str, ...] | None = ()
    keywords: tuple[str, ...] = ()
    user: str = "RolloutSkipMixin"

    def explain_mismatch(self, function: Any) -> str | None:
        """Why a function cannot be used; None if it can."""
        if not callable(function):
            return f"it has no {self.name}, which {self.user} needs {self.purpose}"
        if self.positional is None:
            return None
        try:
            signature = inspect.signature(function)
        except ValueError:
            return None  # some functions have no signature; a wrong call will fail
        try:
            signature.bind(*self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            call = ", ".join([*self.positional, *(f"{name}=" for name in self.keywords)])
            return f"its {self.name} takes {signature}, but {self.user} needs ({call}) {self.purpose} ({error})"
        return None


# The methods that trainers.engine overrides, so that nothing is started and no weights are gathered.
_ENGINE_NEEDS = {
    "AgentLoopManager": (Need("_init_agent_loop_workers", "to avoid starting agent loops", ("self",)),),
    "RolloutReplica": (
        Need("launch_servers", "to avoid starting servers", ("self",)),
        Need("init_standalone", "to avoid starting servers", ("self",)),
    ),
    "BaseRollout": (Need("update_weights", "to avoid gathering weights", ("self", "weights")),),
}
# The methods that trainers.weights replaces. The arguments are passed through.
_WEIGHT_SYNC_NEEDS = (
    Need("update_weights", "to defer weight syncs", positional=None),
    Need("sleep_replicas", "to let the engine sleep while steps are loaded", positional=None),
)


def check_trainer(
    trainer: type, needs: Iterable[Need], supported: str, impossible: str = "be recorded or replayed"
) -> None:
    """Raise if the host trainer lacks a method or has it with different parameters."""
    reasons = [reason for need in needs if (reason := _explain_method(trainer, need)) is not None]
    if reasons:
        raise UnsupportedTrainerError(
            f"{trainer.__name__} cannot {impossible}: {'; '.join(reasons)}. The installed version of verl is "
            f"{verl_version()}. Supported trainers: {supported}."
        )


def check_functions(owner: Any, name: str, needs: Iterable[Need], advice: str) -> None:
    """Raise if a class, module or object lacks a function or has it with different parameters.

    The functions of a class are not bound, so their first argument is ``self``.
    """
    for need in needs:
        reason = need.explain_mismatch(getattr(owner, need.name, None))
        if reason is not None:
            raise UnsupportedTrainerError(f"{name} of verl {verl_version()} cannot be used: {reason}. {advice}")


def check_weight_sync(manager: Any) -> None:
    """Raise if the weight syncs of a checkpoint manager cannot be deferred."""
    advice = "Modes that only record (record, refresh) do not need it."
    check_functions(manager, type(manager).__name__, _WEIGHT_SYNC_NEEDS, advice)


def warn_if_untested(tested: Sequence[str], family: str) -> None:
    """Warn if the installed verl, which passed all checks, is not a tested version."""
    version = verl_version()
    if version not in tested:
        logger.warning(
            "verl %s has everything that %s need, but it is not a tested version (tested: %s). Compare the metrics of "
            "a short replay with those of its recording before you rely on it",
            *(version, family, ", ".join(tested)),
        )


def import_engine() -> ModuleType:
    """Import the engine that generates nothing. Raises if the installed verl cannot use it."""
    advice = "Use rollout_skip.engine=on, which starts the inference engine even though nothing is generated."
    try:
        engine = import_module("verl_rollout_skip.trainers.engine")
    except ImportError as error:
        raise UnsupportedTrainerError(
            f"A replay without an inference engine is not possible with verl {verl_version()}: {error}. {advice}"
        ) from error
    for kind, needs in _ENGINE_NEEDS.items():
        check_functions(getattr(engine, kind), kind, needs, advice)
    return engine


def register_rollout(name: str, rollout: str, replica: type) -> None:
    """Register an engine under a ``rollout.name``: the class of its servers, and the import path of the class that runs
    in the training workers. For the latter, verl has no public function."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[(name, "async")] = rollout
    RolloutReplicaRegistry.register(name, lambda: replica)


class LoggedMetrics:
    """Passes what verl logs at the end of each step to an observer, which returns more metrics to log.

    All of verl's loops log through a ``Tracking``, which only they can reach, so its class is changed meanwhile.
    """

    def __init__(self, observe: Callable[[int, Mapping[str, Any]], Mapping[str, float]]) -> None:
        self._tracking = import_module("verl.utils.tracking").Tracking
        self._log = original = self._tracking.log

        @functools.wraps(original)
        def log(tracking: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            more = observe(step, data) if isinstance(data, Mapping) else {}
            return original(tracking, {**data, **more} if more else data, step, *args, **kwargs)

        self._tracking.log = log

    def stop(self) -> None:
        self._tracking.log = self._log


def observe_metrics(observe: Callable[[int, Mapping[str, Any]], Mapping[str, float]]) -> LoggedMetrics | None:
    """Observe what verl logs until ``stop`` is called; None if the installed verl has no ``Tracking`` as expected."""
    try:
        from verl.utils.tracking import Tracking
    except ImportError:
        return None
    if Need("log", "to keep the metrics of each step", ("self", "data", "step")).explain_mismatch(Tracking.log):
        return None
    return LoggedMetrics(observe)


def verl_version() -> str:
    import verl

    return str(verl.__version__)


def _explain_method(trainer: type, need: Need) -> str | None:
    """Check the host trainer's own method, which the mixin calls through ``super()``."""
    kinds = [kind for kind in trainer.__mro__ if not kind.__module__.startswith(_OWN_CODE)]
    method: Any = next((vars(kind)[need.name] for kind in kinds if need.name in vars(kind)), None)
    reason = _explain_early_return(method)
    if reason is not None:
        return f"its {need.name} {reason}"
    bound = method.__get__(object(), trainer) if hasattr(method, "__get__") else method
    return need.explain_mismatch(bound)


def _explain_early_return(method: Any) -> str | None:
    """Why a method returns before its work is done, so that its end cannot be detected; None if it does not."""
    function = inspect.unwrap(method) if callable(method) else method
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is asynchronous, so rollouts are generated for later steps"
    return "is a generator, which does nothing when called" if inspect.isgeneratorfunction(function) else None
