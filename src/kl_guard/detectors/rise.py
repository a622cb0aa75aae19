"""The rule behind KL_BLOWUP and KL_GROWTH: a late level far above the early one, still rising.

Both signatures judge the same series with the same rule at two levels, so they share one monitor and its windows.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kl_guard.config import GuardConfig
from kl_guard.observation import Observation
from kl_guard.stats import (
    HorizonWindow,
    RunningRecord,
    Series,
    SlidingMannKendall,
    fit_hinge,
    log_noise,
    trailing_horizons,
)
from kl_guard.stats.horizon import FEWEST

RECORD_FACTOR = 4.0  # of KL_BLOWUP: noise that lasts doubles a record now and then
GROWTH_RECORD_FACTOR = 2.0  # KL_GROWTH halts nothing, and shall come first
GROWTH_SHARE = 0.2  # KL_GROWTH: share of abs_floor
YOUNG = 5  # warm-ups that a window must have before it, until when the record rests on too little
NOISE, COLD_NOISE = 1.0, 2.5  # standard deviations that the late level is lowered by in a young window, in a cold one
FULL_NOISE = 20  # numbers in the late part from which on its level is surer than that
NOISE_ABOVE = 0.01  # share of the floor below which the scatter of KL tells nothing about its level
LOOK_BACK = 48  # observations before the onset in which the departure is looked for, at least
CALMER = 0.25  # share of the slope after the knee that the slope before it may have
GOES_ON = 1.1  # how far above the earlier half of the extremes since the onset the later one must lie
TREND_OVER = 256  # observations in which the extreme log-ratio may rise, at most
LEAST_KL = 1e-6  # nats per token; below it the logarithm shows rounding, not the policy


class Rise(NamedTuple):
    """The rule holds: over which horizon (None is the whole run), and the figures it rests on."""

    horizon: int | None
    start: int
    late_start: int
    baseline: float
    threshold: float
    late_mean: float
    late_median: float
    p: float
    alpha: float


class Level:
    """One level of the rule over the shared windows: its floor, its factor on the record, and what it leaves out."""

    __slots__ = ("floor", "last_above", "record", "record_factor", "run", "skip")

    def __init__(self, series: Series, floor: float, record_factor: float, skip: int) -> None:
        self.floor = floor
        self.record_factor = record_factor
        self.skip = skip
        self.last_above = -1  # position of the last number above the floor: no mean is above it without one
        self.record = RunningRecord(series, skip)
        self.run = HorizonWindow(series, None, skip)

    def reset(self) -> None:
        """Forget everything but the series."""
        self.last_above = -1
        self.record.reset()
        self.run.reset()


class RiseMonitor:
    """The finite KL observations of a run, and whether the rule holds on them at either level.

    Over the n numbers in view of a horizon: baseline b = median of the first max(5, n // 4), threshold
    t = max(ratio * b, floor), late part = last max(5, n // 5). The rule holds when the mean and the median of the late
    part are above t and the Mann-Kendall test on the second half is rising. Horizons are the last 32, 64, 128, ...
    observations and the whole run, and share alpha; a trailing one must also have its late median above four times the
    highest running median of 5 from before it began (KL_GROWTH: twice). A window that reaches into the warm-up uses a
    higher floor. At the level of KL_BLOWUP the late median of a window from the beginning of the run must also stand
    out from the noise of log KL (see `_stands_out`).

    `push` costs O(1). `critical` and `growth` cost O(log n) amortised for each horizon whose late mean is above the
    floor, and O(1) for the others.

    Parameters
    ----------
    config:
        The knobs.
    warmup:
        Observations that count as warm-up; `config.warmup` where None.
    """

    def __init__(self, config: GuardConfig, warmup: int | None = None) -> None:
        self._config = config
        self._warmup = config.warmup if warmup is None else warmup
        self.series = Series()
        self.steps = array("q")
        self.trimmed = array("d")  # KL without the largest tokens; NaN where no tokens were seen
        self.extremes = array("d")  # the largest log-ratio of a token
        self._trailing: list[HorizonWindow] = []
        self._critical = Level(self.series, config.abs_floor, RECORD_FACTOR, skip=0)
        self._growth = Level(self.series, config.abs_floor * GROWTH_SHARE, GROWTH_RECORD_FACTOR, skip=self._warmup)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={len(self.steps)})"

    def push(self, observation: Observation) -> bool:
        """Take in the KL of a step, once; return whether there was a new finite number."""
        kl = observation.kl_mean
        if kl is None or not math.isfinite(kl) or (self.steps and observation.step <= self.steps[-1]):
            return False
        self._append(observation.step, kl, self._without_the_top(observation), observation.log_ratio_extreme)
        return True

    def _without_the_top(self, observation: Observation) -> float | None:
        """Return what is left of KL without the largest tokens, None where it is not known.

        The host may average otherwise than over tokens: what they add to the token mean is taken from its mean.
        """
        kl, whole, trimmed = observation.kl_mean, observation.kl_token_mean, observation.kl_trimmed
        if kl is None or whole is None or trimmed is None or self._config.kl_kind != "k3":
            return None
        return kl - (whole - trimmed)

    def critical(self) -> Rise | None:
        """Whether the rule holds at the level of KL_BLOWUP."""
        return self._rise(self._critical)

    def growth(self) -> Rise | None:
        """Whether the rule holds at the level of KL_GROWTH: a fifth of the floor, without the warm-up."""
        return self._rise(self._growth)

    def onset(self, rise: Rise) -> int:
        """Return the position of the onset of a rise.

        That is the start of the first `sustain` numbers in a row above the threshold, else the first number of the
        late part above it.
        """
        values, row = self.series.values, 0
        for i in range(rise.start, len(values)):
            row = row + 1 if values[i] > rise.threshold else 0
            if row == self._config.sustain:
                return i - row + 1
        return next(i for i in range(rise.late_start, len(values)) if values[i] > rise.threshold)

    def departure(self, onset: int, horizon: int | None = None) -> int:
        """Return the position at which KL left its own regime: the knee of a hinge on log KL, at most `onset`.

        The fit looks at the numbers from before the onset (48, or the horizon where longer) until the crossing is
        sustained: what KL does later says nothing about its beginning. Where KL rises before the knee nearly as it does
        after it, the whole window lies in the trouble, and twice as many numbers are looked at. In a window that begins
        in the warm-up the part before the knee is flat, since there the climb from 0 is a bend of its own; in a run
        long past the warm-up such a window is cut there. Otherwise that part may rise or fall slowly by itself.
        """
        first = self._warmup if onset >= 2 * self._warmup else 0
        logs = [math.log(max(x, LEAST_KL)) for x in self.series.values[first : onset + self._config.sustain]]
        look_back = max(LOOK_BACK, horizon or 0)
        while True:
            start = max(first, onset - look_back)
            hinge = fit_hinge(logs[start - first :], flat=start < self._warmup)
            if start == first or (hinge is not None and hinge.base <= CALMER * hinge.slope):
                return onset if hinge is None else min(onset, start + hinge.knee)
            look_back *= 2

    def few_tokens(self, start: int, first: int, threshold: float, trend_from: int, onset: int) -> bool:
        """Whether a few tokens alone make KL from position `first` on exceed a threshold; `start` begins the window.

        They do where KL without them stays under the threshold and has not grown itself, to `ratio` times its level at
        the start of the window or above a fifth of `abs_floor`; and the extreme log-ratio is not rising from position
        `trend_from` on: drift of the whole policy is often worst on some tokens first. One that only steps up, at
        the `onset`, and stays there is not rising: that is one token scored wrongly from then on.
        """
        early = self.trimmed[start : start + max(FEWEST, (len(self) - start) // 4)]
        late = self.trimmed[first:]
        if not late or any(math.isnan(kl) for kl in (*early, *late)):
            return False
        level = max(self._config.ratio * statistics.median(early), self._config.abs_floor * GROWTH_SHARE)
        if max(statistics.fmean(late), statistics.median(late)) > min(level, threshold):
            return False
        extremes = [x for x in self.extremes[max(trend_from, len(self) - TREND_OVER) :] if not math.isnan(x)]
        trend = SlidingMannKendall(Series(extremes))
        trend.move(0, len(extremes))
        return not (trend.test().rising(self._config.alpha) and _goes_on(self.extremes[onset:]))

    def position(self, step: int) -> int:
        """Return the position of the first number observed at `step` or later."""
        return bisect_left(self.steps, step)

    def reset(self) -> None:
        """Forget everything."""
        self.steps, self.trimmed, self.extremes = array("q"), array("d"), array("d")
        self.series.reset()
        self._trailing.clear()
        self._critical.reset()
        self._growth.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-ready values."""
        tokens = {"trimmed": list(self.trimmed), "extremes": list(self.extremes)}
        return {"steps": list(self.steps), "series": self.series.state_dict(), **tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self.reset()
        columns = (state["steps"], state["series"]["values"], state["trimmed"], state["extremes"])
        for step, value, trimmed, extreme in zip(*columns, strict=True):
            self._append(step, value, trimmed, extreme)

    def windows(self) -> Iterator[HorizonWindow]:
        """Yield the windows of KL_BLOWUP as they stand now, the shortest horizon first, the whole run last."""
        for window in self._horizons(self._critical):
            window.place()
            yield window

    def _append(self, step: int, value: float, trimmed: float | None, extreme: float | None) -> None:
        self.steps.append(step)
        self.trimmed.append(math.nan if trimmed is None else trimmed)
        self.extremes.append(math.nan if extreme is None else extreme)
        self.series.append(value)
        last = len(self.steps) - 1
        for level in (self._critical, self._growth):
            if self._above(last, level):
                level.last_above = last

    def _above(self, position: int, level: Level) -> bool:
        return position >= level.skip and self.series.values[position] > level.floor

    def _horizons(self, level: Level) -> list[HorizonWindow]:
        if self._config.horizon == "run":
            return [level.run]
        usable = len(self.steps) - level.skip
        count = 0
        for count, horizon in enumerate(trailing_horizons(usable), start=1):
            if count > len(self._trailing):
                self._trailing.append(HorizonWindow(self.series, horizon))
        return [*self._trailing[:count], level.run]

    def _rise(self, level: Level) -> Rise | None:
        length = len(self.steps)
        usable = length - level.skip
        if usable < self._config.min_observations or level.last_above < length - max(FEWEST, usable // 5):
            return None  # the longest late part, so every one of them, lies under the floor
        horizons = self._horizons(level)
        alpha = self._config.alpha / len(horizons)
        for window in horizons:
            rise = self._judge(window, level, alpha)
            if rise is not None:
                return rise
        return None

    def _cold(self, window: HorizonWindow, level: Level) -> bool:
        """Whether a window reaches into the warm-up, where the baseline is the climb from 0."""
        return self._config.robust and max(window.start, level.skip) < self._warmup

    def _judge(self, window: HorizonWindow, level: Level, alpha: float) -> Rise | None:
        """Apply the rule to one window, the cheapest condition first."""
        window.place()
        if level.last_above < window.late_start:
            return None
        config = self._config
        floor = level.floor * config.cold_factor if self._cold(window, level) else level.floor
        late_mean = window.late_mean
        if not late_mean > floor:
            return None
        baseline = window.early_median
        threshold = max(config.ratio * baseline, floor)
        if not late_mean > threshold:
            return None
        late_median = window.late_median
        if config.robust:
            if not late_median > threshold:
                return None
            if window.horizon is not None and not late_median > level.record_factor * level.record.before(window.start):
                return None
        trend = window.trend()
        if not trend.rising(alpha):
            return None
        if config.robust and level is self._critical and not self._stands_out(window, level):
            return None
        return Rise(
            window.horizon, window.start, window.late_start, baseline, threshold, late_mean, late_median, trend.p, alpha
        )

    def _stands_out(self, window: HorizonWindow, level: Level) -> bool:
        """Whether the late median stands out from the noise, where little of the run lies before the window.

        It is lowered by 2.5 standard deviations of log KL and must still be above the plain floor in a window that
        reaches into the warm-up, where that alone decides; by one, and must still be `ratio` times the baseline, in
        other windows that begin before five times the warm-up. From 20 numbers in the late part on the deviation
        shrinks with the root of their number.
        """
        if window.start >= YOUNG * self._warmup:
            return True
        noise = log_noise(self.series.values, NOISE_ABOVE * level.floor, window.start)
        noise *= math.sqrt(min(1.0, FULL_NOISE / (len(self) - window.late_start)))
        if self._cold(window, level):
            return window.late_median * math.exp(-COLD_NOISE * noise) > level.floor
        return window.late_median * math.exp(-NOISE * noise) > self._config.ratio * window.early_median


def _goes_on(extremes: Sequence[float]) -> bool:
    """Whether what stepped up goes on rising: its later half lies clearly above the earlier one."""
    known = [x for x in extremes if not math.isnan(x)]
    half = len(known) // 2
    return half > 0 and statistics.median(known[half:]) > GOES_ON * statistics.median(known[:half])
