"""Numbers in order: whatever comes and goes, it is what a sorted list is."""

from bisect import bisect_left, bisect_right, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_guard.stats import ordered
from kl_guard.stats.ordered import Ordered

few = st.sampled_from([-1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(few, max_size=40), st.lists(st.tuples(st.booleans(), few), max_size=120), st.integers(1, 6))
def test_equals_a_sorted_list(first, changes, load):
    """After every change: all numbers, each position, and how many are below a number, in chunks of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "LOAD", load)
        mine, plain = Ordered(first), sorted(first)
        for goes, value in changes:
            if goes and plain:
                mine.remove(plain.pop(bisect_left(plain, value) % len(plain)))
            else:
                mine.add(value)
                insort(plain, value)
            assert list(mine) == plain
            assert [mine[i] for i in range(len(mine))] == plain
            for asked in (value, *plain):
                assert mine.left(asked) == bisect_left(plain, asked)
                assert mine.right(asked) == bisect_right(plain, asked)


def test_what_is_not_there():
    """Said by name, and nothing is changed."""
    mine = Ordered([1.0, 2.0])
    for value in (0.0, 1.5, 3.0):
        with pytest.raises(ValueError, match=f"{value} is not there"):
            mine.remove(value)
    for position in (-1, 2):
        with pytest.raises(IndexError, match=f"no position {position} among 2 numbers"):
            mine[position]
    assert list(mine) == [1.0, 2.0]
    assert repr(mine) == "Ordered(<2 values>)"


def test_chunks_are_neither_many_nor_long():
    """What drifts upward leaves no empty chunks behind, and a number costs little more than its 8 bytes."""
    mine = Ordered()
    for i in range(30_000):
        mine.add(float(i))
        if i >= 5_000:
            mine.remove(float(i - 5_000))
    sizes = [len(chunk) for chunk in mine._chunks]
    assert sum(sizes) == 5_000
    assert len(sizes) <= 12
    assert max(sizes) <= 2 * ordered.LOAD
