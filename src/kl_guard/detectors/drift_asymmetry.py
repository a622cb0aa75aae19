"""REF_POLICY_DRIFT_ASYMMETRY: KL sits at particular places or on a particular token."""

from __future__ import annotations

from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak

ELEVATED = 0.2  # of `abs_floor`, as KL_GROWTH has it
SHARE = 0.5


class DriftAsymmetry(Detector):
    """Warns when KL is elevated and half of it sits at one kind of place, `sustain` observations in a row.

    Kinds of place: the last tokens of completions (an end of sequence that policy and reference treat differently), a
    narrow range of positions, or one token id. What the policy learns is seldom so narrow; a chat template or an end of
    sequence that differs is. KL counts as elevated above a fifth of `abs_floor`. Needs tokens, not only scalars.

    Parameters
    ----------
    config:
        `abs_floor` 0.5 nats per token, `sustain` 3, `kl_kind`.

    Examples
    --------
    >>> detector = DriftAsymmetry()
    >>> findings = [detector.update(Observation(s, kl_mean=0.4, end_share=0.9)) for s in range(1, 4)]
    >>> findings[-1].message
    'KL is 0.4, and 90% of it sits on the last tokens of completions'
    """

    signature = "REF_POLICY_DRIFT_ASYMMETRY"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        config = config or GuardConfig()
        self._floor = ELEVATED * config.abs_floor if config.token_mean else 0.0
        self._sustain = config.sustain
        self._streaks = {name: Streak() for name in ("end_share", "place_share", "id_share")}
        self._id: float | None = None

    def _judge(self, observation: Observation) -> Severity | None:
        elevated = observation.kl_mean is not None and observation.kl_mean > self._floor
        same_id = self._streaks["id_share"].length == 0 or observation.id_of_share == self._id
        lasts = False
        for name, streak in self._streaks.items():
            share = getattr(observation, name)
            holds = elevated and share is not None and share >= SHARE and (name != "id_share" or same_id)
            lasts = streak.update(observation.step, holds) >= self._sustain or lasts
        self._id = observation.id_of_share
        return Severity.WARN if lasts else None

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        lasting = [name for name, streak in self._streaks.items() if streak.length >= self._sustain]
        places = {
            "end_share": "on the last tokens of completions",
            "place_share": "in a narrow range of positions",
            "id_share": f"on tokens of id {observation.id_of_share:.0f}" if observation.id_of_share is not None else "",
        }
        said = ", ".join(f"{getattr(observation, name):.0%} of it sits {places[name]}" for name in lasting)
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL is {observation.kl_mean:.4g}, and {said}",
            onset_step=min(since for n in lasting if (since := self._streaks[n].since) is not None),
            evidence={"kl_mean": observation.kl_mean}
            | {name: getattr(observation, name) for name in (*places, "id_of_share")},
        )

    def _forget(self) -> None:
        for streak in self._streaks.values():
            streak.reset()
        self._id = None

    def _memory(self) -> dict[str, Any]:
        return {"streaks": {name: streak.state_dict() for name, streak in self._streaks.items()}, "id": self._id}

    def _recall(self, memory: dict[str, Any]) -> None:
        for name, streak in self._streaks.items():
            streak.load_state_dict(memory["streaks"][name])
        self._id = memory["id"]
