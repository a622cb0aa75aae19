"""Wrong values are refused where they are set, with the field, the value and what is allowed."""

import math
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from kl_guard import GuardConfig

WRONG = [
    ("action", "stop", ValueError, "action must be one of 'warn', 'halt', 'rollback', got 'stop'"),
    ("halt_on", "info", ValueError, "halt_on must be one of 'critical', 'warn', got 'info'"),
    ("horizon", "all", ValueError, "horizon must be one of 'multi', 'run', got 'all'"),
    ("kl_kind", "k4", ValueError, "kl_kind must be one of"),
    ("on_halt", None, ValueError, "on_halt must be one of 'return', 'raise', got None"),
    ("ratio", 1.0, ValueError, "ratio must be a finite number above 1, got 1.0"),
    ("ratio", "8", TypeError, "ratio must be a finite number above 1, got '8'"),
    ("ratio", math.nan, ValueError, "ratio must be a finite number above 1, got nan"),
    ("abs_floor", 0, ValueError, "abs_floor must be a finite number above 0, got 0"),
    ("abs_floor", math.inf, ValueError, "abs_floor must be a finite number above 0, got inf"),
    ("alpha", 1.0, ValueError, "alpha must be a number above 0 and below 1, got 1.0"),
    ("cold_factor", 0.5, ValueError, "cold_factor must be a finite number of at least 1, got 0.5"),
    ("hard_ceiling", -1, ValueError, "hard_ceiling must be a number above 0, got -1"),
    ("sustain", 0, ValueError, "sustain must be a whole number of at least 1, got 0"),
    ("sustain", 2.5, TypeError, "sustain must be a whole number of at least 1, got 2.5"),
    ("sustain", True, TypeError, "sustain must be a whole number of at least 1, got True"),
    ("min_observations", 4, ValueError, "min_observations must be a whole number of at least 5, got 4"),
    ("warmup", -1, ValueError, "warmup must be a whole number of at least 0, got -1"),
    ("max_rollbacks", -1, ValueError, "max_rollbacks must be a whole number of at least 0, got -1"),
    ("grace", "5", TypeError, "grace must be a whole number of at least 0, got '5'"),
    ("robust", "yes", TypeError, "robust must be True or False, got 'yes'"),
    ("save_halted", 1, TypeError, "save_halted must be True or False, got 1"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), WRONG)
def test_wrong_values_are_refused(name, value, error, text):
    """The message names the field, what is allowed and what was got."""
    with pytest.raises(error) as caught:
        GuardConfig(**{name: value})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("hard_ceiling", math.inf), ("cold_factor", 1), ("ratio", 2), ("warmup", 0), ("grace", 0)]
)
def test_values_at_the_edge_are_taken(name, value):
    """What the message allows is allowed."""
    assert getattr(GuardConfig(**{name: value}), name) == value


def test_every_field_has_a_help_text():
    """The help is what the command line shows."""
    for knob in fields(GuardConfig):
        assert len(knob.metadata["help"]) > 20, knob.name


def test_build_takes_overrides_and_names_the_nearest_field():
    """A typo is answered with the field that was meant."""
    base = GuardConfig(ratio=4.0)
    assert GuardConfig.build(base, abs_floor=0.1) == GuardConfig(ratio=4.0, abs_floor=0.1)
    assert GuardConfig.build() == GuardConfig()
    with pytest.raises(TypeError, match="no option 'ratoi'; did you mean 'ratio'"):
        GuardConfig.build(base, ratoi=4.0)
    with pytest.raises(TypeError, match="no option 'zzzzzz'; there are: action, "):
        GuardConfig.build(zzzzzz=1)
    with pytest.raises(TypeError, match="must be a GuardConfig, got dict"):
        GuardConfig.build({"ratio": 4.0})


def test_is_frozen_and_can_be_pickled():
    """Workers get the same configuration."""
    config = GuardConfig(ratio=4.0)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.ratio = 2.0
