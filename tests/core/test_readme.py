"""What README shows is what the package does."""

import inspect
import re
from pathlib import Path

import kl_guard_lightning
from kl_guard import GuardConfig, KLGuard, detectors

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_line_for_dictionaries_knows_its_kl():
    """With the names of verl; `tests/docs` runs every block of README as it stands."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "guard.log(" in b]
    guard = KLGuard(announce=False)
    exec(block, {"guard": guard})  # noqa: S102 - the README's own code
    assert guard.source.others == ("actor/ppo_kl",)


def test_every_signature_has_a_row():
    """The table is complete, and names nothing that does not exist."""
    shown = set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))
    known = {d.signature for d in KLGuard()._panel.detectors}
    assert shown == known
    every = {c.signature for c in vars(detectors).values() if hasattr(c, "signature")}
    assert known == every


def test_the_knobs_named_exist():
    """Options in README are fields of GuardConfig, or parameters of a callback."""
    own = set(inspect.signature(kl_guard_lightning.KLGuardCallback).parameters)
    for name in re.findall(r"`KLGuardCallback\((\w+)=", README) + re.findall(r"GuardConfig\((\w+)=", README):
        assert hasattr(GuardConfig(), name) or name in own
