"""A wall clock that jumps, forwards and back: nothing is put in order by it."""

import random
import time

from kl_guard import GuardConfig, KLGuard
from some_tokens import stats
from streams import blow_up


def a_run(folder):
    """A run that saves, blows up, is taken back, is resumed in a new guard, and blows up again; what it did."""
    told = []
    guard = KLGuard(GuardConfig(action="rollback", grace=2), output_dir=folder, announce=False)
    for start in (60, 90):
        values = blow_up(start=start, length=140)
        step = 20 if guard.attempt else 0
        while not guard.decision:
            step += 1
            decision = guard.observe(step, tokens=stats(values[step - 1]))
            told += [(f.signature, f.severity, f.step, f.onset_step, f.departure_step) for f in decision.findings]
            if not decision and step % 10 == 0:
                checkpoint = folder / f"checkpoint-{step}"
                checkpoint.mkdir(exist_ok=True)
                (checkpoint / "weights").write_text(f"{guard.attempt}-{step}")
                guard.checkpoint_saved(step, checkpoint)
                guard.checkpoints.wait()
        told.append((guard.decision.action, guard.decision.checkpoint and guard.decision.checkpoint.step))
        told.append(sorted(pin.step for pin in guard.checkpoints._pins.pins()))
        back = guard.go_back(lambda step: folder / f"checkpoint-{step}")
        told.append(back.step)
        guard.rolled_back(back.step)
        guard.close()
        guard = KLGuard(GuardConfig(action="rollback", grace=2), output_dir=folder, announce=False)
        guard.resumed(20)
        told.append((guard.attempt, len(guard.history)))
    guard.close()
    return told


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    """The same findings, decisions, pins and checkpoints to go back to."""
    steady = a_run(tmp_path / "steady")
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(-1e9, 4e9))
    assert a_run(tmp_path / "jumping") == steady
    assert len([one for one in steady if isinstance(one, tuple) and one[0] == "rollback"]) == 2
