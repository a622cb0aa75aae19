"""Processes that are killed, started again, resumed by hand or from elsewhere: attempt, budget and factors go on."""

import shutil

import pytest
from transformers import TrainerCallback

from kl_guard.journal import read_journal
from kl_guard.memory import recall
from kl_guard_trl import KLGuardCallback
from rollback_runs import SAVING, guarded
from trl_runs import SetKL, training_logs


@pytest.mark.parametrize("resume", ["True", "newest", "target", "another"])
def test_a_process_killed_after_the_decision_goes_back_when_started_again(make_trainer, tmp_path, resume):
    """Decided, not made: True, or the newest by its path, leads to the target; another is the user's own decision."""
    guard, trainer = guarded(make_trainer, trouble=9)

    class DiesError(Exception):
        pass

    def dies(*_):
        raise DiesError

    guard._reentry._make_ready = dies
    with pytest.raises(DiesError):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-10").is_dir()
    again, trainer = guarded(make_trainer, trouble=99)
    folder = str(tmp_path / "run" / "checkpoint-")
    paths = {"True": True, "newest": folder + "10", "target": folder + "4", "another": folder + "8"}
    trainer.train(resume_from_checkpoint=paths[resume])
    assert again.guard.attempt == (0 if resume == "another" else 1)
    if resume == "another":
        return
    assert trainer.state.global_step == 14
    rates = {row["step"]: row["learning_rate"] for row in training_logs(trainer)}
    assert rates[4] == pytest.approx(1e-4)
    assert rates[5] == rates[14] == pytest.approx(0.5e-4)
    assert trainer.beta == pytest.approx(0.2)
    assert (tmp_path / "run" / "kl_guard" / "quarantine" / "attempt-0-checkpoint-10").is_dir()


@pytest.mark.newest
@pytest.mark.parametrize(("stop", "factors"), [(7, {7: 0.5, 14: 0.5}), (11, {7: 0.5, 11: 0.5, 14: 0.5})])
def test_a_process_killed_in_a_later_attempt_goes_on_in_it(make_trainer, tmp_path, stop, factors):
    """Before the first checkpoint of the new attempt, and after: same attempt, budget, factors, and beta."""
    guard, trainer = guarded(make_trainer)

    class Preempted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if guard.rollbacks and state.global_step == stop:
                raise KeyboardInterrupt

    trainer.add_callback(Preempted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    run_id = guard.guard.run_id
    guard.guard.close()
    again = KLGuardCallback(action="rollback", max_rollbacks=1)
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step > 14 else 0.01), again], **{**SAVING, "max_steps": 24})
    again.attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert again.guard.run_id == run_id
    assert again.guard.attempt == 1
    rates = {row["step"]: row["learning_rate"] for row in training_logs(trainer)}
    for step, factor in factors.items():
        assert rates[step] == pytest.approx(1e-4 * factor), step
    assert trainer.beta == pytest.approx(0.2)
    assert again.halted
    assert "all 1 rollbacks are used up" in again.decision.note
    records, _ = read_journal(tmp_path / "run" / "kl_guard" / "journal.jsonl")
    assert recall(records).rollbacks == 1


def test_resuming_by_hand_moves_later_checkpoints_aside(make_trainer, tmp_path):
    """Saving the same steps again must not write into what is pinned, and "the last one" must be of this branch."""
    _, trainer = guarded(make_trainer, attach=False)
    trainer.train()
    before = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert before == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    shutil.copytree(tmp_path / "run" / "checkpoint-8", tmp_path / "copy")
    _, trainer = guarded(make_trainer, attach=False, trouble=99)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    aside = tmp_path / "run" / "kl_guard" / "quarantine" / "attempt-0-checkpoint-8"
    assert (aside / "model.safetensors").read_bytes() == (tmp_path / "copy" / "model.safetensors").read_bytes()


def test_a_second_train_call_begins_anew(make_trainer):
    """Attached once, a trainer can train again: fresh budget, no memory, and the settings it was started with."""
    guard, trainer = guarded(make_trainer)
    trainer.train()
    first = guard.guard.run_id
    assert len(guard.rollbacks) == 1
    shown = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SetKL))
    shown.values = lambda step: 0.01
    trainer.train()
    assert guard.guard.run_id != first
    assert not guard.halted
    assert guard.rollbacks == []
    assert trainer.beta == pytest.approx(0.1)
    assert training_logs(trainer)[0]["learning_rate"] == pytest.approx(1e-4)


@pytest.mark.newest
def test_the_halted_state_of_a_later_attempt_can_be_resumed(make_trainer, tmp_path):
    """It holds the learning rate of its attempt; beta is put back."""
    guard = KLGuardCallback(action="rollback")
    trainer = make_trainer([SetKL(lambda step: 1000.0 if step >= 12 else 0.01), guard], **{**SAVING, "max_steps": 30})
    guard.attach(trainer)
    trainer.train()
    assert guard.halted
    assert guard.guard.attempt == 1
    (state,) = (tmp_path / "run" / "kl_guard" / "halted").glob("step-*")
    again, trainer = guarded(make_trainer, trouble=99, max_steps=20)
    trainer.train(resume_from_checkpoint=str(state))
    assert trainer.state.global_step == 20
    assert not again.halted
    assert training_logs(trainer)[-1]["learning_rate"] == pytest.approx(0.5e-4)
    assert trainer.beta == pytest.approx(0.2)


@pytest.mark.newest
def test_checkpoints_of_an_older_run_do_not_count(make_trainer, tmp_path):
    """They lie in the same folder; their history is another one, so they are neither pinned nor gone back to."""
    make_trainer([], **{**SAVING, "save_steps": 3, "seed": 5}).train()
    first, trainer = guarded(make_trainer, trouble=99, save_steps=4, max_steps=8)
    trainer.train()
    first.guard.close()
    again, trainer = guarded(make_trainer, trouble=99, save_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))
    assert [c.step for c in again.guard.checkpoints] == [0, 4, 8, 12, 14]
    assert not (tmp_path / "run" / "kl_guard" / "pins" / "step-6").exists()
