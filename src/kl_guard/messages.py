"""Findings and decisions as text for people."""

from __future__ import annotations

import math

from kl_guard.config import GuardConfig
from kl_guard.detectors.rise import GROWTH_SHARE
from kl_guard.findings import Decision, Finding


def headline(finding: Finding) -> str:
    """Return one line: signature, severity, step, and what was seen."""
    return f"{finding.signature} ({finding.severity}) at step {finding.step}: {finding.message}"


def describe(finding: Finding) -> str:
    """Return the whole of a finding: headline, onset and departure, causes with evidence and what to try."""
    lines = [headline(finding)]
    if finding.onset_step is not None:
        where = f"  onset: step {finding.onset_step}"
        if finding.departure_step not in (None, finding.onset_step):
            where += f"; departure (where the curve left its own regime): step {finding.departure_step}"
        lines.append(where)
    if finding.causes:
        lines.append("  possible causes, likeliest first:")
        for number, cause in enumerate(finding.causes, start=1):
            lines.append(f"    {number}. {cause.name}: {cause.evidence}")
            lines.append(f"       try: {cause.remedy}")
    return "\n".join(lines)


def what_happened(finding: Finding) -> str:
    """Return one sentence without its full stop: what was seen, and since when."""
    what = finding.message.replace("kl_mean", "KL mean", 1)
    what = what[:1].upper() + what[1:]
    if finding.departure_step is not None:
        what += f"; the curve had left its own regime at about step {finding.departure_step}"
    return what


def what_was_done(action: str, to_step: int | None, note: str) -> str:
    """Return one sentence without its full stop: what was done about a finding."""
    if action == "rollback" and to_step is not None:
        return f"The run went back to the checkpoint of step {to_step}"
    if action == "halt":
        return "The run was halted" + (f": {note}" if note else "")
    return "Nothing was done about it"


def describe_decision(decision: Decision) -> str:
    """Return what the guard does about a finding, and where one can go back to."""
    if decision.action == "rollback" and decision.checkpoint is not None:
        text = f"going back to the checkpoint of step {decision.checkpoint.step}: {decision.checkpoint.path}"
    elif decision.checkpoint is not None:
        text = (
            f"halting. Last checkpoint from before the departure: {decision.checkpoint.path} "
            f"(step {decision.checkpoint.step}); later ones may be from the trouble. From there, the same data and "
            f"settings will likely fail the same way again"
        )
    else:
        text = "halting. No checkpoint from before the departure is known"
    return f"{text}\n  {decision.note}" if decision.note else text


def first_possible(config: GuardConfig, expected_observations: int | None) -> dict[str, int]:
    """Return, for each signature that can halt or warns of it, the observation before which it cannot fire."""
    warmup = config.warmup_of(expected_observations)
    return {
        "KL_BLOWUP": config.min_observations,
        "KL_GROWTH": warmup + config.min_observations,
        "hard ceiling": config.sustain if config.token_mean and math.isfinite(config.hard_ceiling) else 0,
    }


def reach(config: GuardConfig, expected_observations: int | None, steps_per_observation: int = 1) -> str:
    """Return one line: from which step on each level can fire, and at which KL."""
    first = first_possible(config, expected_observations)
    k = steps_per_observation
    cold = config.abs_floor * (config.cold_factor if config.robust else 1)
    parts = [
        f"KL_BLOWUP cannot fire before step {first['KL_BLOWUP'] * k}, and needs a KL above {config.abs_floor:g} (above "
        f"{cold:g} while its window reaches into the first {config.warmup_of(expected_observations)} observations)",
        f"KL_GROWTH not before step {first['KL_GROWTH'] * k}, above {config.abs_floor * GROWTH_SHARE:g}",
    ]
    if first["hard ceiling"]:
        parts.append(f"a KL above {config.hard_ceiling:g} halts from step {first['hard ceiling'] * k} on")
    text = "; ".join(parts)
    if expected_observations is not None and expected_observations < first["KL_BLOWUP"]:
        text += f"; this run will give only {expected_observations} observations, so KL_BLOWUP cannot fire at all"
    return text
