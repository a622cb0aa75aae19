"""Charts of any numbers."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from kl_guard.report.chart import Scale

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.lists(numbers, min_size=1, max_size=5))
@example([5e-324])
@example([1e308, 1e-308])
@example([math.nextafter(math.inf, 0)])
def test_every_number_has_its_place(values):
    """At the ends of floating point too: within the chart, in order, with ticks that can be placed."""
    scale = Scale(values, logarithmic=True)
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    if scale.logarithmic:
        assert all(0 <= scale.place(tick) <= 1 for tick in scale.ticks())
