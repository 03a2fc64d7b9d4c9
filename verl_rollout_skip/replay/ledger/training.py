"""``TrainingLedger``: collects what a training computes, writes its ledger, and compares it with the recording.

Everything that takes time happens on two threads: one reads the tensors of updates, for which the training waits, and
the other writes and compares. A failure is logged once and counted, and never stops the training.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_rollout_skip.config.modes import Mode
from verl_rollout_skip.fingerprint.layout import gpu_layout, host, layout_settings, versions
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.replay.ledger.figures import FiguresOfRows, TensorFigures, rows_figures
from verl_rollout_skip.replay.ledger.file import LedgerFile
from verl_rollout_skip.replay.ledger.line import LedgerEnd, LedgerHeader, LedgerStep, StepRollout
from verl_rollout_skip.replay.ledger.live import Hit, LiveComparison
from verl_rollout_skip.replay.ledger.stages import is_timing
from verl_rollout_skip.replay.ledger.updates import CRITIC, Consumer, Sink, Slices, UpdateSlice
from verl_rollout_skip.runs import checked_json
from verl_rollout_skip.runs.variants import Run
from verl_rollout_skip.store.storage.locations import open_storage
from verl_rollout_skip.store.threads import start_thread

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """What is known of the current step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, TensorFigures] = field(default_factory=dict)
    critic_tensors: dict[str, TensorFigures] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    rollouts: list[StepRollout] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    updates: Counter[str] = field(default_factory=Counter)
    is_logged: bool = False

    def line(self) -> LedgerStep:
        return LedgerStep(
            self.step, self.metrics, self.tensors, self.critic_tensors, self.weights, tuple(self.rollouts)
        )


