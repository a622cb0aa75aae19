"""The guard: observations in, decision out. The order of events is read here."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kl_guard import incidents
from kl_guard._version import __version__
from kl_guard.alerts import Alerts, OnIncident, incident_of
from kl_guard.checkpoints import Keeper, sizes_of
from kl_guard.config import GuardConfig, KLKind
from kl_guard.decisions import before_the_trouble, choose, target
from kl_guard.diagnosis import explain
from kl_guard.findings import Checkpoint, Decision, Finding, Severity
from kl_guard.forks import when_forked
from kl_guard.history import History
from kl_guard.memory import Changes, Failure, Memory, Return, retell
from kl_guard.messages import describe, describe_decision
from kl_guard.observation import Observation, as_step, read_observation
from kl_guard.outliers import OutlierLedger
from kl_guard.panel import Panel
from kl_guard.progress import on_terminal, unseen
from kl_guard.reading import KLSource
from kl_guard.run_folder import RunFolder
from kl_guard.stats import HorizonWindow
from kl_guard.token_keeper import TokenKeeper, TokenText
from kl_guard.token_stats import TokenStats, metrics_of
from kl_guard.trainer_log import TrainerLog
from kl_guard.versions import versions
from kl_guard.weak import weakly

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
    token_text:
        Gives the text of a token id, such as a tokenizer's `convert_ids_to_tokens`; outlier tokens are shown with it.
    alerts:
        Apprise URLs that hear of each incident; those in the environment variable `KL_GUARD_ALERTS` where None.
    on_incident:
        Called with an `Incident` for each, on a thread of its own.

    Raises
    ------
    ModuleNotFoundError
        For URLs without the package apprise.
    TypeError, ValueError
        For an argument that is not allowed.

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
        token_text: TokenText | None = None,
        alerts: Alerts | Iterable[str] | str | None = None,
        on_incident: OnIncident | None = None,
    ) -> None:
        self.config = GuardConfig.build(config)
        self._alerts = Alerts.build(alerts, on_incident)
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
        retell, warn_once = weakly(self._retell, ()), weakly(self._warn_once, None)
        self._files = RunFolder(self.folder, writes=self.rank == 0, retell=retell, warn=warn_once)
        self._tokens = TokenKeeper(self.folder, log_text=self.config.log_text, text_of=token_text, warn=warn_once)
        shown = on_terminal if self._announces else unseen
        self.checkpoints = Keeper(self.folder, pins=self.config.pin_checkpoints, shown=shown)
        self._panel = self._new_panel()
        self._trainer_log = TrainerLog(warn_once)
        self._resumed: Return | None = None
        self._begun = False
        self._standing: Decision | None = None
        self._grace_left = 0
        self._repeats = 0
        self._warned: set[str] = set()
        self._judging = False
        self._is_copy = False
        when_forked(self, KLGuard._disown)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={len(self.history)}, attempt={self.attempt}, level={self.level})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as for a process that is spawned, knows what the guard knows, and watches without files or words."""
        return _copy_of, (type(self), self.config, self.rank, self.expected_observations, self._memory, self._resumed)

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
    def outliers(self) -> OutlierLedger:
        """Which tokens have carried the KL so far, where tokens are observed."""
        return self._tokens.ledger

    @property
    def suspicion(self) -> bool:
        """Whether something that may become a blow-up was seen in the last 20 observations."""
        return self._panel.suspicion

    @property
    def refused(self) -> bool:
        """Whether another guard has the folder: another process, or a newer one in this process."""
        return self._files.refused

    @property
    def spikes(self) -> int:
        """How many of the last 100 observations had a KL far above the rest, gone at the next (KL_SPIKES)."""
        return self._panel.spikes

    @property
    def decision(self) -> Decision:
        """The decision that stands now, without findings."""
        return self._decision(())

    @property
    def level(self) -> int:
        """0 calm, 1 suspicion of a blow-up, 2 a decision to halt or go back, -1 blind."""
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
        reference_checksum: Any = None,
        tokens: Any = None,
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
        reference_checksum:
            A number that stays the same as long as the parameters of the reference do.
        tokens:
            The step's tokens, as `kl_guard.tokens.summarize_tokens` gives them: `kl_mean` and `kl_max` come from there
            where they are not given, and it is known which tokens carry the KL.
        window:
            How many steps the values average.

        Returns
        -------
        Decision
            What to do. "halt" and "rollback" stand until `resumed` or `rolled_back`, new findings are given once.
        """
        try:
            metrics = {
                "kl_mean": kl_mean,
                "kl_max": kl_max,
                "reward": reward,
                "reward_std": reward_std,
                "entropy": entropy,
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": learning_rate,
                "beta": beta,
                "reference_checksum": reference_checksum,
            }
            stats = None if tokens is None else self._tokens.read(tokens)
            if stats is not None:
                known = {name: value for name, value in metrics.items() if value is not None}
                metrics = {**metrics, **metrics_of(stats, self.config.kl_kind), **known}
            observation = self._read(step, metrics, window)
            if observation is None:
                return self._decision(())
            if stats is not None:
                self._keep_tokens(observation.step, stats)
            return self._observe(observation)
        except Exception:
            self._fail("observing a step")
            return self._standing or Decision()  # what was decided before stands

    def log(self, metrics: Any, step: Any = None, *, key: str | None = None, window: Any = 1) -> Decision:
        """Take in what a trainer logs, by its own names, and decide as `observe` does.

        For one line beside a trainer's own logging call (see docs/frameworks.md); `kl_guard.names` has the names that
        are understood. At the first log that has a KL it is settled which one is watched and of which kind it is
        (unless the config says so), and it is said once. Logs of one step add up. Never raises.

        Parameters
        ----------
        metrics:
            Values by name; numbers, numpy scalars, one-element tensors, numbers written as text.
        step:
            Number of the step; where None, what `metrics` has as `global_step` or the like, else logs are counted.
        key:
            Name of the KL to watch, where the table shall not decide.
        window:
            How many steps the values average.

        Examples
        --------
        >>> guard = KLGuard(announce=False)
        >>> guard.log({"actor/kl_loss": 0.02, "actor/ppo_kl": 0.001, "actor/lr": 1e-6}, step=1).action
        'continue'
        """
        try:
            kind = self._trainer_log.source and self._trainer_log.source.kind
            logged = self._trainer_log.read(metrics, step, key, self._last_step())
            source = self._trainer_log.source
            if source is not None and source.kind is not None and kind is None:
                self._watch(source.kind)
            observation = None if logged is None else self._read(logged.step, logged.values, window)
            return self._decision(()) if observation is None else self._observe(observation)
        except Exception:
            self._fail("reading a log")
            return self._standing or Decision()

    @property
    def source(self) -> KLSource | None:
        """Which KL `log` reads; None where it has read none."""
        return self._trainer_log.source

    def take(self, observation: Observation) -> Decision:
        """Take in an observation as it was recorded, of tokens too, and decide as `observe` does."""
        try:
            return self._observe(observation)
        except Exception:
            self._fail("observing a step")
            return self._standing or Decision()

    def checkpoint_saved(
        self,
        step: Any,
        path: str | os.PathLike[str],
        *,
        aligned: bool = True,
        facts: Mapping[str, Any] | None = None,
        take: bool = False,
    ) -> None:
        """Say that a complete checkpoint of `step` lies in `path`, a folder or one file.

        It is pinned: kept in `<output_dir>/kl_guard/pins/` out of reach of the trainer's rotation, as long as it may be
        needed.

        Parameters
        ----------
        step, path:
            Which checkpoint it is, and its folder or file.
        aligned:
            False where the framework cannot resume from it exactly: then it is preferred less.
        facts:
            What is to be compared after going back to it, as plain values (see `facts_of`).
        take:
            Whether the folder was made for the guard alone, and may become the pin itself.
        """
        try:
            calm = not self.suspicion
            path = os.fsdecode(path)
            files = sizes_of(Path(path))
            checkpoint = Checkpoint(as_step(step), path, calm, aligned, self.attempt, files, dict(facts or {}))
            self._begin()
            self._memory.checkpoints[checkpoint.step] = checkpoint
            self._files.write("checkpoint", {**asdict(checkpoint), "path": self._files.as_written(path)}, sync=True)
            if self.refused:
                self.checkpoints.disown()
            self.checkpoints.saved(checkpoint, suspicion=self.suspicion, take=take)
        except ValueError as error:
            self._warn_once("checkpoint", f"a checkpoint is left out: {error}")
        except Exception:
            self._fail("recording a checkpoint")

    def resumed(
        self,
        step: Any,
        history: Iterable[Mapping[str, Any]] | None = None,
        present: Mapping[int, Path] | None = None,
    ) -> None:
        """Say that the run goes on from a checkpoint of `step`; what was observed later is dropped.

        Later checkpoints of the run are moved to `<output_dir>/kl_guard/quarantine/`. A halt that stood is over; if
        what led to it still holds after `grace` observations, it is said again. In a new process the guard rebuilds its
        memory from the journal, or from `history` (rows with `step` and metrics, such as the trainer's log history)
        where there is no journal. `present` are checkpoints of this run in its folder, by step: the guard may not have
        been told of the last one before a kill. It takes note of them, and pins the one of `step` where it is not.
        """
        try:
            step = as_step(step)
            self._remember(step, history)
            unknown = [path for saved_at, path in sorted((present or {}).items(), reverse=True) if saved_at > step]
            self._take_over(step, aside=unknown)
            self._files.write("resume", {"step": step, "time": time.time()}, sync=True)
            self._find(step, present or {})
        except ValueError as error:
            self._warn_once("resumed", f"the resume is not taken in: {error}")
        except Exception:
            self._fail("resuming")

    def recover(self) -> bool:
        """Read the journal of an earlier process; return whether that one decided to go back and did not get to it.

        Then `decision` says so again, and `go_back` and `rolled_back` finish it. Before anything is observed.
        """
        try:
            if self._begun or self.folder is None:
                return False
            memory = self._files.recall()
            if memory.pending is None or memory.run_id is None:
                return False
            back = memory.checkpoints.get(memory.pending) or Checkpoint(memory.pending, "")
            self._begun, self._memory = True, memory
            self.checkpoints.begin(self.run_id, memory.checkpoints.values(), writes=self._files.is_mine())
            reason = next((f for f in reversed(memory.findings) if self._panel.acts(f)), None)
            self._standing = Decision("rollback", (), back, reason, "decided before the process ended")
            if self._announces:
                logger.warning("kl-guard: an earlier process had decided to go back to step %d", back.step)
        except Exception:
            self._fail("reading what an earlier process had decided")
            return False
        return True

    def go_back(
        self, folder_of: Callable[[int], Path] | None = None, present: Mapping[int, Path] | None = None
    ) -> Checkpoint | None:
        """Make the files ready for the rollback that was decided, and return the checkpoint to restore.

        Later checkpoints are moved aside, so that "resume from the last checkpoint" finds this one. Call `rolled_back`
        next, then restore. None, and a decision to halt, where there is nothing sound to go back to any more.

        Parameters
        ----------
        folder_of:
            Where the framework looks for the checkpoint of a step, folder or file. Where rotation has taken it from
            there, the pin is put back.
        present:
            Checkpoints that lie there, by step; those the guard was not told of are moved aside too.
        """
        try:
            standing = self._standing
            if standing is None or standing.action != "rollback" or standing.checkpoint is None:
                return None
            good = before_the_trouble(self.config, self._memory, standing.reason)
            back = self.checkpoints.newest_before(standing.checkpoint.step + 1, good=good)
            if back is None:
                self.give_up("the checkpoint that was to be gone back to is not sound any more")
                return None
            unknown = [path for step, path in sorted((present or {}).items(), reverse=True) if step > back.step]
            self.checkpoints.move_aside(unknown, self.attempt)
            if folder_of is not None:
                self.checkpoints.provide(back, folder_of(back.step), self.attempt)
        except Exception:
            self._fail("making the files ready for going back")
            return None
        return back

    def rolled_back(self, to_step: Any) -> None:
        """Say that the checkpoint of `to_step` is being restored, as a decision "rollback" asked: a new attempt."""
        try:
            to_step = as_step(to_step)
            self._remember(None, None)
            self._take_over(to_step, new_attempt=True)
            self._files.write("rollback", {"to_step": to_step, "attempt": self.attempt, "time": time.time()}, sync=True)
        except ValueError as error:
            self._warn_once("rolled_back", f"the rollback is not taken in: {error}")
        except Exception:
            self._fail("rolling back")

    @property
    def changes(self) -> Changes | None:
        """What the present attempt does otherwise than the run as started; None where that is still to be settled."""
        return self._memory.changes.get(self.attempt)

    def changes_in(self, checkpoint: Checkpoint | None) -> Changes:
        """Return what a checkpoint holds already of what attempts did otherwise."""
        return self._memory.changes.get(0 if checkpoint is None else checkpoint.attempt) or Changes()

    def changed(self, changes: Changes) -> None:
        """Say what the present attempt does otherwise; a resumed run does the same."""
        try:
            self._memory.changes[self.attempt] = changes
            self._files.write("change", {"attempt": self.attempt, **asdict(changes)}, sync=True)
        except Exception:
            self._fail("noting what was changed")

    def give_up(self, why: str) -> None:
        """Halt instead of going back, or after it: a check failed, and `why` names it."""
        try:
            standing = self._standing or Decision()
            self._standing = decision = replace(standing, action="halt", note=why)
            self._memory.pending = self._memory.pending_failure = None
            self._files.write(
                "decision", {"time": time.time(), "action": "halt", "note": why, "step": self._last_step()}
            )
            if self._announces:
                logger.error("kl-guard: halting: %s", decision.note)
            self._alert(decision, decision.reason)
        except Exception:
            self._fail("giving up")

    def note(self, facts: Mapping[str, Any]) -> None:
        """Say something about the set-up of the run that may be the cause of a finding; facts add to earlier ones.

        Plain values by name, in words where they are text: see `kl_guard.diagnosis` for the names that are understood.
        """
        try:
            news = {name: value for name, value in facts.items() if self._memory.facts.get(name) != value}
            if news:
                self._memory.facts.update(news)
                if self._begun:
                    self._files.write("facts", {"facts": news})
        except Exception:
            self._fail("noting facts")

    def adopt(self, reason: Finding) -> None:
        """Take over the finding for which another process of the run decided to act."""
        try:
            if self._standing is None:
                self._begin()
                self._stand(reason)
        except Exception:
            self._fail("taking over a finding of another rank")

    def windows(self) -> Iterator[HorizonWindow]:
        """Yield the windows that KL_BLOWUP judges, as they stand: the shortest horizon first, the whole run last."""
        return self._panel.windows()

    def close(self) -> None:
        """Close the journal and let another guard use the folder; alerts under way get up to 10 s to be sent."""
        try:
            self.checkpoints.close()
            self._tokens.close()
            self._files.close()
            self._alerts.close()
        except Exception:
            self._fail("closing")

    def _new_panel(self) -> Panel:
        warmup = self.config.warmup_of(self.expected_observations)
        fail = weakly(self._fail, None)
        return Panel(self.config, warmup, lambda name: fail(f"{name}, which is off from now on"))

    def _watch(self, kind: KLKind) -> None:
        """Judge KL as one of this kind from the start, unless the config names another than the default."""
        if self.config.kl_kind != GuardConfig().kl_kind or kind == self.config.kl_kind:
            return
        self.config = replace(self.config, kl_kind=kind)
        self._rebuild_panel()
        if self._begun:
            self._write_run()

    def _rebuild_panel(self) -> None:
        self._panel = self._new_panel()
        memory = self._memory
        self._panel.restore(
            self.history, self.findings, mid_run=memory.mid_run, returned=memory.returned, resumed=self._resumed
        )

    # One observation, in order: read, merged or appended, journaled, judged, decided.

    def _keep_tokens(self, step: int, stats: TokenStats) -> None:
        if not len(self.history) or step >= self.history.steps[-1]:
            self._begin()
            # Where the disk refuses the journal, which is said already, what is decided by comes first.
            writes = self._files.is_mine() and not self._files.failing
            self._tokens.keep(step, self.attempt, stats, writes=writes)

    def _read(self, step: Any, metrics: Mapping[str, Any], window: Any) -> Observation | None:
        observation, complaints = read_observation(step, metrics, window)
        for key, text in complaints.items():
            self._warn_once(key, text)
        return observation

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
        if self._judging:  # an interrupt came: some detectors know of what was judged last, or was gone back to
            self._rebuild_panel()
        self._judging = True
        self._memory.observe(observation)
        self._files.write("observation", {"attempt": self.attempt, **observation.known()})
        self._repeats = self._repeats + 1 if last == observation.step else 0
        if self._repeats:
            observation = self.history[-1]  # with what was known of the step before
        if self._repeats == STUCK:
            self._warn_once("stuck", f"step {last} was observed {STUCK} times; its first KL is what counts")
        new = self._panel.judge(observation, grace=self._grace_left > 0)
        findings = tuple(self._explained(finding) for finding in new)
        if last != observation.step:
            self._grace_left = max(0, self._grace_left - 1)
        asking = [finding for finding in findings if self._panel.acts(finding)]
        reason = None
        if asking and self._standing is None and self.config.action != "warn":
            # What is not finite is called so, though it is above a ceiling too.
            reason = max(asking, key=lambda finding: (finding.severity.rank, finding.signature == "KL_NONFINITE"))
        for finding in findings:
            if finding is not reason:
                self._report(finding)
            if finding in asking and self.config.action == "warn":
                self._alert(Decision(findings=(finding,)), finding)
        if reason is not None:
            self._stand(reason)
        self._judging = False
        return self._decision(findings)

    def _explained(self, finding: Finding) -> Finding:
        return explain(
            replace(finding, attempt=self.attempt),
            self.history,
            token_mean=self.config.token_mean,
            since=-1 if self._memory.returned is None else self._memory.returned.step,
            facts=self._memory.facts,
            outliers=self._tokens.ledger,
            companions=self._panel.companions,
        )

    def _report(self, finding: Finding) -> None:
        self._say(finding)
        self._files.write("finding", _record_of(finding), sync=True)

    def _say(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._tokens.mark(finding.step)
        if self._announces:
            logger.log(_LOG_LEVEL[finding.severity], "kl-guard: %s", describe(finding))

    def _stand(self, reason: Finding) -> None:
        """Report `reason` and decide, once: the decision stands until the loop has gone back or resumed.

        Finding and decision are written as one. Were a process killed between them, the next one would know of the
        trouble, not say it again, and go on from a checkpoint within it.
        """
        decision, records = self._decide(reason)  # interrupted up to here, nothing is decided: it is judged again
        self._standing = decision
        written = None
        try:
            self._say(reason)
            self._judging = False
            self._files.write_together(records)
            written = self._files.write_incident(decision, self.config, self.run_id, self.history, self._seen(decision))
            if self._announces:
                logger.error("kl-guard: %s", describe_decision(decision))
                if written is not None:
                    logger.error("kl-guard: the incident is in %s", written)
        finally:
            self._alert(decision, reason, written)

    def _decide(self, reason: Finding) -> tuple[Decision, list[dict[str, Any]]]:
        """Return the decision for `reason`, and what the journal keeps of both."""
        decision = Decision("halt", (), None, reason)
        records: list[dict[str, Any]] = [{"type": "finding", **_record_of(reason)}]
        try:
            decision, facts = self._decided(reason)
            records.append({"type": "decision", "time": time.time(), **facts})
        except Exception:
            self._fail("deciding")
        return decision, records

    def _decided(self, reason: Finding) -> tuple[Decision, dict[str, Any]]:
        """Return the decision for `reason`, and what the journal keeps of it."""
        back = self._target(reason)
        action, note = choose(self.config, self._memory, reason, back, hopeless=self._why_hopeless())
        to_step = back.step if back is not None and action == "rollback" else None
        failure = Failure(reason.signature, reason.step, reason.departure_step)
        self._memory.decide(failure, to_step)
        facts = {"action": action, "note": note, "to_step": to_step, **asdict(failure)}
        return Decision(action, (), back, reason, note), facts

    def _why_hopeless(self) -> str:
        """Return why no checkpoint is better than the present state, "" where one may be."""
        if self._panel.wrong_from_the_start:
            return "the KL was this high from the first step, so no checkpoint is better"
        few = self._tokens.ledger.few_completions()
        if few is not None:
            return f"{few} carry the KL and the others do not: what is wrong with them would be wrong again"
        return ""

    def _target(self, reason: Finding) -> Checkpoint | None:
        try:
            return target(self.config, self._memory, self.checkpoints, reason)
        except Exception:
            self._fail("looking for a checkpoint")
            return None

    def _seen(self, decision: Decision) -> incidents.Tokens | None:
        """Return the tokens of the step that a decision rests on."""
        step = decision.reason.step if decision.reason is not None else -1
        outliers = self.outliers.at(step)
        return incidents.Tokens(step, outliers, self._tokens.excerpts(step)) if outliers else None

    def _alert(self, decision: Decision, finding: Finding | None, written: Path | None = None) -> None:
        """Let somebody know, once for each incident of the run, whatever process it is in by now."""
        if self.rank != 0 or self._is_copy:
            return
        try:
            targets = self._alerts.targets(tracked=self._announces)
            incident = incident_of(
                decision,
                finding,
                step=self._last_step() if finding is None else finding.step,
                attempt=self.attempt,
                run_id=self.run_id,
                output_dir=None if self.folder is None else self.folder.parent,
                written=written,
            )
            if not targets or incident.key in self._memory.alerted:
                return
            self._memory.alerted.add(incident.key)
            attempt, step, signature, action = incident.key
            facts = {"attempt": attempt, "step": step, "signature": signature, "action": action}
            if self._begun:
                self._files.write("alert", {"time": time.time(), **facts})
            self._alerts.send(incident, targets)
        except Exception as error:
            self._warn_once("alert", f"an alert was not sent ({type(error).__name__}); training goes on")

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
        self._files.begin()
        self._tokens.begin(writes=self._files.is_mine())
        self._write_run()
        self.checkpoints.begin(self.run_id, writes=self._files.is_mine())

    def _retell(self) -> Iterable[Mapping[str, Any]]:
        """Yield records that add up to what is known of the run."""
        yield {"type": "run", **self._run_facts()}
        yield from self._files.retold(retell(self._memory))

    def _run_facts(self) -> dict[str, Any]:
        facts = {"run_id": self.run_id, "format": 1, "version": __version__, "config": asdict(self.config)}
        return {"time": time.time(), **facts, "versions": versions()}

    def _write_run(self) -> None:
        self._files.write("run", self._run_facts(), sync=True)
        if self._memory.facts:
            self._files.write("facts", {"facts": self._memory.facts})

    def _remember(self, step: int | None, history: Iterable[Mapping[str, Any]] | None) -> None:
        """Know what was: from this process, else the journal, else the rows given, up to `step`."""
        if self._begun:
            return
        self._begun = True
        facts = self._memory.facts
        self._memory = memory = self._files.recall()
        if step is not None:
            self._warn_of_trouble(memory.findings, step)
        if memory.run_id is None:
            memory.run_id = _new_run_id()
            self._write_run()
        self.note(facts)
        self._tokens.recall(memory.told_at)
        if step is None:
            return
        memory.history.truncate(step)
        if not len(memory.history):
            self._read_rows(memory, history or (), step)
        if not len(memory.history) and step > 0:
            memory.mid_run = True
            self._warn_once(
                "no memory",
                f"resumed at step {step} without a journal or log history: the baseline begins anew",
            )

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
        memory.history.truncate(step)
        if len(memory.history):
            self._files.write("resume", {"step": 0, "time": time.time()})  # nothing that the journal had before counts
        for past in memory.history:
            self._files.write("observation", {"attempt": memory.attempt, **past.known()})

    def _take_over(self, step: int, *, new_attempt: bool = False, aside: Iterable[Path] = ()) -> None:
        """Go on from `step`; detectors read the history again, without saying anything."""
        self._judging = True
        memory = self._memory
        known = {**memory.checkpoints, **{checkpoint.step: checkpoint for checkpoint in self.checkpoints}}
        self.checkpoints.begin(self.run_id, known.values(), writes=self._files.is_mine())
        self.checkpoints.go_back(step, self.attempt)
        self.checkpoints.move_aside(aside, self.attempt)
        self._tokens.ledger.go_back(step)
        self._resumed = resumed = Return(step, memory.recorded_kl(step))
        if new_attempt:
            memory.roll_back(step, self.attempt + 1)
        else:
            memory.go_back(step)
        self._standing = None
        self._repeats = 0
        said = [finding for finding in self.findings if finding.attempt == self.attempt]
        self._panel.restore(self.history, said, mid_run=memory.mid_run, returned=memory.returned, resumed=resumed)
        acted = any(self._panel.acts(finding) for finding in said)
        self._grace_left = self.config.grace if acted or step > 0 else 0  # engines may need some steps to recover
        if memory.since_rollback is not None:
            self._grace_left = max(self._grace_left, self.config.grace - memory.since_rollback)
        self._judging = False

    def _find(self, step: int, present: Mapping[int, Path]) -> None:
        """Take note of checkpoints up to `step` that a kill kept the guard from being told of, or from pinning."""
        for saved_at, path in sorted(present.items()):
            if saved_at <= step and self.checkpoints.get(saved_at) is None:
                self.checkpoint_saved(saved_at, path)
        resumed_from = self.checkpoints.get(step)
        if resumed_from is not None:
            self.checkpoints.pin(resumed_from)

    def _last_step(self) -> int:
        return self.history.steps[-1] if len(self.history) else 0

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            if self.rank == 0 and not self._is_copy:
                logger.warning("kl-guard: %s", text)

    def _fail(self, doing: str) -> None:
        """A fault of the guard itself: said once per place, with its traceback; the run goes on."""
        news = not self.blind
        self.blind, self._judging = True, False
        if doing not in self._warned:
            self._warned.add(doing)
            logger.exception("kl-guard: a fault of the guard itself in %s; training goes on, the guard is blind", doing)
        if news:
            note = (
                f"A fault of the guard itself in {doing}: it is blind there from now on, and training goes on unwatched"
            )
            self._alert(Decision(note=f"{note}. The log has the traceback"), None)

    def _disown(self) -> None:
        """In a forked child: the run belongs to the parent, and this is a copy that neither writes nor speaks."""
        self._announces, self._is_copy = False, True
        self._files.disown()
        self._tokens.disown()
        self.checkpoints.disown()


def _copy_of(
    cls: type[KLGuard],
    config: GuardConfig,
    rank: int,
    expected_observations: int | None,
    memory: Memory,
    resumed: Return | None,
) -> KLGuard:
    guard = cls(config, rank=rank, expected_observations=expected_observations, announce=False, alerts=())
    guard._memory, guard._resumed, guard._begun = memory, resumed, True
    guard._is_copy = True
    guard._rebuild_panel()
    return guard


def _record_of(finding: Finding) -> dict[str, Any]:
    return {"time": time.time(), "finding": finding.to_dict()}


def _new_run_id() -> str:
    return uuid.uuid4().hex[:12]


def _rank_from_environment() -> int:
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0
