"""KLGuard: order of events, steps, decisions, faults."""

import gc
import json
import logging
import math
import shutil
import weakref

import pytest

from kl_guard import GuardConfig, KLGuard, Observation
from kl_guard.detectors import KLBlowup, KLGrowth
from some_tokens import stats
from streams import blow_up


def feed(guard, values, start=1, **more):
    """Observe values at consecutive steps; return the decisions."""
    return [guard.observe(step, value, **more) for step, value in enumerate(values, start=start)]


def warnings(caplog):
    """What was logged at WARNING or above."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_both_levels_share_their_windows():
    """One monitor, one series: the work is not done twice."""
    guard = KLGuard()
    monitors = {id(d.monitor) for d in guard._panel.detectors if isinstance(d, (KLBlowup, KLGrowth))}
    assert len(monitors) == 1


def test_halts_once_and_stays_halted():
    """The finding is new at one step; the decision stands after it."""
    decisions = feed(KLGuard(announce=False), blow_up())
    at = next(i for i, d in enumerate(decisions) if d)
    assert all(d.action == "continue" for d in decisions[:at])
    assert all(d.action == "halt" for d in decisions[at:])
    assert [f.signature for f in decisions[at].findings] == ["KL_BLOWUP"]
    assert not any(d.findings for d in decisions[at + 1 :])
    assert decisions[-1].reason == decisions[at].findings[0]


def test_warn_only_never_acts():
    """`action="warn"` reports and goes on."""
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    assert not any(feed(guard, blow_up()))
    assert [f.signature for f in guard.findings] == ["KL_GROWTH", "KL_BLOWUP"]


def test_a_later_fall_does_not_take_a_finding_back():
    """Said once per attempt and severity, even when KL falls and rises again."""
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    feed(guard, blow_up(cap=50.0) + [0.02] * 60 + blow_up(cap=1e6))
    assert [f.signature for f in guard.findings].count("KL_BLOWUP") == 1


def test_suspicion_ends_after_twenty_calm_observations():
    """A condition, not an event: level 1 while it holds and for 20 observations after."""
    guard = KLGuard(GuardConfig(action="warn"), announce=False)
    feed(guard, blow_up(length=48))
    assert guard.suspicion
    assert guard.level == 1
    levels = []
    for step in range(49, 120):
        guard.observe(step, 0.02)
        levels.append(guard.level)
    assert levels[0] == 1
    assert levels[-1] == 0
    active = [d.active for d in guard._panel.detectors]
    assert not any(active)


def test_equal_steps_merge():
    """The same step in two parts is one observation, and KL counts once."""
    whole, parts = KLGuard(announce=False), KLGuard(announce=False)
    for step, kl in enumerate(blow_up(), start=1):
        a = whole.observe(step, kl, loss=0.1)
        parts.observe(step, kl)
        b = parts.observe(step, loss=0.1)
        assert a.action == b.action
    assert [o.known() for o in whole.history] == [o.known() for o in parts.history]


def test_a_smaller_step_is_one_warning_and_left_out(caplog):
    """Unless announced, going back is no resume."""
    guard = KLGuard()
    feed(guard, [0.02] * 30)
    feed(guard, [50.0] * 20, start=5)
    assert len(guard.history) == 30
    assert [w for w in warnings(caplog) if "guard.resumed(4)" in w]
    assert len(warnings(caplog)) == 1
    assert guard.observe(31, 0.02).action == "continue"
    assert len(guard.history) == 31


def test_steps_that_do_not_advance_are_said(caplog):
    """A loop that always says step 0 would leave the guard blind."""
    guard = KLGuard()
    for _ in range(40):
        guard.observe(0, 0.1)
    assert [w for w in warnings(caplog) if "step 0 was observed 16 times" in w]


def test_announced_resume_drops_what_came_later():
    """After `resumed(30)` the guard is as if steps 31 on had not been."""
    went_back, straight = KLGuard(announce=False), KLGuard(announce=False)
    feed(went_back, blow_up(start=20, length=60))
    went_back.resumed(step=30)
    feed(straight, blow_up(start=20, length=30))
    rest = [0.3] * 60
    for step, kl in enumerate(rest, start=31):
        a, b = went_back.observe(step, kl), straight.observe(step, kl)
        assert (a.action, a.findings) == (b.action, b.findings)
    assert went_back.attempt == 0


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"kl_mean": "high"}, "kl_mean"),
        ({"kl_mean": [1, 2]}, "kl_mean"),
        ({"kl_mean": 0.1, "grad_norm": object()}, "grad_norm"),
        ({"kl_mean": 0.1, "loss": True}, "loss"),
    ],
)
def test_bad_values_are_one_warning_and_count_as_missing(metrics, name, caplog):
    """Never an exception; the rest of the observation is used."""
    guard = KLGuard()
    for step in range(1, 6):
        assert guard.observe(step, **metrics).action == "continue"
    assert len([w for w in warnings(caplog) if f"{name} must be a number" in w]) == 1
    assert len(guard.history) == 5


@pytest.mark.parametrize("step", [-1, math.nan, None, "first", 2.5, [1]])
def test_bad_steps_are_one_warning_and_left_out(step, caplog):
    """An observation without a place cannot be used."""
    guard = KLGuard()
    for _ in range(3):
        assert guard.observe(step, 0.1).action == "continue"
    assert len([w for w in warnings(caplog) if "step must be a" in w]) == 1
    assert len(guard.history) == 0


def test_tensors_are_taken():
    """A scalar tensor needs no `.item()` from the user."""
    torch = pytest.importorskip("torch")
    guard = KLGuard(announce=False)
    decisions = [guard.observe(torch.tensor(i), torch.tensor(v)) for i, v in enumerate(blow_up(), start=1)]
    assert decisions[-1].action == "halt"


METHODS = {
    "observe": lambda g: g.observe(9, 0.1),
    "checkpoint_saved": lambda g: g.checkpoint_saved(9, "x"),
    "resumed": lambda g: g.resumed(5),
    "rolled_back": lambda g: g.rolled_back(5),
    "adopt": lambda g: g.adopt(None),
    "close": lambda g: g.close(),
}
PARTS = [
    "_read", "_observe", "_begin", "_report", "_stand", "_decision", "_remember", "_read_rows", "_target",
    "_seen", "_take_over", "_find", "_write_run", "_files.write", "_files.write_together", "_files.write_incident",
    "_files.is_mine",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_fault_in_any_part_never_gets_out(part, tmp_path, caplog, monkeypatch):
    """Each method of the guard made to raise: every public call still returns, and it is said once."""
    guard = KLGuard(output_dir=tmp_path)
    feed(guard, blow_up(length=45))

    def broken(*_, **__):
        raise ZeroDivisionError("inserted")

    *owner, name = part.split(".")
    monkeypatch.setattr(getattr(guard, owner[0]) if owner else guard, name, broken)
    for step, value in enumerate(blow_up()[45:], start=46):
        guard.observe(step, value)
    for call in METHODS.values():
        call(guard)
        call(guard)
    said = [r for r in caplog.records if "a fault of the guard itself" in r.getMessage()]
    assert len(said) == len({r.getMessage() for r in said})
    if part not in {"_remember", "_read_rows", "_take_over"}:
        assert guard.blind
        assert guard.level == -1


def test_a_broken_detector_leaves_the_others_at_work(caplog):
    """KL_MISSING fails; the blow-up is still halted."""
    guard = KLGuard()
    broken = next(d for d in guard._panel.detectors if d.signature == "KL_MISSING")
    broken.update = lambda observation: 1 / 0
    decisions = feed(guard, blow_up())
    assert decisions[-1].action == "halt"
    assert len([w for w in warnings(caplog) if "KL_MISSING, which is off" in w]) == 1
    assert guard.blind


def test_a_keyboard_interrupt_is_not_swallowed():
    """Ctrl-C belongs to the user."""
    guard = KLGuard()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    guard._panel.judge = interrupted
    with pytest.raises(KeyboardInterrupt):
        guard.observe(1, 0.1)


def save(guard, tmp_path, *steps):
    """Make folders for checkpoints and tell the guard of them."""
    for step in steps:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("w")
        guard.checkpoint_saved(step, folder)


def test_a_halt_names_the_last_checkpoint_before_the_departure(tmp_path):
    """Not the newest: KL logged at a step shows the weights of the step before."""
    guard = KLGuard(announce=False)
    for step, kl in enumerate(blow_up(start=40), start=1):
        decision = guard.observe(step, kl)
        if step % 10 == 0:
            save(guard, tmp_path, step)
        if decision:
            break
    assert decision.reason.departure_step in range(38, 42)
    assert decision.checkpoint.step == 30
    assert decision.checkpoint.path == str(tmp_path / "checkpoint-30")
    assert decision.checkpoint.calm


@pytest.mark.parametrize(
    ("window", "saved", "expected"), [(1, [37, 38, 39], 37), (1, [39], None), (10, [20, 29, 30, 31], 29)]
)
def test_the_target_lies_before_the_window_of_the_departure(tmp_path, window, saved, expected):
    """Step < (first step of the departure's window) - 1."""
    guard = KLGuard(GuardConfig(abs_floor=0.5), announce=False)
    values = blow_up(start=40 // window if window > 1 else 40, length=80, level=0.02)
    save(guard, tmp_path, *saved)
    for index, kl in enumerate(values, start=1):
        decision = guard.observe(index * window, kl, window=window)
        if decision:
            break
    departure = decision.reason.departure_step
    expected = max((s for s in saved if s < departure - window + 1 - 1), default=None)
    assert (decision.checkpoint.step if decision.checkpoint else None) == expected


def test_checkpoints_that_rotation_took_are_not_named(tmp_path):
    """Only a folder that is there can be gone back to."""
    guard = KLGuard(announce=False)
    save(guard, tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "checkpoint-20")
    decision = feed(guard, blow_up())[-1]
    assert decision.checkpoint.step == 10


def test_rollback_is_asked_for_until_the_budget_is_spent(tmp_path):
    """Attempts count up, findings are said anew, and after the last rollback the guard halts."""
    guard = KLGuard(GuardConfig(action="rollback", max_rollbacks=2, grace=0), announce=False)
    save(guard, tmp_path, 10, 30)
    actions = []
    for attempt in range(3):
        values = blow_up(start=40 + 10 * attempt, length=100)
        decision = feed(guard, values[30:] if attempt else values, start=31 if attempt else 1)[-1]
        actions.append((decision.action, guard.attempt, decision.reason.attempt))
        if decision.action == "rollback":
            assert decision.checkpoint.step == 30
            guard.rolled_back(decision.checkpoint.step)
    assert actions == [("rollback", 0, 0), ("rollback", 1, 1), ("halt", 2, 2)]
    assert "all 2 rollbacks are used up (earlier failures: at step 40, at step 50)" in decision.note


def test_a_second_failure_at_the_same_step_halts(tmp_path):
    """Whatever was changed: the cause is in the data, a schedule or the code, and going back again would not help."""
    guard = KLGuard(GuardConfig(action="rollback", max_rollbacks=5, grace=0), announce=False)
    save(guard, tmp_path, 30)
    assert feed(guard, blow_up())[-1].action == "rollback"
    guard.rolled_back(30)
    decision = feed(guard, blow_up(start=42, growth=1.4)[30:], start=31)[-1]
    assert decision.action == "halt"
    assert "at step 40 it had failed before" in decision.note


@pytest.mark.parametrize(("again", "action"), [(45, "halt"), (46, "rollback")])
def test_a_second_nan_halts_only_at_the_same_step(tmp_path, again, action):
    """A NaN batch comes back at exactly its step; another one is another failure."""
    guard = KLGuard(GuardConfig(action="rollback", max_rollbacks=5, grace=0), announce=False)
    save(guard, tmp_path, 30)
    for first, at in ((1, 45), (31, again)):
        for step in range(first, at):
            guard.observe(step, 0.02, grad_norm=0.1)
        decision = guard.observe(at, math.nan, grad_norm=math.nan, loss=math.nan)
        if first == 1:
            assert decision.action == "rollback"
            guard.rolled_back(30)
    assert decision.action == action


def test_rollback_without_a_checkpoint_halts_and_says_so():
    """Never pretend."""
    decision = feed(KLGuard(GuardConfig(action="rollback"), announce=False), blow_up())[-1]
    assert decision.action == "halt"
    assert "no checkpoint from before the departure" in decision.note


def test_a_wrong_reference_blocks_rollback(tmp_path):
    """While KL is within twice its first value, going back cannot help."""
    guard = KLGuard(GuardConfig(action="rollback", hard_ceiling=5.0), announce=False)
    save(guard, tmp_path, 0)
    decision = feed(guard, [6.0] * 5)[-1]
    assert decision.action == "halt"
    assert "from the first step" in decision.note


def test_grace_after_a_rollback(tmp_path):
    """For 5 observations nothing but KL_NONFINITE acts; what lasts longer is said then."""
    guard = KLGuard(GuardConfig(action="rollback", hard_ceiling=5.0, sustain=1), announce=False)
    save(guard, tmp_path, 10)
    feed(guard, [0.02] * 40)
    assert guard.observe(41, 50.0).action == "rollback"
    guard.rolled_back(10)
    actions = [guard.observe(step, 50.0).action for step in range(11, 20)]
    assert actions[:5] == ["continue"] * 5
    assert actions[5] != "continue"
    guard.rolled_back(10)
    assert guard.observe(11, math.nan, grad_norm=math.nan).action != "continue"


def test_a_finding_of_another_rank_is_adopted(tmp_path):
    """The decision, the journal and the incident are those of the rank that saw it."""
    seen = feed(KLGuard(announce=False), blow_up())[-1].reason
    guard = KLGuard(output_dir=tmp_path, announce=False)
    feed(guard, [0.02] * 10)
    guard.adopt(seen)
    assert guard.observe(11, 0.02).reason == seen
    assert list((tmp_path / "kl_guard" / "incidents").iterdir())


def test_incident_holds_what_is_needed(tmp_path):
    """One folder per decision, with finding, configuration and the observations that led to it."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    decision = feed(guard, blow_up(), learning_rate=1e-5)[-1]
    (folder,) = (tmp_path / "kl_guard" / "incidents").iterdir()
    assert folder.name == f"0-{decision.reason.step}-KL_BLOWUP"
    incident = json.loads((folder / "incident.json").read_text())
    assert incident["finding"]["signature"] == "KL_BLOWUP"
    assert incident["config"]["ratio"] == 8.0
    assert incident["observations"][-1]["step"] == decision.reason.step


def test_rank_other_than_zero_writes_and_says_nothing(tmp_path, caplog):
    """Only rank 0 does; the decision is the same."""
    guard = KLGuard(output_dir=tmp_path, rank=1)
    assert feed(guard, blow_up())[-1].action == "halt"
    assert not (tmp_path / "kl_guard").exists()
    assert not warnings(caplog)


@pytest.mark.parametrize(("value", "rank"), [("3", 3), ("", 0), ("x", 0)])
def test_rank_from_the_environment(value, rank, monkeypatch):
    """As torchrun sets it."""
    monkeypatch.setenv("RANK", value)
    assert KLGuard().rank == rank


def test_message_names_everything(caplog):
    """Signature, onset, departure, evidence, causes with what to try, checkpoint."""
    guard = KLGuard()
    for step, kl in enumerate(blow_up(), start=1):
        guard.observe(step, kl, learning_rate=1e-5 if step < 38 else 3e-4, beta=0.04)
    text = "\n".join(warnings(caplog))
    for part in ("KL_BLOWUP (critical)", "onset: step", "departure", "threshold", "x30", "try:", "No checkpoint"):
        assert part in text
    assert "the learning rate was raised" in text.split("1. ")[1].splitlines()[0]


def test_observation_cannot_be_changed():
    """What was observed stays as it was."""
    with pytest.raises(AttributeError):
        Observation(1).step = 2


def test_a_halt_survives_faults_around_it(tmp_path, monkeypatch, caplog):
    """Looking for a checkpoint, explaining or writing the incident fails: the decision stands."""
    for broken in ("kl_guard.guard.incidents.write", "kl_guard.checkpoints.Keeper.newest_before"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, lambda *_, **__: 1 / 0)
            assert feed(KLGuard(output_dir=tmp_path / broken), blow_up())[-1].action == "halt"


@pytest.mark.parametrize("path", ["/" + "x" * 300, b"/tmp/bytes", "nul\0byte"])
def test_odd_paths_of_checkpoints_do_not_cost_the_halt(path):
    """A name that is too long, bytes, a NUL."""
    guard = KLGuard()
    guard.checkpoint_saved(5, path)
    assert feed(guard, blow_up())[-1].action == "halt"


def test_odd_settings_do_not_cost_the_explanation():
    """Learning rates from one end of the floats to the other."""
    guard = KLGuard(announce=False)
    for step, kl in enumerate(blow_up(), start=1):
        decision = guard.observe(step, kl, learning_rate=5e-324 if step % 2 else 1e308, beta=1e308 if step % 2 else 0)
    assert decision.reason.causes


def test_a_standing_halt_answers_unreadable_steps_too():
    """What was decided stands, whatever is observed."""
    guard = KLGuard(announce=False)
    feed(guard, blow_up())
    for step in ("x", math.nan, None, 3):
        assert guard.observe(step, 1.0).action == "halt"


def test_after_a_resume_behind_the_halt_the_same_trouble_is_halted_again():
    """Resumed from the halted state with the cause still there: after a grace it acts again."""
    guard = KLGuard(announce=False)
    halted = next(d for d in feed(guard, blow_up(cap=1e9)) if d)
    step = halted.reason.step
    guard.resumed(step)
    decisions = feed(guard, blow_up(length=200, cap=1e9)[step : step + 30], start=step + 1)
    assert [d.action for d in decisions[:5]] == ["continue"] * 5
    assert decisions[-1].action == "halt"


def test_a_resume_after_warn_only_can_halt(tmp_path):
    """What was only said before is acted on when the user asks for it."""
    first = KLGuard(GuardConfig(action="warn"), output_dir=tmp_path, announce=False)
    feed(first, blow_up(cap=1e9)[:55])
    first.close()
    second = KLGuard(GuardConfig(action="halt"), output_dir=tmp_path, announce=False)
    second.resumed(55)
    assert feed(second, blow_up(length=90, cap=1e9)[55:], start=56)[-1].action == "halt"


def test_nan_is_not_within_twice_the_first_kl(tmp_path):
    """A start that was too high does not block going back from NaN."""
    guard = KLGuard(GuardConfig(action="rollback"), announce=False)
    feed(guard, [0.2] * 99)
    save(guard, tmp_path, 50)
    assert guard.observe(100, math.nan, grad_norm=math.nan).action == "rollback"


def test_a_resumed_run_has_no_first_kl():
    """However often it is resumed or rolled back."""
    guard = KLGuard(announce=False)
    guard.resumed(50)
    feed(guard, [0.3] * 30, start=51)
    guard.resumed(70)
    feed(guard, [0.3] * 5, start=71)
    guard.rolled_back(60)
    feed(guard, [0.3] * 5, start=61)
    assert guard.findings == []


@pytest.mark.parametrize("value", [2**63, 2.0**60, 10**400])
def test_numbers_beyond_any_run_are_refused(value):
    """A step or window that no array can hold leaves everything as it was."""
    guard = KLGuard()
    assert guard.observe(value, 0.1).action == "continue"
    guard.observe(1, 0.1, window=value)
    guard.observe(2, 0.2)
    assert [o.known() for o in guard.history] == [
        {"step": 1, "kl_mean": 0.1, "window": 1},
        {"step": 2, "kl_mean": 0.2, "window": 1},
    ]
    assert not guard.blind


@pytest.mark.parametrize("value", [-1, 2.5, "x"])
def test_expected_observations_are_checked(value):
    """Where they are set."""
    with pytest.raises(ValueError, match="expected_observations must be a whole number of at least 0"):
        KLGuard(expected_observations=value)


def test_the_early_warning_is_not_said_after_the_alarm():
    """KL_GROWTH has nothing to add to KL_BLOWUP."""
    for start in (15, 25, 40, 90):
        for growth in (1.05, 1.2, 2.0, 100.0):
            guard = KLGuard(GuardConfig(action="warn"), announce=False)
            feed(guard, blow_up(start, start + 150, growth=growth))
            signatures = [f.signature for f in guard.findings]
            assert signatures in (["KL_BLOWUP"], ["KL_GROWTH", "KL_BLOWUP"], ["KL_GROWTH"]), signatures


def test_a_target_inside_the_trouble_is_passed_over(tmp_path):
    """KL rose early, crawled on a plateau and rose again: the plateau is before the departure, and no way back."""
    values = [0.01] * 15 + [0.01 * 1.35**k for k in range(1, 16)] + [0.9] * 40 + [0.9 * 1.1**k for k in range(1, 40)]
    guard = KLGuard(GuardConfig(action="rollback", horizon="run", min_observations=70), announce=False)
    for step, value in enumerate(values, start=1):
        decision = guard.observe(step, value)
        if decision:
            break
        if step % 10 == 0:
            save(guard, tmp_path, step)
    assert decision.action == "rollback"
    assert decision.reason.departure_step > 60
    assert decision.checkpoint.step == 20


def test_causes_after_a_rollback_are_of_this_attempt(tmp_path):
    """The guard itself lowered the learning rate: what it was before is neither in force nor a jump."""
    guard = KLGuard(GuardConfig(action="rollback", grace=0), announce=False)
    save(guard, tmp_path, 30)
    for step, value in enumerate(blow_up(), start=1):
        if guard.observe(step, value, learning_rate=1e-4, beta=0.1):
            break
    guard.rolled_back(30)
    for step, value in enumerate(blow_up(start=46, length=100)[30:], start=31):
        decision = guard.observe(step, value, learning_rate=1e-2, beta=0.2)
        if decision:
            break
    assert decision.reason.departure_step >= 44
    text = " ".join(cause.evidence + cause.remedy for cause in decision.reason.causes)
    assert "0.0001" not in text
    assert "it was 0.01 at the departure" in text


def test_a_guard_is_freed_with_its_last_reference(tmp_path):
    """Not by the garbage collector some time: a notebook that begins run after run does not hold their histories."""
    gc.disable()
    try:
        guard = KLGuard(output_dir=tmp_path, announce=False)
        for step, value in enumerate(blow_up(), start=1):
            guard.observe(step, value, tokens=stats())
        guard.resumed(10)
        guard.log({"kl": 0.02}, step=11)
        guard.close()
        reference = weakref.ref(guard)
        del guard
        assert reference() is None
    finally:
        gc.enable()
