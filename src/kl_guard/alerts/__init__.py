"""Alerts: somebody who is not looking at the run hears of it."""

from kl_guard.alerts.alerts import Alerts, OnIncident
from kl_guard.alerts.incident import Incident, incident_of

__all__ = ["Alerts", "Incident", "OnIncident", "incident_of"]
