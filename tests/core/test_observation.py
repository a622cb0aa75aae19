"""Metrics come in many types; what has no number in it is refused by name."""

import math
from fractions import Fraction

import numpy as np
import pytest

from kl_guard import Observation
from kl_guard.observation import as_number, as_step, as_window


@pytest.mark.parametrize(
    "value", [0.5, Fraction(1, 2), "0.5", np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5])]
)
def test_numbers_of_any_type(value):
    """Python, numpy, one-element arrays, and numbers written as text."""
    number = as_number("kl_mean", value)
    assert type(number) is float
    assert number == 0.5


def test_tensors():
    """One element, on any device, with or without gradient, in any precision."""
    torch = pytest.importorskip("torch")
    assert as_number("kl_mean", torch.tensor(0.5, requires_grad=True)) == 0.5
    assert as_number("kl_mean", torch.tensor([0.5], dtype=torch.bfloat16)) == 0.5
    with pytest.raises(ValueError, match="one-element tensor"):
        as_number("kl_mean", torch.zeros(3))
    with pytest.raises(ValueError, match="one-element tensor"):
        as_number("kl_mean", torch.empty(1, device="meta"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf"])
def test_non_finite_values_pass(value):
    """They are judged, not refused."""
    assert not math.isfinite(as_number("kl_mean", value))


@pytest.mark.parametrize("value", ["high", "", True, 1j, [0.1], {}, np.zeros(2), object(), b"0.5"])
def test_no_numbers(value):
    """The message has the name and the value."""
    with pytest.raises(ValueError, match=r"^grad_norm must be a number"):
        as_number("grad_norm", value)


def test_a_long_value_is_cut_in_the_message():
    """No log is flooded by a value that is no metric."""
    with pytest.raises(ValueError, match=r"\.\.\.$") as caught:
        as_number("kl_mean", "x" * 10_000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("value", "step"), [(3, 3), (3.0, 3), (np.int64(3), 3), ("3", 3), (0, 0)])
def test_steps(value, step):
    """Whole numbers of any type."""
    assert as_step(value) == step


@pytest.mark.parametrize("value", [-1, 2.5, math.nan, math.inf, None, "first", True])
def test_no_steps(value):
    """Negative, broken, missing."""
    with pytest.raises(ValueError, match=r"^step must be a"):
        as_step(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, None, math.nan])
def test_no_windows(value):
    """A window averages at least one step."""
    with pytest.raises(ValueError, match=r"^window must be a whole number of at least 1"):
        as_window(value)


def test_merging_fills_in_and_keeps_the_larger_maximum():
    """What is known stays; NaN is no maximum to keep."""
    first = Observation(5, kl_mean=0.1, kl_max=2.0)
    merged = first.merged(Observation(5, kl_mean=9.0, kl_max=3.0, loss=1.0, window=4))
    assert merged == Observation(5, kl_mean=0.1, kl_max=3.0, loss=1.0, window=4)
    assert first.merged(Observation(5, kl_max=1.0)).kl_max == 2.0
    assert Observation(5, kl_max=math.nan).merged(Observation(5, kl_max=1.0)).kl_max == 1.0


def test_first_step_of_the_window():
    """An average logged at step 40 over 10 steps began at step 31."""
    assert Observation(40, window=10).first_step == 31


def test_merging_takes_a_number_for_nan():
    """NaN is missing, and no larger maximum."""
    assert Observation(5, kl_mean=math.nan).merged(Observation(5, kl_mean=0.1)).kl_mean == 0.1
    assert Observation(5, kl_max=5.0).merged(Observation(5, kl_max=math.nan)).kl_max == 5.0


class Hostile:
    """Raises whatever is asked of it."""

    def __repr__(self):
        raise MemoryError("repr")

    def item(self):
        raise KeyError("item")


def test_a_value_that_raises_anything():
    """It counts as no number, and the message still names the metric."""
    with pytest.raises(ValueError, match=r"loss must be a number .*something of type Hostile"):
        as_number("loss", Hostile())
