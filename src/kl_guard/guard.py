"""The guard: observations in, decision out. The order of events is read here."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kl_guard import incidents
from kl_guard._version import __version__
from kl_guard.checkpoints import Keeper
from kl_guard.config import GuardConfig
from kl_guard.diagnosis import explain
from kl_guard.findings import Checkpoint, Decision, Finding, Severity
from kl_guard.history import History
from kl_guard.journal import Journal
from kl_guard.memory import Memory, recall
from kl_guard.messages import describe, describe_decision
from kl_guard.observation import METRICS, Observation, as_number, as_step, as_window
from kl_guard.panel import Panel
from kl_guard.stats import HorizonWindow

logger = logging.getLogger("kl_guard")

STUCK = 16  # times one step is observed before the guard says that steps do not advance
FOLDER = "kl_guard"
_LOG_LEVEL = {Severity.INFO: logging.INFO, Severity.WARN: logging.WARNING, Severity.CRITICAL: logging.ERROR}


class KLGuard:
    """Watches the KL of one run and says when to stop it.

    Feed it one observation per logged step; it answers with a decision. Nothing that happens inside reaches the caller:
    a fault is logged once, the guard is then `blind` in that part, and the answer is "continue".

    Parameters
    ----------
    config:
        The knobs; defaults where None.
    output_dir:
        Where the run writes; the guard keeps `<output_dir>/kl_guard/`. None for no files.
    rank:
        Which process of a distributed run this is; only rank 0 writes and speaks. From the environment (`RANK`) where
        None.
    expected_observations:
        How many observations the whole run will give, where known: short runs get a shorter warm-up.
    announce:
        Whether findings are logged (logger `kl_guard`).

    Examples
    --------
    >>> guard = KLGuard(GuardConfig(action="halt"), announce=False)
    >>> for step in range(1, 60):
    ...     kl = 0.02 if step < 40 else 0.02 * 1.6 ** (step - 40)
    ...     decision = guard.observe(step=step, kl_mean=kl)
    ...     if decision.action == "halt":
    ...         break
    >>> step, decision.reason.signature, decision.reason.departure_step
    (51, 'KL_BLOWUP', 40)
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        expected_observations: int | None = None,
        announce: bool = True,
    ) -> None:
        self.config = GuardConfig.build(config)
        if expected_observations is not None and not (
            isinstance(expected_observations, int) and expected_observations >= 0
        ):
            raise ValueError(
                f"expected_observations must be a whole number of at least 0, or None, got {expected_observations!r}"
            )
        self.rank = _rank_from_environment() if rank is None else rank
        self.folder = None if output_dir is None else Path(output_dir) / FOLDER
        self.expected_observations = expected_observations
        self.blind = False
        self._memory = Memory()
        self._announces = announce and self.rank == 0
        self._journal = Journal(self.folder) if self.folder is not None and self.rank == 0 else None
        self.checkpoints = Keeper(self.folder / "pins" if self.folder and self.config.pin_checkpoints else None)
        warmup = self.config.warmup_of(expected_observations)
        self._panel = Panel(self.config, warmup, lambda name: self._fail(f"{name}, which is off from now on"))
        self._begun = False
        self._standing: Decision | None = None
        self._grace_left = 0
        self._repeats = 0
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={len(self.history)}, attempt={self.attempt}, level={self.level})"

    @property
    def run_id(self) -> str:
        """Made at each fresh start; empty before."""
        return self._memory.run_id or ""

    @property
    def attempt(self) -> int:
        """0 for the run as started, one more for each rollback."""
        return self._memory.attempt

    @property
    def history(self) -> History:
        """The observations of the run so far."""
        return self._memory.history

    @property
    def findings(self) -> list[Finding]:
        """What was said in this attempt, in order."""
        return self._memory.findings

    @property
    def suspicion(self) -> bool:
        """Whether something that may become a blow-up was seen in the last 20 observations."""
        return self._panel.suspicion

    @property
    def decision(self) -> Decision:
        """The decision that stands now, without findings."""
        return self._decision(())

    @property
    def level(self) -> int:
        """0 calm, 1 suspicion or warning, 2 critical, -1 blind."""
        if self.blind:
            return -1
        return 2 if self._standing is not None else int(self.suspicion)

    def observe(
        self,
        step: Any,
        kl_mean: Any = None,
        *,
        kl_max: Any = None,
        reward: Any = None,
        reward_std: Any = None,
        entropy: Any = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        beta: Any = None,
        window: Any = 1,
    ) -> Decision:
        """Take in what one training step logged, and decide.

        Parameters
        ----------
        step:
            Number of the step, whole and at least 0. An equal one adds to the last observation, a smaller one counts
            only after `resumed` or `rolled_back`.
        kl_mean, kl_max:
            KL of policy and reference, mean and maximum over tokens, in nats per token unless `kl_kind` says otherwise.
        reward, reward_std, entropy, loss, grad_norm, learning_rate, beta:
            What else the step logged: it makes causes and companions visible.
        window:
            How many steps the values average.

        Returns
        -------
        Decision
            What to do. "halt" and "rollback" stand until `resumed` or `rolled_back`, new findings are given once.
        """
        metrics = (kl_mean, kl_max, reward, reward_std, entropy, loss, grad_norm, learning_rate, beta)
        try:
            observation = self._read(step, metrics, window)
            return self._decision(()) if observation is None else self._observe(observation)
        except Exception:
            self._fail("observing a step")
            return self._standing or Decision()  # what was decided before stands

    def checkpoint_saved(self, step: Any, path: str | os.PathLike[str], *, aligned: bool = True) -> None:
        """Say that a complete checkpoint of `step` lies in the folder `path`.

        It is pinned: kept in `<output_dir>/kl_guard/pins/` out of reach of the trainer's rotation, as long as it may be
        needed. `aligned=False` says that the framework cannot resume from it exactly.
        """
        try:
            checkpoint = Checkpoint(as_step(step), os.fsdecode(path), calm=not self.suspicion)
            self._begin()
            self._write("checkpoint", asdict(checkpoint), sync=True)
            self.checkpoints.saved(checkpoint, aligned=aligned, suspicion=self.suspicion)
        except ValueError as error:
            self._warn_once("checkpoint", f"a checkpoint is left out: {error}")
        except Exception:
            self._fail("recording a checkpoint")

    def resumed(self, step: Any, history: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Say that the run goes on from a checkpoint of `step`; what was observed later is dropped.

        A halt that stood is over; if what led to it still holds after `grace` observations, it is said again. In a new
        process the guard rebuilds its memory from the journal, or from `history` (rows with `step` and
        metrics, such as the trainer's log history) where there is no journal.
        """
        try:
            step = as_step(step)
            self._take_over(self._remember(step, history))
            self.checkpoints.go_back(step)
            self._write("resume", {"step": step, "time": time.time()}, sync=True)
        except ValueError as error:
            self._warn_once("resumed", f"the resume is not taken in: {error}")
        except Exception:
            self._fail("resuming")

    def rolled_back(self, to_step: Any) -> None:
        """Say that the loop has restored the checkpoint of `to_step`, as a decision "rollback" asked: a new attempt."""
        try:
            to_step = as_step(to_step)
            memory = self._remember(to_step, None)
            memory.roll_back(to_step, memory.attempt + 1)
            self._take_over(memory)
            self.checkpoints.go_back(to_step)
            self._write("rollback", {"to_step": to_step, "attempt": self.attempt, "time": time.time()}, sync=True)
        except ValueError as error:
            self._warn_once("rolled_back", f"the rollback is not taken in: {error}")
        except Exception:
            self._fail("rolling back")

    def adopt(self, reason: Finding) -> None:
        """Take over the finding for which another process of the run decided to act."""
        try:
            if self._standing is None:
                self._begin()
                self._report(reason)
                self._stand(reason)
        except Exception:
            self._fail("taking over a finding of another rank")

    def windows(self) -> Iterator[HorizonWindow]:
        """Yield the windows that KL_BLOWUP judges, as they stand: the shortest horizon first, the whole run last."""
        return self._panel.windows()

    def close(self) -> None:
        """Close the journal and let another guard use the folder."""
        try:
            self.checkpoints.close()
            if self._journal is not None:
                self._journal.close()
        except Exception:
            self._fail("closing")

    # One observation, in order: read, merged or appended, journaled, judged, decided.

    def _read(self, step: Any, metrics: tuple[Any, ...], window: Any) -> Observation | None:
        try:
            step = as_step(step)
        except ValueError as error:
            self._warn_once("step", f"an observation is left out: {error}")
            return None
        try:
            window = as_window(window)
        except ValueError as error:
            self._warn_once("window", f"the observation counts as one step: {error}")
            window = 1
        values: dict[str, Any] = {}
        for name, value in zip(METRICS, metrics, strict=True):
            try:
                values[name] = as_number(name, value)
            except ValueError as error:
                self._warn_once(name, f"a value counts as missing: {error}")
        return Observation(step, window=window, **values)

    def _observe(self, observation: Observation) -> Decision:
        last = self.history.steps[-1] if len(self.history) else None
        if last is not None and observation.step < last:
            self._warn_once(
                "smaller",
                f"step {observation.step} came after step {last} and is left out, like all up to {last}: if the run "
                f"went back, say so with guard.resumed({observation.step - 1})",
            )
            return self._decision(())
        self._begin()
        self._memory.observe(observation)
        self._write("observation", {"attempt": self.attempt, **observation.known()})
        self._repeats = self._repeats + 1 if last == observation.step else 0
        if self._repeats:
            observation = self.history[-1]  # with what was known of the step before
        if self._repeats == STUCK:
            self._warn_once("stuck", f"step {last} was observed {STUCK} times; its first KL is what counts")
        findings = tuple(
            explain(replace(finding, attempt=self.attempt), self.history, token_mean=self.config.token_mean)
            for finding in self._panel.judge(observation, grace=self._grace_left > 0)
        )
        if last != observation.step:
            self._grace_left = max(0, self._grace_left - 1)
        for finding in findings:
            self._report(finding)
        asking = [finding for finding in findings if self._panel.acts(finding)]
        if asking and self._standing is None and self.config.action != "warn":
            self._stand(max(asking, key=lambda finding: finding.severity.rank))
        return self._decision(findings)

    def _report(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._write("finding", {"time": time.time(), "finding": finding.to_dict()}, sync=True)
        if self._announces:
            logger.log(_LOG_LEVEL[finding.severity], "kl-guard: %s", describe(finding))

    def _stand(self, reason: Finding) -> None:
        """Decide, once: the decision stands until the loop has gone back or resumed, whatever else fails here."""
        self._standing = Decision("halt", (), None, reason)
        target = self._target(reason)
        action, note = self._choose(reason, target)
        self._standing = decision = Decision(action, (), target, reason, note)
        self._write("decision", {"time": time.time(), "action": action, "note": note, "step": reason.step}, sync=True)
        written = self._write_incident(decision)
        if self._announces:
            logger.error("kl-guard: %s", describe_decision(decision))
            if written is not None:
                logger.error("kl-guard: the incident is in %s", written)

    def _target(self, reason: Finding) -> Checkpoint | None:
        """Return the checkpoint to go back to: KL logged at a step shows the weights of the step before."""
        departure = reason.step if reason.departure_step is None else reason.departure_step
        index = self.history.index(departure)
        first = self.history[index].first_step if index < len(self.history) else departure
        try:
            return self.checkpoints.newest_before(first - 1 - self.config.rollback_margin)
        except Exception:
            self._fail("looking for a checkpoint")
            return None

    def _write_incident(self, decision: Decision) -> Path | None:
        """Write what is needed to understand a decision; return where."""
        if self.folder is None or not self._writes():
            return None
        try:
            return incidents.write(self.folder, decision, self.config, self.run_id, self.history)
        except OSError as error:
            self._warn_once("incident", f"the incident could not be written: {error}")
            return None

    def _choose(self, reason: Finding, target: Checkpoint | None) -> tuple[Any, str]:
        if self.config.action == "halt":
            return "halt", ""
        if self._panel.wrong_from_the_start and reason.signature != "KL_NONFINITE":
            return "halt", "not going back: the KL was this high from the first step, so no checkpoint is better"
        if self._memory.rollbacks >= self.config.max_rollbacks:
            return "halt", f"not going back: all {self.config.max_rollbacks} rollbacks are used up"
        if target is None:
            return "halt", "not going back: there is no checkpoint from before the departure"
        return "rollback", ""

    def _decision(self, findings: tuple[Finding, ...]) -> Decision:
        if self._standing is None:
            return Decision(findings=findings)
        return replace(self._standing, findings=findings)

    # Beginning, resuming, writing.

    def _begin(self) -> None:
        """Begin a fresh run, once: a journal that an earlier run left in the folder is put aside."""
        if self._begun:
            return
        self._begun = True
        self._memory.run_id = _new_run_id()
        if self._journal is not None:
            self._journal.archive()
        self._write_run()
        self.checkpoints.begin(self.run_id, writes=self._writes())

    def _write_run(self) -> None:
        facts = {"run_id": self.run_id, "format": 1, "version": __version__, "config": asdict(self.config)}
        self._write("run", {"time": time.time(), **facts}, sync=True)

    def _remember(self, step: int, history: Iterable[Mapping[str, Any]] | None) -> Memory:
        """Return what is known up to `step`: from this process, else the journal, else the rows given."""
        if self._begun:
            self._memory.checkpoints = {c.step: c for c in self.checkpoints}
            self._memory.go_back(step)
            return self._memory
        self._begun = True
        self._memory = memory = recall(Journal(self.folder).read()) if self.folder is not None else Memory()
        self._warn_of_trouble(memory.findings, step)
        memory.go_back(step)
        if memory.run_id is None:
            memory.run_id = _new_run_id()
            self._write_run()
        if not len(memory.history):
            self._read_rows(memory, history or (), step)
        if not len(memory.history) and step > 0:
            memory.mid_run = True
            self._warn_once(
                "no memory",
                f"resumed at step {step} without a journal or log history: the baseline begins anew",
            )
        return memory

    def _warn_of_trouble(self, findings: Iterable[Finding], step: int) -> None:
        """Say that a run is resumed from weights that the trouble had reached already."""
        for finding in findings:
            departure = finding.departure_step
            if self._panel.acts(finding) and departure is not None and departure - 1 <= step:
                self._warn_once(
                    "trouble",
                    f"resumed at step {step}, but the trouble that {finding.signature} reported began at step "
                    f"{departure}: an older checkpoint is from before it",
                )

    def _read_rows(self, memory: Memory, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Put the rows of a log up to `step` into memory and journal."""
        for row in rows:
            try:
                memory.observe(Observation.from_mapping(row, row.get("step"), row.get("window", 1)))
            except ValueError as error:
                self._warn_once("row", f"a row of the log history is left out: {error}")
        memory.go_back(step)
        if len(memory.history):
            self._write("resume", {"step": 0, "time": time.time()})  # nothing that the journal had before counts
        for past in memory.history:
            self._write("observation", {"attempt": memory.attempt, **past.known()})

    def _take_over(self, memory: Memory) -> None:
        """Become what `memory` says; detectors read its history again, without saying anything."""
        self._memory = memory
        self.checkpoints.begin(self.run_id, memory.checkpoints.values(), writes=self._writes())
        self._standing = None
        self._repeats = 0
        said = [finding for finding in self.findings if finding.attempt == self.attempt]
        self._panel.restore(self.history, said, mid_run=memory.mid_run)
        acted = any(self._panel.acts(finding) for finding in said)
        self._grace_left = self.config.grace if acted else 0
        if memory.since_rollback is not None:
            self._grace_left = max(self._grace_left, self.config.grace - memory.since_rollback)

    def _writes(self) -> bool:
        """Whether this guard is the one that writes the folder."""
        return self._journal is not None and self._journal.acquire()

    def _write(self, kind: str, fields: Mapping[str, Any], *, sync: bool = False) -> None:
        if self._journal is not None:
            self._journal.write({"type": kind, **fields}, sync=sync)

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            if self.rank == 0:
                logger.warning("kl-guard: %s", text)

    def _fail(self, doing: str) -> None:
        """A fault of the guard itself: said once per place, with its traceback; the run goes on."""
        self.blind = True
        if doing not in self._warned:
            self._warned.add(doing)
            logger.exception("kl-guard: a fault of the guard itself in %s; training goes on, the guard is blind", doing)


def _new_run_id() -> str:
    return uuid.uuid4().hex[:12]


def _rank_from_environment() -> int:
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0
