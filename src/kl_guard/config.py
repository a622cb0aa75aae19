"""Every knob of the guard, in one dataclass."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

Action = Literal["warn", "halt", "rollback"]
HorizonRule = Literal["multi", "run"]
HaltOn = Literal["critical", "warn"]
OnHalt = Literal["return", "raise"]
Probe = Literal["off", "auto"]
KLKind = Literal["k3", "k1", "k2", "sequence_sum", "old_policy", "sampler"]

TOKEN_MEANS: Collection[str] = frozenset({"k1", "k2", "k3"})
"""Kinds of KL that are token means against the reference, in nats per token."""


def _knob(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class GuardConfig:
    """What the guard watches for and what it does about it.

    A plain dataclass with a help text per field, so `TrlParser((GRPOConfig, GuardConfig))` and `HfArgumentParser` put
    every knob on the command line and in YAML. KL is in nats per token unless `kl_kind` says otherwise.

    Raises
    ------
    ValueError, TypeError
        When a value is not allowed; the message has the field, the value and what is allowed.

    Examples
    --------
    >>> GuardConfig(ratio=4.0).ratio
    4.0
    >>> GuardConfig(alpha=2.0)
    Traceback (most recent call last):
        ...
    ValueError: alpha must be a number above 0 and below 1, got 2.0
    """

    action: Action = _knob(
        "halt",
        "What to do on a critical finding: 'warn' only says so, 'halt' stops the run, 'rollback' asks the loop to go "
        "back to the last checkpoint from before the trouble (and halts where there is none).",
    )
    halt_on: HaltOn = _knob("critical", "'warn' lets KL_GROWTH, the early warning, halt as well.")
    ratio: float = _knob(8.0, "KL_BLOWUP: late KL must exceed this many times the early median. Above 1.")
    abs_floor: float = _knob(
        0.5, "KL_BLOWUP: late KL must also exceed this many nats per token; KL_GROWTH uses a fifth of it. Above 0."
    )
    sustain: int = _knob(3, "Observations in a row that make a crossing, an overflow or a ceiling count. At least 1.")
    alpha: float = _knob(
        0.05, "Two-sided significance of the trend test, shared among the horizons. Between 0 and 1, exclusive."
    )
    min_observations: int = _knob(12, "Observations before KL_BLOWUP or KL_GROWTH can fire. At least 5.")
    horizon: HorizonRule = _knob(
        "multi",
        "'multi' applies the rule to the last 32, 64, 128, ... observations and to the whole run; 'run' to the whole "
        "run only, which alarms later the longer the run has been going.",
    )
    robust: bool = _knob(
        True, "Ask for the late median, the record, the noise and the cold factor too; False is the rule as published."
    )
    warmup: int = _knob(
        20, "Observations at the start that KL_GROWTH leaves out, since every run climbs from 0 at first. At least 0."
    )
    cold_factor: float = _knob(
        2.0, "KL_BLOWUP: factor on abs_floor for a window that reaches into the warm-up. At least 1."
    )
    hard_ceiling: float = _knob(
        100.0, "KL above this for `sustain` observations is critical from the first step on. Above 0; inf is off."
    )
    plateau_level: float = _knob(
        1.0, "KL_PLATEAU: KL above this for 20 observations without growth is a warning. Above 0; inf is off."
    )
    rounded: bool = _knob(False, "The observed KL is rounded (console logs are): an exact 0 may be a small number.")
    outlier_top_k: int = _knob(16, "Tokens with the largest KL that are kept for each step. At least 1.")
    log_text: bool = _knob(
        True,
        "Write the text of outlier tokens and the beginning of their prompts; False where data must not be logged.",
    )
    probe: Probe = _knob(
        "off",
        "'auto' measures KL where the trainer does not (beta 0), every `probe_every` steps, against the disabled "
        "adapter, a reference that is given, or the initial weights.",
    )
    probe_every: int = _knob(10, "Steps from one probe to the next. At least 1.")
    kl_kind: KLKind = _knob(
        "k3",
        "Which KL is observed: 'k3', 'k1' or 'k2' are token means against the reference; 'sequence_sum', 'old_policy' "
        "and 'sampler' are other quantities, for which rules on absolute values per token do not apply.",
    )
    max_rollbacks: int = _knob(2, "Rollbacks before the guard halts instead. At least 0.")
    rollback_margin: int = _knob(0, "Steps to stay further behind the departure when going back. At least 0.")
    lr_factor: float = _knob(
        0.5, "Learning rate after the first rollback, as a share of the original; squared after the second. Above 0."
    )
    beta_factor: float = _knob(
        2.0, "KL penalty after the first rollback, as a multiple of the original; squared after the second. Above 0."
    )
    new_noise: bool = _knob(True, "Sample other completions after a rollback, from its first step on.")
    grace: int = _knob(5, "Observations after a rollback or a resume in which only KL_NONFINITE acts. At least 0.")
    pin_checkpoints: bool = _knob(
        True, "Keep copies of calm checkpoints (hard links where possible) that the trainer's rotation cannot delete."
    )
    pin_start: bool = _knob(
        True, "With action 'rollback', keep the state at the start too: trouble may begin before the first checkpoint."
    )
    save_halted: bool = _knob(
        True, "Keep the state at a halt in <output_dir>/kl_guard/halted/, where space allows, so that no work is lost."
    )
    on_halt: OnHalt = _knob(
        "return", "'raise' makes train() raise KLGuardHalted after a halt, so that no script publishes the model."
    )

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        for name in ("robust", "rounded", "log_text", "new_noise", "pin_checkpoints", "pin_start", "save_halted"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number of at least {least}, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name, (allowed_text, low, high, closed) in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be {allowed_text}, got {value!r}")
            if not (low < value < high or value in closed):
                raise ValueError(f"{name} must be {allowed_text}, got {value!r}")

    @classmethod
    def build(cls, config: GuardConfig | None = None, **overrides: Any) -> GuardConfig:
        """Return `config` (the defaults where None) with `overrides` put in.

        Raises
        ------
        TypeError
            For a `config` of another type, or an override that is no field; the message has the nearest field.
        ValueError
            When a value is not allowed.
        """
        if config is not None and not isinstance(config, GuardConfig):
            raise TypeError(f"config must be a GuardConfig, got {type(config).__name__}")
        known = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
                raise TypeError(f"GuardConfig has no option {name!r}; {hint}")
        return replace(config or cls(), **overrides)

    @property
    def token_mean(self) -> bool:
        """Whether KL is a token mean against the reference, in nats per token."""
        return self.kl_kind in TOKEN_MEANS

    def warmup_of(self, expected_observations: int | None) -> int:
        """Return the warm-up for a run that will give `expected_observations`: at most a quarter of them."""
        return self.warmup if expected_observations is None else min(self.warmup, expected_observations // 4)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "action": get_args(Action),
    "halt_on": get_args(HaltOn),
    "horizon": get_args(HorizonRule),
    "kl_kind": get_args(KLKind),
    "on_halt": get_args(OnHalt),
    "probe": get_args(Probe),
}
_INTEGERS = {
    "sustain": 1,
    "min_observations": 5,
    "warmup": 0,
    "outlier_top_k": 1,
    "probe_every": 1,
    "max_rollbacks": 0,
    "rollback_margin": 0,
    "grace": 0,
}
_NUMBERS: dict[str, tuple[str, float, float, tuple[float, ...]]] = {
    "ratio": ("a finite number above 1", 1, math.inf, ()),
    "abs_floor": ("a finite number above 0", 0, math.inf, ()),
    "alpha": ("a number above 0 and below 1", 0, 1, ()),
    "cold_factor": ("a finite number of at least 1", 1, math.inf, (1,)),
    "hard_ceiling": ("a number above 0", 0, math.inf, (math.inf,)),
    "plateau_level": ("a number above 0", 0, math.inf, (math.inf,)),
    "lr_factor": ("a finite number above 0", 0, math.inf, ()),
    "beta_factor": ("a finite number above 0", 0, math.inf, ()),
}
