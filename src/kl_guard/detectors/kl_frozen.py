"""KL_FROZEN: KL stays exactly 0 although the policy should be moving."""

from __future__ import annotations

from typing import Any

from kl_guard.config import GuardConfig
from kl_guard.detectors.base import Detector
from kl_guard.findings import Finding, Severity
from kl_guard.observation import Observation
from kl_guard.stats import Streak

LASTING = 6
FIRST_STEPS = 3  # policy and reference start equal


class KLFrozen(Detector):
    """Warns when KL is exactly 0 for more than five observations after step 3 while there is something to learn.

    Something to learn: the learning rate is not 0, and the reward varies, within the step or from step to step, or the
    gradient norm is 0 while nothing says that all rewards are equal (then it has to be). Such runs do not train
    (ms-swift issues 5571, 5890), or score the policy against itself. Silent where KL is rounded (`rounded`), and for KL
    to the old policy or the sampler, which is 0 where each batch is used once.

    Parameters
    ----------
    config:
        `rounded` and `kl_kind`.

    Examples
    --------
    >>> detector = KLFrozen()
    >>> findings = [detector.update(Observation(s, kl_mean=0.0, grad_norm=0.0, reward_std=0.3)) for s in range(1, 11)]
    >>> next(f for f in findings if f).step
    9
    """

    signature = "KL_FROZEN"

    def __init__(self, config: GuardConfig | None = None) -> None:
        super().__init__()
        config = config or GuardConfig()
        self._watches = not config.rounded and config.kl_kind not in ("old_policy", "sampler")
        self._zero = Streak()
        self._reward: tuple[int, float] | None = None
        self._reward_before: float | None = None

    def _judge(self, observation: Observation) -> Severity | None:
        can_learn = self._can_learn(observation)
        frozen = observation.kl_mean == 0.0 and observation.step > FIRST_STEPS and can_learn
        length = self._zero.update(observation.step, frozen and self._watches)
        return Severity.WARN if length >= LASTING else None

    def _can_learn(self, observation: Observation) -> bool:
        if observation.learning_rate == 0:
            return False
        reward = observation.reward
        if self._reward is not None and observation.step > self._reward[0]:
            self._reward_before = self._reward[1]
        if reward is not None:
            self._reward = (observation.step, reward)
        if observation.reward_std is not None:
            return observation.reward_std > 0
        moves = reward is not None and self._reward_before is not None and reward != self._reward_before
        return moves or observation.grad_norm == 0

    def _finding(self, observation: Observation, severity: Severity) -> Finding:
        gradient = f", grad norm {observation.grad_norm:g}" if observation.grad_norm is not None else ""
        spread = f", reward std {observation.reward_std:g}" if observation.reward_std is not None else ""
        return Finding(
            self.signature,
            severity,
            observation.step,
            f"KL has been exactly 0 for {self._zero.length} observations{gradient}{spread}: the policy does not move, "
            f"or it is compared with itself",
            onset_step=self._zero.since,
            evidence={
                "observations": self._zero.length,
                "grad_norm": observation.grad_norm,
                "reward_std": observation.reward_std,
                "learning_rate": observation.learning_rate,
            },
        )

    def _forget(self) -> None:
        self._zero.reset()
        self._reward = self._reward_before = None

    def _memory(self) -> dict[str, Any]:
        return {"zero": self._zero.state_dict(), "reward": self._reward, "before": self._reward_before}

    def _recall(self, memory: dict[str, Any]) -> None:
        self._zero.load_state_dict(memory["zero"])
        reward = memory["reward"]
        self._reward = None if reward is None else (int(reward[0]), float(reward[1]))
        self._reward_before = memory["before"]
