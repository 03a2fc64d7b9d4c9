"""``Builder`` turns the inert tree of a pickle into values, using only the code in this folder.

Objects that the pickle shares between rows stay shared. A few bytes can refer to a shared object any number of times,
so all work is counted against a ``Budget`` that depends on the file's size. No value is compared, hashed or printed
before its type is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from verl_rollout_skip.tools.upstream.pickles import Call, DamagedDumpError, Name, Persistent, shortened
from verl_rollout_skip.tools.upstream.tensors import DTYPES, Budget, Storage, natural

MAX_DIMENSIONS = 32
_MAX_DEPTH = 100
_NODES = (dict, list, tuple, Call, Persistent, Name)
_WITH_SIZE = (str, bytes, int)

Make = Callable[["Builder", Call], Any]
"""Builds the result of one kind of call, after checking its arguments."""


class Builder:
    """Builds the values of one tree.

    ``calls`` maps function names to the code that builds their results. ``find_storage`` returns storages outside the
    pickle, and ``read_torch`` reads a torch file embedded in it, on the same budget.
    """

    def __init__(
        self,
        calls: Mapping[str, Make],
        budget: Budget,
        read_torch: Callable[[bytes, Budget], Any],
        find_storage: Callable[[Any], Storage] | None = None,
    ) -> None:
        self._calls = calls
        self.budget = budget
        self._read_torch = read_torch
        self._find_storage = find_storage
        self._made: dict[int, tuple[Any, Any, int]] = {}
        self._depth = 0

    def build(self, node: Any) -> Any:
        """The value of a node; the same node always gives the same value."""
        if not isinstance(node, _NODES):
            if isinstance(node, _WITH_SIZE):
                self.budget.weigh(_words(node))
            return node
        known = self._made.get(id(node))
        if known is not None:
            self.budget.weigh(known[2])
            return known[1]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DamagedDumpError("It is nested too deeply, or within itself.")
        before = self.budget.spent
        value = self._build(node)
        self._depth -= 1
        self.budget.weigh(1 + _words(value))
        # Keeps the node alive too, so that its id is not reused.
        self._made[id(node)] = (node, value, self.budget.spent - before)
        return value

    def read_torch(self, data: bytes) -> Any:
        """The value of a torch file embedded in this one. A dump has one; more could be nested without end."""
        self.budget.torch_files += 1
        if self.budget.torch_files > 1:
            raise DamagedDumpError("It contains several torch files.")
        return self._read_torch(data, self.budget)

    def shape(self, node: Any) -> tuple[int, ...]:
        """The shape of an array or batch, checked against the size of the file."""
        sizes = self.build(node)
        if not isinstance(sizes, list | tuple) or len(sizes) > MAX_DIMENSIONS:
            raise ValueError(f"a {type(sizes).__name__} is not a shape of at most {MAX_DIMENSIONS} dimensions")
        found = tuple(natural(size) for size in sizes)
        if any(size > self.budget.max_rows for size in found):
            raise ValueError(f"size {list(found)} exceeds the file")
        return found

    def _build(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self.build(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self.build(item) for item in node)
        if isinstance(node, Persistent):
            if self._find_storage is None:
                raise DamagedDumpError("It refers to data outside the file.")
            return self._find_storage(node.identity)
        if isinstance(node, Name):
            if node.module == "torch" and node.name in DTYPES:
                return DTYPES[node.name]
            raise DamagedDumpError(f"It contains {node} as a value.")
        try:
            make = self._calls[str(node.function)]
        except KeyError:
            raise DamagedDumpError(
                f"It contains a {node.function}, which cannot be stored as part of a rollout."
            ) from None
        self.budget.weigh(_given(node))
        try:
            return make(self, node)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
            raise DamagedDumpError(f"A {node.function} in it is malformed ({shortened(error)}).") from error


def _words(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value) // 8
    if isinstance(value, int):
        return value.bit_length() // 64
    return int(value.nbytes) // 8 if isinstance(value, torch.Tensor | np.ndarray) else 0


def _given(call: Call) -> int:
    """The size of a call's arguments: any number of calls can share them, and each call visits them."""
    state = call.state if isinstance(call.state, list | tuple) else (call.state,)
    given = [call.arguments, state, *call.arguments[:8], *state[:8]]
    return sum(len(part) for part in given if isinstance(part, list | tuple | dict | str | bytes))