class TrainingLedger:
    """The ledger of the current training. ``training`` is its name; ``prepare`` creates the folder it writes to.

    A step ends when the next one begins, because verl may log several times per step. ``consumers`` get the tensors of
    each update too.
    """

    def __init__(self, run: Run, training: str, prepare: Callable[[], None]) -> None:
        self.training = training
        self.failures = 0
        self.consumers: list[Consumer] = []
        self._run = run
        self._prepare = prepare
        self.is_on = run.settings.audit.is_on and run.settings.mode is not Mode.OFF
        self._reader, self._writer = _Worker(self._fail), _Worker(self._fail)
        self._step: _Step | None = None
        self._file: LedgerFile | None = None
        self._live: LiveComparison | None = None
        self._is_writable = True
        self._written = 0
        self._end = "finished"

    @property
    def is_observing(self) -> bool:
        """Whether anything is done with the tensors of an update."""
        return self.is_on or bool(self.consumers)

    def begin_step(self, step: int) -> None:
        """A rollout of this step is about to be loaded or generated, so the step before it is complete."""
        if self._step is None or self._step.step != step:
            self._finish_step()
            self._step = _Step(step)

    def observe_rollout(self, key: RolloutKey, digest: str | None, hit: Hit | None, off_policy: bool = False) -> None:
        """The training learns from this rollout. ``hit`` says where it was loaded from, None if it was generated."""
        if not self.is_on:
            return
        self.begin_step(key.step)
        assert self._step is not None
        recorder = None if hit is None else hit.training
        self._step.rollouts.append(StepRollout(key.gen_batch, digest, hit is not None, recorder, off_policy))
        if hit is not None:
            self._step.hits.append(hit)

    def observe_update(self, role: str, slices: Slices) -> None:
        """The update of the actor or the critic receives these rows. Call ``wait`` before they may change."""
        step = self._step
        if step is None:
            return
        step.updates[role] += 1
        number = step.updates[role]
        sinks: list[Sink] = [_Figures(step, role, number)] if self.is_on else []
        for consumer in self.consumers:
            sink = consumer(step.step, role)
            sinks += [] if sink is None else [sink]
        if sinks:
            self._reader.do("an update was not observed", lambda: _read(slices, sinks))

    def observe_metrics(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """verl logs these metrics. Returns more of them: the result of the comparison, up to the previous step."""
        if not self.is_on:
            return {}
        if self._step is not None and self._step.step == step and self._step.rollouts:
            numbers = {name: _number(value) for name, value in metrics.items() if not is_timing(name)}
            self._step.is_logged = True
            self._step.metrics.update({name: value for name, value in numbers.items() if value is not None})
        return {} if self._live is None else self._live.metrics()

    def observe_weights(self, step: int, read: Callable[[], Mapping[str, str]]) -> None:
        """A checkpoint was saved. ``read`` returns a digest per role; it is called on another thread."""
        current = self._step
        if self.is_on and current is not None and current.step == step:
            self._writer.do("the weights have no digest", lambda: current.weights.update(read()))

    def wait(self) -> None:
        """Wait until the updates have been read. What is written, on a disk that may be slow, is not waited for."""
        self._reader.wait()

    def fail(self) -> None:
        """The training ended with an error."""
        self._end = "failed"

    def close(self) -> list[str]:
        """Write the last step and the end, and return notes for the summary of the training."""
        self._finish_step()
        self._writer.do("the ledger has no end", self._write_end)
        self._writer.close()
        self._reader.close()
        self.is_on = False  # nothing follows the end
        found = None if self._live is None else self._live.describe()
        notes = [] if found is None else [found]
        if self.failures:
            notes.append(f"the ledger is incomplete ({self.failures} failures)")
        return notes

    def _finish_step(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.is_logged and self.is_on:
            self._writer.do("a step is missing in the ledger", lambda: self._write(step))

    def _write(self, step: _Step) -> None:
        self._reader.wait()
        line = step.line()
        if self._live is None:
            self._start(step.step)
        assert self._live is not None
        self._live.compare(line, step.hits)
        if self._file is None or not self._is_writable:
            return
        try:
            self._file.append(line)
            self._written += 1
        except OSError as error:
            if self._run.settings.mode.writes:
                raise
            self._is_writable = False
            logger.info("this training writes no ledger, because %s cannot be written: %s", self._path, error)

    def _write_end(self) -> None:
        if self._file is not None and self._written and self._is_writable:
            self._file.append(LedgerEnd(self._end, self._written))

    @property
    def _path(self) -> str:
        return "the ledger" if self._file is None else self._file.path

    def _start(self, first_step: int) -> None:
        run, fingerprint = self._run, self._run.fingerprint
        header = LedgerHeader(
            training=self.training,
            started_at=checked_json.timestamp(),
            mode=run.settings.mode.value,
            trainer=run.trainer or "",
            config_hash=fingerprint.config_hash,
            training_hash=fingerprint.training_hash,
            training_settings=fingerprint.training,
            gpu_layout={**gpu_layout(run.config), "settings": layout_settings(run.config)},
            versions=versions(),
            host=str(host()["name"]),
            first_step=first_step,
        )
        self._live = LiveComparison(header)
        folder = run.write_folder if run.settings.mode.writes else None
        if folder is not None:
            self._prepare()
        elif run.sources:
            folder = run.sources[0].folder
        if folder is not None:
            self._file = LedgerFile(open_storage(folder), header)

    def _fail(self, problem: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("%s, but the training continues: %s (%s)", problem, error, self._path)


class _Worker:
    """Does jobs in order on one thread, which starts with the first one. A failed job does not stop the others."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._jobs: queue.Queue[tuple[str, Callable[[], object]] | None] = queue.Queue()
        self._is_running = False

    def do(self, problem: str, job: Callable[[], object]) -> None:
        """Do a job later; ``problem`` says what it means if the job fails."""
        self._jobs.put((problem, job))
        if not self._is_running:
            try:
                start_thread(self._work, "rollout-skip-ledger")
                self._is_running = True
            except RuntimeError:  # out of threads, or the interpreter is exiting
                self._jobs.put(None)
                self._work()

    def wait(self) -> None:
        """Wait until all jobs are done."""
        if self._is_running:
            self._jobs.join()

    def close(self) -> None:
        """Wait, and end the thread."""
        if self._is_running:
            self._jobs.put(None)
            self._jobs.join()
            self._is_running = False

    def _work(self) -> None:
        while True:
            item = self._jobs.get()
            try:
                if item is None:
                    return
                item[1]()
            except BaseException as error:  # a thread that ended would make everything wait
                assert item is not None
                self._failed(item[0], error)
            finally:
                self._jobs.task_done()


def _read(slices: Slices, sinks: list[Sink]) -> None:
    """Read an update once, for all sinks."""
    try:
        for part in slices():
            for sink in sinks:
                sink.add(part)
    except Exception as error:
        for sink in sinks:
            sink.fail(error)
        raise
    for sink in sinks:
        sink.finish()


class _Figures:
    """Adds the figures of an update to its step."""

    def __init__(self, step: _Step, role: str, number: int) -> None:
        self._target = step.critic_tensors if role == CRITIC else step.tensors
        self._suffix = f"#{number}" if number > 1 else ""
        self._figures: dict[str, FiguresOfRows] | None = None

    def add(self, part: UpdateSlice) -> None:
        found = part.figures
        if found is None:
            found = {name: rows_figures(tensor) for name, tensor in part.tensors.items()}
        if self._figures is None:
            self._figures = dict(found)
            return
        # those that all rows have
        self._figures = {name: figures for name, figures in self._figures.items() if name in found}
        for name, figures in self._figures.items():
            figures.merge(found[name])

    def finish(self) -> None:
        found = self._figures or {}
        self._target.update({f"{name}{self._suffix}": figures.result() for name, figures in found.items()})

    def fail(self, error: Exception) -> None:
        """The ledger counts the failure itself."""


def _number(value: Any) -> float | None:
    """A metric as a number; None for a text or a table."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
