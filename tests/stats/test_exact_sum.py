"""ExactSum never drifts."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import ExactSum
from streams import finite


@given(st.lists(finite))
def test_equals_fsum_after_every_addition(values):
    """Adding one by one gives the correctly rounded sum, at every prefix."""
    total = ExactSum()
    for i, value in enumerate(values, start=1):
        total.add(value)
        assert total.value == math.fsum(values[:i])


@given(st.lists(finite), st.lists(finite))
def test_what_was_added_and_taken_away_leaves_no_trace(kept, passing):
    """A million that comes and goes does not move the sum of thousandths by one bit."""
    total = ExactSum(kept)
    for value in passing:
        total.add(value)
    for value in passing:
        total.add(-value)
    assert total.value == math.fsum(kept)


@given(st.lists(finite))
def test_assign_is_as_exact_as_adding(values):
    """A sum taken over at once goes on exactly: taking all values away leaves zero."""
    total = ExactSum(values)
    assert total.value == math.fsum(values)
    for value in values:
        total.add(-value)
    assert total.value == 0


@given(st.lists(finite), finite)
def test_state_goes_through_json(values, more):
    """A restored sum continues like the original."""
    total, copy = ExactSum(values), ExactSum()
    copy.load_state_dict(json.loads(json.dumps(total.state_dict())))
    total.add(more)
    copy.add(more)
    assert copy.value == total.value
