"""A run that is stopped and resumed keeps its baseline, its run id and its journal."""

import json
import shutil

import pytest
from transformers import TrainerCallback

from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_trl import KLGuardCallback
from trl_runs import SetKL

SAVING = {"save_strategy": "steps", "save_steps": 10, "max_steps": 60}


def curve(step):
    """Calm to step 35, then growth by 1.6 a step: crosses the floor at step 43."""
    return 0.02 * (1 + 0.1 * (step % 3)) * (1.6 ** (step - 35) if step > 35 else 1)


class Stop(TrainerCallback):
    """Ends training at a step, as a preemption would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def run(make_trainer, *extra, resume=None, **arguments):
    guard = KLGuardCallback()
    trainer = make_trainer([SetKL(curve), guard, *extra], **{**SAVING, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    return guard, trainer


@pytest.fixture
def uninterrupted(make_trainer, tmp_path):
    """The halt of a run that was never stopped."""
    guard, _ = run(make_trainer, output_dir=tmp_path / "uninterrupted")
    return guard.decision.reason


@pytest.mark.parametrize("source", ["journal", "log history"])
def test_a_resumed_run_halts_like_an_uninterrupted_one(make_trainer, tmp_path, uninterrupted, source):
    """Stopped at step 34, resumed from checkpoint 30: same step, onset, departure, baseline."""
    first, _ = run(make_trainer, Stop(34))
    if source == "log history":
        shutil.rmtree(tmp_path / "run" / "kl_guard")
    second, trainer = run(make_trainer, resume=True)
    reason = second.decision.reason
    assert (reason.step, reason.onset_step, reason.departure_step) == (
        uninterrupted.step,
        uninterrupted.onset_step,
        uninterrupted.departure_step,
    )
    assert reason.evidence["baseline"] == uninterrupted.evidence["baseline"]
    assert trainer.state.global_step == reason.step
    assert second.decision.checkpoint.step == 30
    same = second.guard.run_id == first.guard.run_id
    assert same == (source == "journal")
    assert second.guard.attempt == 0


@pytest.mark.newest
def test_the_journal_tells_the_whole_story(make_trainer, tmp_path):
    """Observations, checkpoints, the resume, the halt: in order, in one file."""
    run(make_trainer, Stop(34))
    guard, _ = run(make_trainer, resume=True)
    path = tmp_path / "run" / "kl_guard" / "journal.jsonl"
    records, notes = read_journal(path)
    kinds = [r["type"] for r in records]
    assert not notes
    assert kinds.count("run") == 1
    assert kinds.count("resume") == 1
    assert [r["step"] for r in records if r["type"] == "checkpoint"] == [10, 20, 30, 40]
    assert kinds[-2:] == ["finding", "decision"] or "decision" in kinds
    memory = recall(records)
    assert list(memory.history.steps) == list(range(1, guard.decision.reason.step + 1))
    for line in path.read_text().splitlines():
        json.loads(line)


def test_after_a_halt_the_named_checkpoint_can_be_resumed(make_trainer, tmp_path):
    """What the message says works: going back to it, with the cause removed, the run finishes and stays healthy."""
    guard, _ = run(make_trainer)
    back = guard.decision.checkpoint.path
    calm = KLGuardCallback()
    trainer = make_trainer([SetKL(lambda step: 0.02), calm], **SAVING)
    trainer.train(resume_from_checkpoint=back)
    assert trainer.state.global_step == 60
    assert not calm.halted
    assert calm.guard.run_id == guard.guard.run_id
    assert list(calm.guard.history.steps) == list(range(1, 61))


@pytest.mark.newest
def test_the_same_failure_after_going_back_is_halted_again(make_trainer):
    """A finding that the resume took back can be said again."""
    guard, _ = run(make_trainer)
    again, trainer = run(make_trainer, resume=guard.decision.checkpoint.path)
    assert again.halted
    assert trainer.state.global_step == guard.decision.reason.step


def test_the_halted_state_can_be_resumed(make_trainer, tmp_path):
    """No work is lost: the halted state is a checkpoint like any other."""
    run(make_trainer)
    (folder,) = (tmp_path / "run" / "kl_guard" / "halted").glob("step-*")
    trainer = make_trainer([SetKL(lambda step: 0.02), KLGuardCallback(action="warn")], **SAVING)
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == 60


@pytest.mark.newest
def test_a_fresh_start_in_a_used_folder(make_trainer, tmp_path):
    """Without a resume the old journal is put aside, and its findings and baseline do not count."""
    old, _ = run(make_trainer)
    new, _ = run(make_trainer)
    assert new.guard.run_id != old.guard.run_id
    assert new.decision.reason.step == old.decision.reason.step
    assert (tmp_path / "run" / "kl_guard" / f"journal-{old.guard.run_id}.jsonl").is_file()


@pytest.mark.newest
def test_checkpoints_of_an_earlier_process_are_found(make_trainer, tmp_path):
    """Without a journal the folder tells which checkpoints there are."""
    run(make_trainer, Stop(34))
    shutil.rmtree(tmp_path / "run" / "kl_guard")
    (tmp_path / "run" / "checkpoint-7x").mkdir()
    second, _ = run(make_trainer, resume=True)
    assert [c.step for c in second.guard.checkpoints if c.step <= 30] == [10, 20, 30]
