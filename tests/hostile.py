"""Names and values that no trainer should log."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch


class Raises:
    """Has no number to give, and says so in its own way."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    item = __repr__ = __str__ = __float__


class Lies(float):
    """A float whose methods say something else."""

    def __float__(self):
        return 1e9

    def __repr__(self):
        raise RuntimeError("no text")

    __str__ = __format__ = __repr__

    def __eq__(self, other):
        return True

    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    __hash__ = float.__hash__


class Colours:
    """Would have a terminal do things, and a page run them."""

    def __repr__(self):
        return "\x1b[2J\n<script>" * 100


class Wrong:
    """Gives something that is no number."""

    def __init__(self, given):
        self.given = given

    def item(self):
        return self.given


NUMBERS = {
    "numpy float16": (np.float16(0.5), 0.5),
    "numpy float64": (np.float64(0.1), 0.1),
    "numpy int8": (np.int8(-3), -3.0),
    "0-d array": (np.array(0.25), 0.25),
    "array of one": (np.array([[0.25]]), 0.25),
    "0-d tensor": (torch.tensor(0.25), 0.25),
    "tensor of one": (torch.tensor([0.25]), 0.25),
    "tensor with gradient": (torch.tensor([[0.25]], requires_grad=True), 0.25),
    "half": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "fraction": (Fraction(1, 4), 0.25),
    "decimal": (Decimal("0.25"), 0.25),
    "decimal without a number": (Decimal("NaN"), math.nan),
    "text": ("0.1", 0.1),
    "text with blanks": (" 1e-3\n", 0.001),
    "nan as text": ("nan", math.nan),
    "inf as text": ("-Infinity", -math.inf),
    "digits of another script": ("\u0663", 3.0),
    "minus zero": (-0.0, -0.0),
    "denormal": (5e-324, 5e-324),
    "inf": (math.inf, math.inf),
    "nan with a payload": (np.array([0x7FF800000000BEEF], dtype=np.uint64).view(np.float64)[0], math.nan),
    "a signalling nan": (np.array([0x7FF0000000000001], dtype=np.uint64).view(np.float64)[0], math.nan),
    "large": (10**300, 1e300),
    "missing": (None, None),
}
"""What is a number, and which."""

REFUSED = {
    "truth": True,
    "numpy truth": np.bool_(True),
    "complex": 1j,
    "numpy complex": np.complex128(1 + 1j),
    "list": [0.1],
    "empty": (),
    "dictionary": {"kl": 0.1},
    "two in a tensor": torch.tensor([0.1, 0.2]),
    "none in a tensor": torch.tensor([]),
    "complex tensor": torch.tensor(1j),
    "tensor of truth": torch.tensor(True),
    "meta tensor": torch.empty((), device="meta"),
    "huge": 10**400,
    "huge fraction": Fraction(10**400, 3),
    "text": "much",
    "empty text": "",
    "halves of characters": "\ud800\udfff",
    "10 kB": "1" * 10_000 + "x",
    "bytes": b"0.1",
    "raises": Raises(ValueError("\x1b[31m<script>")),
    "raises at depth": Raises(RecursionError()),
    "runs out": Raises(MemoryError()),
    "gives a truth": Wrong(True),
    "gives text": Wrong("0.1" * 100),
    "a class": float,
    "speaks in colours": Colours(),
    "a decimal that signals": Decimal("sNaN"),
    "a module": math,
}
"""What is none."""


NAMES = [
    "kl\nkl: 5.0",
    "\x1b[31mkl\x1b[0m",
    "<script>alert('kl')</script>",
    "kl" * 5_000,
    "__class__",
    "kl_mean\x00",
    "\ud800kl",
    "objective/kl\u202e",
    "KL",
    "Kl",
    "",
    0,
    None,
    (1, 2),
    b"kl",
    Ellipsis,
]
"""Names of metrics."""
