"""Parses a pickle into an inert tree: calls are recorded, never made.

Python's own unpickler looks up names and calls what it finds, which is how a pickle executes code. This parser only
interprets the opcodes. A name becomes a ``Name`` and a call a ``Call``, and any name that is not on the caller's list
is rejected. ``builder.py`` makes values from the tree.

A few bytes can nest or share a value so deeply that hashing, comparing or printing it never ends. So nothing here does
that to an unchecked value: dict keys must be plain values, and errors name only types.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import IO, Any

from verl_rollout_skip.errors import StoreError

_MAX_OPCODES = 50_000_000
_MAX_TEXT = 200
_KEYS = (str, int, float, bytes, type(None))
# Larger integers can be chosen to all have the same hash, and a dict of them takes quadratic time.
_INT64 = range(-(2**63), 2**63)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
}
_IGNORED = {"PROTO", "FRAME"}


class UnsafePickleError(StoreError):
    """A pickle asks for something that no dump of rollouts needs. None of its code was executed."""


class DamagedDumpError(StoreError):
    """A dump is truncated or changed, or is not a dump of rollouts at all."""


@dataclass(frozen=True)
class Name:
    """The name of something in a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Call:
    """A requested call that was not made, with the state for its result."""

    function: Name
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Persistent:
    """A reference to data outside the pickle: the storages in a torch file."""

    identity: Any


class _Mark:
    pass


_MARK = _Mark()
_SET = Name("builtins", "set")


def read_pickle(stream: IO[bytes], allowed: Container[str], max_opcodes: int = _MAX_OPCODES) -> Any:
    """Parse the pickle at the stream's position, leaving the stream at the end of the pickle.

    Raises ``UnsafePickleError`` for a name that is not allowed, and ``DamagedDumpError`` for data that is not a pickle.
    """
    return _Machine(allowed).run(stream, max_opcodes)


def shortened(text: object) -> str:
    """An error or a name, cut to a readable length; a file can put anything into it."""
    found = str(text)
    return found if len(found) <= _MAX_TEXT else f"{found[:_MAX_TEXT]}…"


def check_key(key: Any) -> Any:
    """Return a dict key if it is a plain value; hashing any other may never end or overflow the stack."""
    if not isinstance(key, _KEYS):
        raise DamagedDumpError(f"A dict in it has a {type(key).__name__} as a key.")
    if isinstance(key, int) and key not in _INT64:
        raise DamagedDumpError("A dict in it has an integer of more than 64 bits as a key.")
    return key


class _Machine:
    """The stack machine of pickles, reduced to the instructions that data needs."""

    def __init__(self, allowed: Container[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, stream: IO[bytes], max_opcodes: int) -> Any:
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
                if count > max_opcodes:
                    raise DamagedDumpError(f"It has more than {max_opcodes} instructions.")
                if opcode.name == "STOP":
                    break
                self._step(opcode.name, argument)
            [_] = self._stack
            return self._pop()
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedDumpError(f"It is truncated or not a pickle ({shortened(error)}).") from error

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _VALUES:
            stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = self._top()
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif opcode == "GLOBAL":
            stack.append(self._name(*argument.split(" ", 1)))
        elif opcode not in _IGNORED:
            action = _ACTIONS.get(opcode)
            if action is None:
                raise UnsafePickleError(f"It uses the pickle instruction {opcode}, which no dump of rollouts needs.")
            action(self)

    def _name(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsafePickleError("It asks for a name that is not a string, which no dump of rollouts does.")
        if f"{module}.{name}" not in self._allowed:
            raise UnsafePickleError(
                f"It asks for {shortened(f'{module}.{name}')}, which no dump of rollouts needs: it is some other file, "
                "or was made to run code on your machine. None of its code was executed."
            )
        return Name(module, name)

    def _top(self) -> Any:
        top = self._stack[-1]
        if top is _MARK:
            raise IndexError("a value is missing")
        return top

    def _pop(self) -> Any:
        top = self._top()
        del self._stack[-1]
        return top

    def _since_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while self._stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise IndexError("a mark is missing")
        found = self._stack[index + 1 :]
        del self._stack[index:]
        return found

    def mark(self) -> None:
        self._stack.append(_MARK)

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(self._name(module, name))

    def reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise UnsafePickleError("It asks to call something that is not a named function.")
        self._stack.append(Call(function, arguments))

    def build(self) -> None:
        state, target = self._pop(), self._top()
        if not isinstance(target, Call) or target.state is not None:
            raise UnsafePickleError("It asks to change something that it did not create.")
        target.state = state

    def persistent(self) -> None:
        self._stack.append(Persistent(self._pop()))

    def empty(self, kind: Callable[[], Any]) -> None:
        self._stack.append(kind())

    def tuple_of(self, count: int | None) -> None:
        if count is None:
            items = self._since_mark()
        else:
            items = self._stack[len(self._stack) - count :]
            del self._stack[len(self._stack) - count :]
            if len(items) != count or any(item is _MARK for item in items):
                raise IndexError("the stack is too short")
        self._stack.append(tuple(items))

    def list_of(self) -> None:
        self._stack.append(self._since_mark())

    def dict_of(self) -> None:
        items = self._since_mark()
        made: dict[Any, Any] = {}
        self._stack.append(made)
        _set_items(made, items)

    def append(self) -> None:
        value = self._pop()
        _list(self._top()).append(value)

    def appends(self) -> None:
        items = self._since_mark()
        _list(self._top()).extend(items)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        _set_items(self._top(), [key, value])

    def set_items(self) -> None:
        items = self._since_mark()
        _set_items(self._top(), items)

    def empty_set(self) -> None:
        self._stack.append(Call(_SET, ([],)))

    def add_items(self) -> None:
        items = self._since_mark()
        target = self._top()
        if not isinstance(target, Call) or target.function is not _SET:
            raise UnsafePickleError("It asks to add to something that is not a set.")
        target.arguments[0].extend(items)

    def frozen_set(self) -> None:
        self._stack.append(Call(_SET, (self._since_mark(),)))

    def pop(self) -> None:
        self._stack.pop()

    def pop_mark(self) -> None:
        self._since_mark()

    def dup(self) -> None:
        self._stack.append(self._top())


_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
    "EMPTY_LIST": lambda machine: machine.empty(list),
    "EMPTY_DICT": lambda machine: machine.empty(dict),
    "EMPTY_TUPLE": lambda machine: machine.empty(tuple),
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "TUPLE": lambda machine: machine.tuple_of(None),
    "LIST": _Machine.list_of,
    "DICT": _Machine.dict_of,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "EMPTY_SET": _Machine.empty_set,
    "ADDITEMS": _Machine.add_items,
    "FROZENSET": _Machine.frozen_set,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.dup,
}


def _list(target: Any) -> list[Any]:
    if type(target) is not list:
        raise UnsafePickleError("It asks to append to something that is not a list.")
    return target


def _set_items(target: Any, items: list[Any]) -> None:
    pairs = [(check_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]
    if type(target) is dict:
        target.update(pairs)
    elif isinstance(target, Call):
        target.items.extend(pairs)
    else:
        raise UnsafePickleError("It asks to set items of something that is not a dict.")
