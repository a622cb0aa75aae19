"""Where alerts go, and how: off the training thread, within bounds, and never harming the run."""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from kl_guard.alerts import trackers, urls
from kl_guard.alerts.incident import Incident
from kl_guard.alerts.lanes import Lanes

logger = logging.getLogger("kl_guard")

OnIncident = Callable[[Incident], Any]
Target = Callable[[Incident], Any]

VARIABLE = "KL_GUARD_ALERTS"
HANDOVER = 1.0  # seconds that a halt gives a tracker to take its alert, since its run may be closed next


class Alerts:
    """Sends an incident to apprise URLs, to a function, and to the trackers that have a run open.

    Each target has a daemon thread of its own, so one that hangs holds up neither training nor the others. What goes
    wrong is one warning for each kind of target. URLs are secrets: they are shown nowhere.

    Parameters
    ----------
    alerts:
        Apprise URLs, a list or one text with blanks between them; those in the environment variable `KL_GUARD_ALERTS`
        where None, so that they need not stand in a file.
    on_incident:
        Called with an `Incident`.
    given:
        What messages call `alerts`.

    Raises
    ------
    ModuleNotFoundError
        For URLs without the package apprise.
    TypeError, ValueError
        For what apprise cannot send to (the message does not have it), and what cannot be called.

    Examples
    --------
    >>> Alerts([], on_incident=print)
    Alerts(services=[], on_incident=True)
    """

    def __init__(
        self,
        alerts: Iterable[str] | str | None = None,
        on_incident: OnIncident | None = None,
        *,
        given: str = "alerts",
    ) -> None:
        if on_incident is not None and not callable(on_incident):
            raise TypeError(f"on_incident must be a function of one argument, or None, got {on_incident!r}")
        if alerts is None:
            given, alerts = VARIABLE, os.environ.get(VARIABLE, "")
        if not isinstance(alerts, Iterable):
            raise TypeError(f"alerts must be a list of apprise URLs, or None, got {type(alerts).__name__}")
        self._urls = urls.split(alerts) if isinstance(alerts, str) else list(alerts)
        self._services = urls.services_of(self._urls, given)
        self._on_incident = on_incident
        self._lanes: Lanes | None = None
        self._complained: set[str] = set()

    @classmethod
    def build(cls, alerts: Alerts | Iterable[str] | str | None, on_incident: OnIncident | None = None) -> Alerts:
        """Return `alerts` as they are where they are built already."""
        return alerts if isinstance(alerts, Alerts) else cls(alerts, on_incident)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(services={self._services}, on_incident={self._on_incident is not None})"

    def targets(self, *, tracked: bool) -> dict[str, Target]:
        """Return where an alert goes now, by name; with `tracked` to trackers too. To be asked by the training thread.

        The name of a second target of one kind has a number behind it.
        """
        found: dict[str, Target] = {}
        for service, url in zip(self._services, self._urls, strict=True):
            same = sum(kind_of(name) == service for name in found)
            found[f"{service}#{same + 1}" if same else service] = functools.partial(urls.send, url)
        if tracked:
            found |= trackers.open_runs()
        if self._on_incident is not None:
            found["on_incident"] = self._on_incident
        return found

    def send(self, incident: Incident, targets: dict[str, Target]) -> None:
        """Send an incident to `targets`, without waiting for an answer.

        Only where the run is halted is there a short wait for trackers to have taken their alert: what comes next may
        close their run.
        """
        if self._lanes is None or self._lanes.pid != os.getpid():
            self._lanes = Lanes(self._complain)
        for name, target in targets.items():
            self._lanes.submit(name, functools.partial(self._deliver, name, target, incident))
        if incident.decision.action == "halt":
            self._lanes.wait(HANDOVER, trackers.NAMES)

    def close(self, seconds: float | None = None) -> None:
        """Wait until all is sent, no longer than `seconds` (10 where None), and end the threads."""
        if self._lanes is not None:
            self._lanes.close(seconds)
            self._lanes = None

    def _deliver(self, name: str, target: Target, incident: Incident) -> None:
        """Send one alert; what is raised is told by its type, since the text of an HTTP error has the URL in it."""
        try:
            taken = target(incident)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = frames[min(1, len(frames) - 1)]  # in the function that was called, not deep below it
            self._complain(name, f"{type(error).__name__} in {place.filename}, line {place.lineno}")
        else:
            if taken is False and name not in ("on_incident", *trackers.NAMES):
                self._complain(name, "the service refused it or could not be reached")

    def _complain(self, name: str, what: str) -> None:
        """Warn, once for each kind of target."""
        kind = kind_of(name)
        if kind not in self._complained:
            self._complained.add(kind)
            logger.warning(
                "kl-guard: an alert by %s was not sent (%s); training goes on, this is said once", kind, what
            )


def kind_of(name: str) -> str:
    """Return the kind of a target.

    >>> kind_of("Slack#2")
    'Slack'
    """
    return name.partition("#")[0]
