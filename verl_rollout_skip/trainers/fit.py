"""``FitHooks``: detects the start and the end of a training, wherever its ``fit`` is defined.

Many trainers override ``fit`` with their own loop, which never calls the inherited one. So every ``fit`` is wrapped:
one that is defined in a class, assigned to a class later, or assigned to an instance. Only the outermost call counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

FIT = "fit"
_WRAPPER = "_rollout_skip_wrapper"


class FitHooks:
    """Calls ``_start_training`` before ``fit``, and ``_end_training`` or ``_end_failed_training`` after it.

    Its attribute names are chosen so that they do not clash with those of a trainer.
    """

    _skip_is_in_fit = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_fit(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = functools.partial(_run, self, value) if name == FIT and callable(value) else value
        super().__setattr__(name, wrapped)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, getattr(super(), FIT), *args, **kwargs)

    def _start_training(self) -> None:
        raise NotImplementedError

    def _end_training(self) -> None:
        raise NotImplementedError

    def _end_failed_training(self) -> None:
        raise NotImplementedError


def wrap_fit(trainer: type) -> None:
    """Wrap the ``fit`` of a class and of each of its bases that derives from a mixin, unless it is already wrapped."""
    for kind in trainer.__mro__:
        fit = vars(kind).get(FIT)
        if kind is FitHooks:
            return  # its own fit calls the next class in the MRO
        # The marker's value is the wrapper itself, because functools.wraps copies it to functions around the wrapper.
        if fit is not None and issubclass(kind, FitHooks) and getattr(fit, _WRAPPER, None) is not fit:
            setattr(kind, FIT, _wrapped(fit))


def _wrapped(fit: Any) -> Any:
    @functools.wraps(fit)
    def wrapper(self: FitHooks, *args: Any, **kwargs: Any) -> Any:
        return _run(self, fit.__get__(self, type(self)), *args, **kwargs)

    setattr(wrapper, _WRAPPER, wrapper)
    return wrapper


def _run(trainer: FitHooks, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if trainer._skip_is_in_fit:
        return fit(*args, **kwargs)  # called by another fit, whose end is the end of the training
    trainer._skip_is_in_fit = True
    trainer._start_training()
    try:
        result = fit(*args, **kwargs)
    except BaseException:
        trainer._end_failed_training()
        raise
    finally:
        trainer._skip_is_in_fit = False
    trainer._end_training()
    return result
