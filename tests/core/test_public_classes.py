"""One battery for every public class of the core that keeps state, found by introspection: none is forgotten."""

import inspect
import json
import math
import pickle
import random
import subprocess
import sys

import pytest

import kl_guard.detectors
import kl_guard.stats
from kl_guard import Observation
from kl_guard.detectors import Detector, RiseMonitor

DETECTORS = [c for c in vars(kl_guard.detectors).values() if inspect.isclass(c) and issubclass(c, Detector)]
DETECTORS = [c for c in DETECTORS if not inspect.isabstract(c)]
PUBLIC = [
    obj
    for module in (kl_guard, kl_guard.stats, kl_guard.detectors)
    for name in module.__all__
    if inspect.isclass(obj := getattr(module, name)) or inspect.isfunction(obj)
]


def observations(count=160):
    """A run with everything in it: calm, holes, a broken step, a blow-up."""
    rng = random.Random(0)
    for step in range(1, count + 1):
        kl = 0.02 * math.exp(rng.gauss(0, 0.3)) * (1.3 ** (step - 100) if step > 100 else 1)
        kl = {7: None, 9: math.nan, 11: math.inf}.get(step, kl)
        yield Observation(step, kl_mean=kl, loss=0.1, grad_norm=math.nan if step in (11, 30) else 0.5)


@pytest.mark.parametrize("obj", PUBLIC, ids=lambda o: o.__name__)
def test_is_documented(obj):
    """Every public class and function says what it is."""
    assert inspect.getdoc(obj)
    assert len(inspect.getdoc(obj)) > 30


@pytest.mark.parametrize("cls", DETECTORS, ids=lambda c: c.__name__)
def test_detector_has_an_example(cls):
    """A doctest shows what it says."""
    assert ">>> " in inspect.getdoc(cls)
    assert cls.signature == cls.signature.upper()


@pytest.mark.parametrize("cls", DETECTORS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("split", [0, 8, 11, 60, 115])
def test_state_through_json_and_pickle(cls, split):
    """Stopped anywhere and restored, a detector says what it would have said."""
    straight, halved = cls(), cls()
    for observation in observations():
        if observation.step == split:
            restored = cls()
            restored.load_state_dict(json.loads(json.dumps(halved.state_dict())))
            halved = pickle.loads(pickle.dumps(restored))
        assert straight.update(observation) == halved.update(observation)
        assert straight.active == halved.active


@pytest.mark.parametrize("cls", DETECTORS, ids=lambda c: c.__name__)
def test_reset_equals_fresh(cls):
    """Nothing is left of the run before."""
    used, fresh = cls(), cls()
    for observation in observations():
        used.update(observation)
    used.reset()
    assert used.state_dict() == fresh.state_dict()
    assert [used.update(o) for o in observations()] == [fresh.update(o) for o in observations()]


@pytest.mark.parametrize("cls", DETECTORS, ids=lambda c: c.__name__)
def test_says_each_severity_once_and_again_when_rearmed(cls):
    """The same observation again is nothing new."""
    detector = cls()
    findings = [f for o in observations() if (f := detector.update(o))]
    severities = [f.severity for f in findings]
    assert severities == sorted(set(severities))
    assert detector.said == (severities[-1] if severities else None)


@pytest.mark.parametrize("cls", [*DETECTORS, RiseMonitor], ids=lambda c: c.__name__)
def test_repr_is_short(cls):
    """What a debugger shows is one line without the data."""
    text = repr(cls() if issubclass(cls, Detector) else cls(kl_guard.GuardConfig()))
    assert text.startswith(cls.__name__)
    assert len(text) < 120


def test_importing_the_core_is_light():
    """No torch, no plotting, nothing that takes seconds."""
    code = (
        "import sys, kl_guard\n"
        "print(sorted({'torch', 'matplotlib', 'transformers', 'trl', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
