"""What one logged training step says."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

SCALARS = ("kl_mean", "kl_max", "reward", "reward_std", "entropy", "loss", "grad_norm", "learning_rate", "beta")
"""What the loop itself knows of a step."""

TOKEN_METRICS = (
    "kl_token_mean",
    "kl_trimmed",
    "k1_mean",
    "k2_mean",
    "log_ratio_extreme",
    "top_share",
    "end_share",
    "place_share",
    "id_share",
    "id_of_share",
    "padding",
)
"""What the step's tokens say, as far as detectors need it; see `kl_guard.token_stats.TokenStats`."""

METRICS = (*SCALARS, *TOKEN_METRICS, "reference_checksum")

ALIASES: Mapping[str, str] = {"kl": "kl_mean", "lr": "learning_rate"}
"""Other names of a metric, as rows of logs have them."""


LARGEST_STEP = 2**53  # whole numbers up to there are exact as floats


@dataclass(frozen=True, slots=True)
class Observation:
    """The scalars of one logged step; None where the log had nothing.

    KL in nats per token unless the guard's `kl_kind` says otherwise; `window` is how many steps the values average,
    `reference_checksum` a sum over some of the reference's parameters, the same as long as the reference is.
    """

    step: int
    kl_mean: float | None = None
    kl_max: float | None = None
    reward: float | None = None
    reward_std: float | None = None
    entropy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    beta: float | None = None
    kl_token_mean: float | None = None
    kl_trimmed: float | None = None
    k1_mean: float | None = None
    k2_mean: float | None = None
    log_ratio_extreme: float | None = None
    top_share: float | None = None
    end_share: float | None = None
    place_share: float | None = None
    id_share: float | None = None
    id_of_share: float | None = None
    padding: float | None = None
    reference_checksum: float | None = None
    window: int = 1

    @property
    def first_step(self) -> int:
        """First of the steps that the values average."""
        return self.step - self.window + 1

    def merged(self, later: Observation) -> Observation:
        """Return this observation with what `later`, of the same step, adds.

        What is known stays, missing values and NaN are filled in, and of two maxima the larger counts.
        """
        news: dict[str, Any] = {
            name: value
            for name in METRICS
            if (value := getattr(later, name)) is not None and _missing(getattr(self, name))
        }
        if self.kl_max is not None and later.kl_max is not None and later.kl_max > self.kl_max:
            news["kl_max"] = later.kl_max
        return replace(self, **news, window=max(self.window, later.window))

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any], step: object, window: object = 1) -> Observation:
        """Build an observation from whatever metrics `row` has under a known name.

        Raises
        ------
        ValueError
            For a metric, step or window that is no number; the message has the name, the value and what is allowed.
        """
        values: dict[str, Any] = {}
        for key, value in row.items():
            name = ALIASES.get(key, key)
            if name in _METRICS and values.get(name) is None:
                values[name] = as_number(key, value)
        return cls(as_step(step), window=as_window(window), **values)

    @classmethod
    def at(cls, step: object, window: object, values: Mapping[str, float | None]) -> Observation:
        """Build an observation from values that are numbers already, by the names in `METRICS`.

        Raises
        ------
        ValueError
            For a step or window that is none.
        """
        return cls(as_step(step), window=as_window(window), **values)

    def known(self) -> dict[str, float | int]:
        """Return what is not missing, by name."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}


_METRICS = frozenset(METRICS)
_FIELDS = tuple(f.name for f in fields(Observation))


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def as_number(name: str, value: object) -> float | None:
    """Return a metric as a float, None for a missing one.

    Numbers, numpy scalars, one-element arrays and tensors (on any device) and numbers written as text are taken; truth
    values are none, whatever they come in.

    Raises
    ------
    ValueError
        For anything else; the message has the name, the value and what is allowed.
    """
    if value is None or type(value) is float:
        return value
    given = value
    try:
        if isinstance(value, float):
            return float.__float__(value)  # its own number, whatever a subclass says
        if not isinstance(value, (str, numbers.Real, Decimal)):
            value = getattr(value, "item", _no_item)()
        if isinstance(value, bool):
            raise TypeError("a truth value is not a metric")
        return float(value)
    except Exception as error:  # whatever a foreign type raises, it has no number to give
        raise ValueError(
            f"{shown(name)} must be a number (or a one-element tensor, or None), got {_short(given)}"
        ) from error


def _no_item() -> float:
    raise TypeError("it is no number and has none")


def as_step(value: object) -> int:
    """Return a step number.

    Raises
    ------
    ValueError
        Unless it is a whole number of at least 0.
    """
    return _whole("step", value, 0)


def as_window(value: object) -> int:
    """Return a number of averaged steps.

    Raises
    ------
    ValueError
        Unless it is a whole number of at least 1.
    """
    return _whole("window", value, 1)


def _whole(name: str, value: object, least: int) -> int:
    number = value if type(value) is int else as_number(name, value)
    if number is None or not least <= number <= LARGEST_STEP or number != int(number):
        raise ValueError(f"{name} must be a whole number of at least {least} (and at most 2**53), got {_short(value)}")
    return int(number)


def _short(value: object) -> str:
    try:
        text = f"{value!r} ({type(value).__name__})"
    except Exception:
        text = f"something of type {type(value).__name__}"
    return shown(text)


def shown(text: str, longest: int = 120) -> str:
    r"""Return text from a log or a foreign object for a line: in characters that print, and no more than some.

    >>> shown("kl" * 100, 10), shown("\x1b[2J")
    ('klklklk...', '\\x1b[2J')
    """
    cut = text if len(text) <= longest else text[: longest - 3] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def read_observation(step: Any, metrics: Mapping[str, Any], window: Any) -> tuple[Observation | None, dict[str, str]]:
    """Return what a step logged as an observation, and a complaint for each value that cannot be read, by its name.

    Such a value counts as missing, such a window as one step; without a readable step there is no observation.

    Parameters
    ----------
    step, window:
        As `KLGuard.observe` takes them.
    metrics:
        Values by name, of those in `METRICS`.
    """
    complaints: dict[str, str] = {}
    try:
        step = as_step(step)
    except ValueError as error:
        return None, {"step": f"an observation is left out: {error}"}
    try:
        window = as_window(window)
    except ValueError as error:
        complaints["window"] = f"the observation counts as one step: {error}"
        window = 1
    values: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            values[name] = as_number(name, value)
        except ValueError as error:
            complaints[name] = f"a value counts as missing: {error}"
    return Observation(step, window=window, **values), complaints
