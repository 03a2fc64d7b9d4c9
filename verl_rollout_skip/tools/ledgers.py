"""The sides of an audit: the ledger of one training, or the recording of a variant.

Several trainings may have contributed to a recording, for example after a crash. Each of its steps is then taken from
the training that generated it last. Ledgers are read line by line, and never kept as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from verl_rollout_skip.config.skip_config import describe_steps
from verl_rollout_skip.errors import LedgerError
from verl_rollout_skip.replay.ledger.file import LedgerReader, StepFinder, ledger_names
from verl_rollout_skip.replay.ledger.line import LedgerHeader, LedgerStep
from verl_rollout_skip.runs.paths import LEDGERS
from verl_rollout_skip.store.storage import Storage

_RECORD = (
    "Trainings write one in every mode but off, unless rollout_skip.audit=off. Record or replay again with "
    "rollout_skip.audit=auto."
)


@dataclass(frozen=True)
class Computed:
    """What a training computed in one step, and the header of its ledger."""

    header: LedgerHeader
    step: LedgerStep


@dataclass(frozen=True)
class Side:
    """One side of an audit: for each step, the training whose ledger has it. ``notes`` say what is unusual."""

    name: str
    storage: Storage
    trainings: Mapping[int, str]
    notes: tuple[str, ...] = ()
    _finders: dict[str, StepFinder] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> list[int]:
        return sorted(self.trainings)

    @cached_property
    def headers(self) -> list[LedgerHeader]:
        """The headers of its trainings, in the order of their first steps."""
        return [self._finder(name).header for name in dict.fromkeys(self.trainings[step] for step in self.steps)]

    def at(self, step: int) -> Computed:
        """What was computed in a step. Asking for steps in ascending order reads each ledger once."""
        finder = self._finder(self.trainings[step])
        found = finder.find(step)
        if found is None:
            raise LedgerError(
                f"Step {step} is no longer in {self.storage.where(LEDGERS)}/{self.trainings[step]}.jsonl: the file was "
                "replaced while it was being read. Run the command again."
            )
        return Computed(finder.header, found)

    def describe(self) -> str:
        """One line: its name, the modes of its trainings, and the steps."""
        modes = ", ".join(dict.fromkeys(header.mode for header in self.headers))
        steps = name_steps(self.steps) if self.trainings else "no steps"
        return f"{self.name} ({', '.join(filter(None, (modes, steps)))})"

    def _finder(self, training: str) -> StepFinder:
        if training not in self._finders:
            self._finders[training] = StepFinder(self.storage, training)
        return self._finders[training]


class VariantLedgers:
    """The ledgers in a variant folder. A folder without any is an error."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._steps_of: dict[str, frozenset[int]] = {}
        self.path = storage.where().rstrip("/")
        self.names = ledger_names(storage)
        if not self.names:
            raise LedgerError(
                f"There are no ledgers in {self.path}/{LEDGERS}, so there is nothing to compare. {_RECORD}"
            )

    def training(self, name: str) -> Side:
        """One training. ``name`` may be the beginning of its name if only one name begins with it."""
        reader = LedgerReader(self._storage, self.full_name(name))
        steps = [line.step for line in reader]
        return self._side(dict.fromkeys(steps, reader.header.training), tuple(_remarks(reader)), self.full_name(name))

    def recording(self) -> Side:
        """The trainings that generated the rollouts."""
        trainings: dict[int, str] = {}
        notes: list[str] = []
        for name in self.names:
            reader = LedgerReader(self._storage, name)
            generated = [line.step for line in reader if _generated(line)]
            trainings.update(dict.fromkeys(generated, name))
            notes += _remarks(reader) if generated else ()
        if not trainings:
            raise LedgerError(
                f"None of the {len(self.names)} trainings with a ledger in {self.path} generated rollouts, so the "
                f"recording itself has no ledger. {self._compare_two()}"
            )
        return self._side(trainings, tuple(notes))

    def recording_for(self, name: str) -> Side | None:
        """What a training is compared with: each step that it loaded, as computed by the training that recorded it, and
        the steps of those trainings that it did not reach.

        None if it loaded nothing.
        """
        name = self.full_name(name)
        trainings: dict[int, str] = {}
        missing: dict[str, list[int]] = {}
        seen = set()
        for line in LedgerReader(self._storage, name):
            seen.add(line.step)
            recorder = _recorder(line)
            if recorder is None or recorder == name:
                continue
            if recorder in self.names and line.step in self._steps(recorder):
                trainings[line.step] = recorder
            else:
                missing.setdefault(self._explain_missing(recorder), []).append(line.step)
        for recorder in sorted(set(trainings.values())):
            trainings |= dict.fromkeys(self._steps(recorder) - seen, recorder)
        notes = [f"{name_steps(steps)}: not compared, because {reason}" for reason, steps in missing.items()]
        return self._side(trainings, tuple(notes)) if trainings or missing else None

    def later_trainings(self) -> Iterator[tuple[Side, Side]]:
        """Each training that loaded recorded rollouts, after the recording that it is compared with."""
        found = False
        for name in self.names:
            recorded = self.recording_for(name)
            if recorded is not None:
                found = True
                yield recorded, self.training(name)
        if not found:
            raise LedgerError(
                f"No training with a ledger in {self.path} loaded its rollouts, so there is nothing to compare. Replay "
                "it with rollout_skip.mode=replay, or name two recordings."
            )

    def full_name(self, name: str) -> str:
        """The name of the only training whose name begins like this."""
        found = [full for full in self.names if full == name] or [full for full in self.names if full.startswith(name)]
        if len(found) == 1:
            return found[0]
        problem = f"{len(found)} of them begin with {name!r}" if found else f"none of them begins with {name!r}"
        raise LedgerError(
            f"{self.path} has ledgers of {len(self.names)} trainings, and {problem}. Choose one: "
            f"{', '.join(found or self.names)}"
        )

    def _side(self, trainings: Mapping[int, str], notes: tuple[str, ...], name: str = "") -> Side:
        names = list(dict.fromkeys(trainings.values()))
        combined = names[0] if len(names) == 1 else f"the recording, by {len(names)} trainings"
        return Side(name or combined, self._storage, trainings, notes)

    def _steps(self, training: str) -> frozenset[int]:
        if training not in self._steps_of:
            self._steps_of[training] = frozenset(line.step for line in LedgerReader(self._storage, training))
        return self._steps_of[training]

    def _explain_missing(self, recorder: str) -> str:
        """Why a step is not in the ledger of the training that recorded its rollouts."""
        if not recorder:
            return "their rollouts were recorded without a ledger"
        if recorder in self.names:
            return f"{recorder}, which recorded their rollouts, has no such steps"
        return f"there is no ledger of {recorder}, which recorded their rollouts"

    def _compare_two(self) -> str:
        if len(self.names) < 2:
            return _RECORD
        paths = " ".join(f"{self.path}/{LEDGERS}/{name}" for name in (self.names[0], self.names[-1]))
        return f"Compare two of them, for example: rollout-skip audit {paths}"


def name_steps(steps: Collection[int]) -> str:
    """Steps in words: "step 1", or "steps 1-3, 7"."""
    return f"step{'' if len(steps) == 1 else 's'} {describe_steps(steps)}"


def _generated(line: LedgerStep) -> bool:
    return any(not rollout.hit for rollout in line.rollouts)


def _recorder(line: LedgerStep) -> str | None:
    """The training that a step is compared with: the last one that recorded a rollout of it.

    None if the step generated a rollout itself; empty if the recording does not say who recorded it.
    """
    if not line.rollouts or _generated(line):
        return None
    return max(rollout.recorded_by or "" for rollout in line.rollouts)


def _remarks(reader: LedgerReader) -> Iterator[str]:
    name = reader.header.training
    if reader.torn is not None:
        yield f"the last line of {reader.path} is ignored: {reader.torn}"
    if reader.end is None:
        yield f"{name} has not ended: it was killed, or it is still running"
    elif reader.end == "failed":
        yield f"{name} ended with an error"
