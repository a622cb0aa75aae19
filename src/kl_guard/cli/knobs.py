"""Every knob of the guard as a flag."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kl_guard.config import GuardConfig

_GROUP = "knobs of the guard (GuardConfig)"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `GuardConfig`; those not given stay out of what `given` returns."""
    group = parser.add_argument_group(_GROUP)
    kinds = get_type_hints(GuardConfig)
    for knob in fields(GuardConfig):
        kind = kinds[knob.name]
        text = f"{knob.metadata['help']} Default: {knob.default}.".replace("%", "%%")
        settings: dict[str, Any] = {"dest": f"knob_{knob.name}", "default": None, "help": text}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            settings |= {"choices": get_args(kind)}
        else:
            settings |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "VALUE")}
        group.add_argument("--" + knob.name.replace("_", "-"), **settings)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the knobs that were given, by name."""
    prefix = "knob_"
    found = vars(options).items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix) and value is not None}


def parse(text: str) -> tuple[str, list[Any]]:
    """Return name and values of `ratio=4,8,16`.

    Raises
    ------
    ValueError
        For a knob that does not exist, or a value of another type; the message has what is allowed.
    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = get_type_hints(GuardConfig)
    if name not in kinds or not values:
        raise ValueError(f"--sweep takes KNOB=VALUE,VALUE,..., with a KNOB of: {', '.join(kinds)}; got {text!r}")
    return name, [_value(name, kinds[name], value.strip()) for value in values.split(",")]


def _value(name: str, kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in {"true", "false"}:
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number, got {text!r}") from None
