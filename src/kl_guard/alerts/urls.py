"""Alerts by apprise: one URL names a service and holds what lets us in.

A URL is a secret. It is in no message, no file and no repr, and what apprise and its HTTP client log while they handle
one is dropped: at level DEBUG they write whole URLs.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kl_guard.alerts.incident import Incident

TALKATIVE = ("apprise", "requests", "urllib3.connectionpool", "urllib3.util.retry")
_BETWEEN = re.compile(r"\s+|,\s*(?=[A-Za-z0-9]+://)|,$")  # a URL may hold commas


def split(text: str) -> list[str]:
    """Return the URLs of a text that has blanks or commas between them.

    >>> split("json://localhost, mailto://me@example.org?to=a@b.org,c@d.org slack://x/y/z")
    ['json://localhost', 'mailto://me@example.org?to=a@b.org,c@d.org', 'slack://x/y/z']
    """
    return [part.strip(",") for part in _BETWEEN.split(text) if part and part.strip(",")]


def services_of(urls: Sequence[Any], given: str) -> list[str]:
    """Return the name of the service of each URL; `given` says in messages where they come from.

    Raises
    ------
    ModuleNotFoundError
        Without apprise.
    TypeError, ValueError
        For what is no URL of a service that apprise knows. The message does not have it.
    """
    names = []
    for number, url in enumerate(urls, start=1):
        which = f"{given}: entry {number} of {len(urls)}"
        if not isinstance(url, str):
            raise TypeError(f"{which} must be an apprise URL, got {type(url).__name__}")
        with _muted():
            service = _apprise(given).Apprise.instantiate(url, asset=_asset(given))
        if service is None:
            scheme = re.match(r"[a-z]{1,12}://", url)
            begins = f", which begins with {scheme[0]!r}," if scheme else ""
            raise ValueError(
                f"{which}{begins} is no URL of a service that apprise knows (it is not shown, since it may hold a "
                f"secret); what they look like: https://appriseit.com/services/"
            )
        names.append(str(service.service_name))
    return names


def send(url: str, incident: Incident) -> bool:
    """Send an alert to the service of a URL; return whether it took it."""
    apprise = _apprise("alerts")
    kind = apprise.NotifyType.WARNING if incident.decision.action == "rollback" else apprise.NotifyType.FAILURE
    with _muted():
        service = apprise.Apprise(asset=_asset("alerts"))
        service.add(url)
        return bool(
            service.notify(
                title=incident.title, body=incident.text, notify_type=kind, body_format=apprise.NotifyFormat.TEXT
            )
        )


def _apprise(given: str) -> Any:
    try:
        import apprise
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{given}: alerts by URL need the package apprise: pip install 'kl-guard[alerts]'", name=error.name
        ) from error
    return apprise


def _asset(given: str) -> Any:
    """Return how apprise is to behave: under our name, and in the very thread that calls it.

    Newer versions hand a service that may take no longer than so many seconds to a pool of threads, which Python waits
    for at the end of the process, however long they take. Here the lane is what may be left behind.
    """
    asset = _apprise(given).AppriseAsset
    settings = {"app_id": "kl-guard", "app_desc": "kl-guard", "async_mode": False}
    if "service_timeout" in inspect.signature(asset.__init__).parameters:
        settings["service_timeout"] = 0
    return asset(**settings)


_quiet = threading.local()


class _Mute(logging.Filter):
    """Drops what is logged by a thread that handles a URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_quiet, "on", False)


_MUTE = _Mute()


@contextmanager
def _muted() -> Iterator[None]:
    """Let nothing that this thread logs about a URL through."""
    for name in TALKATIVE:
        logging.getLogger(name).addFilter(_MUTE)  # once: the same filter is not added twice
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = False
