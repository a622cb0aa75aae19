"""Alerts by the trackers of experiments, where one has a run open in this process; none is imported or started."""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable
from typing import Any

from kl_guard.alerts.incident import Incident


def open_runs() -> dict[str, Callable[[Incident], Any]]:
    """Return, for each tracker with a run open, what sends an alert to that run. To be asked by the training thread.

    Trackio knows its run per thread, and either's run may be over when a queue comes to it: so the run is taken now.
    """
    found = {}
    for name, look in _TRACKERS.items():
        module = sys.modules.get(name)
        try:
            sending = None if module is None else look(module)
        except Exception:
            sending = None  # half imported, or too old to have alerts
        if sending is not None:
            found[name] = sending
    return found


def _wandb(module: Any) -> Callable[[Incident], Any] | None:
    return None if module.run is None else functools.partial(_send_to_wandb, module.run)


def _send_to_wandb(run: Any, incident: Incident) -> None:
    level = "WARN" if incident.decision.action == "rollback" else "ERROR"
    run.alert(title=incident.title, text=incident.text, level=level)


def _trackio(module: Any) -> Callable[[Incident], Any] | None:
    if module.context_vars.current_run.get() is None:
        return None
    return functools.partial(_send_to_trackio, contextvars.copy_context(), module.alert, module.AlertLevel)


def _send_to_trackio(context: contextvars.Context, alert: Callable[..., Any], levels: Any, incident: Incident) -> None:
    level = levels.WARN if incident.decision.action == "rollback" else levels.ERROR
    context.run(alert, title=incident.title, text=incident.text, level=level)


_TRACKERS: dict[str, Callable[[Any], Callable[[Incident], Any] | None]] = {"wandb": _wandb, "trackio": _trackio}
NAMES = frozenset(_TRACKERS)
