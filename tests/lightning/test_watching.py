"""What is observed: each optimizer step once, with what it logged itself."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from kl_guard import replay
from kl_guard.journal import read_journal
from kl_guard.tokens import summarize_tokens
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from kl_guard_torch import TorchGuard
from lightning_runs import Numbers, Policy, Record, Resumable, each, loader, said, trainer_of
from streams import blow_up


def watch(tmp_path, module, guard=None, data=None, **settings):
    guard = guard or KLGuardCallback(action="warn")
    trainer = trainer_of(tmp_path, [guard], **settings)
    trainer.fit(module, loader() if data is None else data)
    return guard


def test_a_run_says_what_a_replay_of_its_series_says(tmp_path):
    """The same findings at the same steps, on real blow-ups and noise."""
    series = [0.02 + 0.005 * (step % 3) for step in range(30)] + blow_up(start=5, length=30)
    guard = KLGuardCallback(action="warn")
    module = Policy(lambda step: series[step - 1], lr=1e-4)
    watch(tmp_path, module, guard, loader(400), max_steps=len(series))
    expected = replay(series, action="warn")
    assert [(f.signature, f.severity, f.step) for f in expected.findings] == [
        (f.signature, f.severity, f.step) for f in guard.guard.findings
    ]
    assert any(f.signature == "KL_BLOWUP" for f in guard.guard.findings)
    assert list(guard.guard.history.column("kl_mean")) == series


def test_old_values_are_not_new(tmp_path):
    """A step that logs no KL has none, though the trainer still shows the last one."""
    guard = watch(tmp_path, Policy(lambda step: 0.1 * step if step % 3 == 0 else None))
    kl = guard.guard.history.column("kl_mean")
    assert [step for step, value in zip(guard.guard.history.steps, kl, strict=True) if value == value] == [3, 6, 9, 12]


def test_the_mean_of_an_epoch_is_no_step(tmp_path):
    """What is logged per step and per epoch is read per step only; an epoch's mean stays out."""

    class Both(Policy):
        def training_step(self, batch, batch_idx):
            if batch_idx != 0:
                self.log("kl_mean", float(batch_idx), on_step=True, on_epoch=True)
            return self.net(batch).pow(2).mean()

    guard = watch(tmp_path, Both(), data=loader(16), max_steps=12)
    kl = [value if value == value else None for value in guard.guard.history.column("kl_mean")]
    assert kl == [None, 1.0, 2.0, 3.0] * 3


def test_batches_of_one_step_are_one_observation(tmp_path):
    """With accumulation the mean of the micro-batches, of the maximum the largest."""

    class Micro(Policy):
        def training_step(self, batch, batch_idx):
            self.log("kl_mean", float(batch_idx))
            self.log("kl_max", float(batch_idx))
            return self.net(batch).pow(2).mean()

    guard = watch(tmp_path, Micro(), data=loader(32), max_steps=4, accumulate_grad_batches=4)
    assert list(guard.guard.history.steps) == [1, 2, 3, 4]
    assert list(guard.guard.history.column("kl_mean")) == [1.5, 5.5] * 2
    assert list(guard.guard.history.column("kl_max")) == [3.0, 7.0] * 2


def test_several_optimizer_steps_in_a_batch(tmp_path):
    """Manual optimization: the trainer counts each, the guard observes where they lead, and halts."""
    guard = KLGuardCallback()
    trainer = trainer_of(tmp_path, [guard], max_steps=40)
    trainer.fit(Policy(lambda step: 1000.0 if step > 8 else 0.01, steps_per_batch=2), loader())
    assert list(guard.guard.history.steps) == [2, 4, 6, 8, 10, 12, 14]
    assert trainer.global_step == 14
    assert guard.halted


def test_usual_names_are_found(tmp_path):
    """What modules log beside KL, and the learning rate that the step was made with."""

    class Talks(Policy):
        def training_step(self, batch, batch_idx):
            self.log_dict({"train/kl": 0.25, "train/reward": 2.0, "grad_norm": 0.5, "beta": 0.1})
            return super().training_step(batch, batch_idx)

    guard = watch(tmp_path, Talks(name=None, lr=0.5))
    first, second = guard.guard.history[0], guard.guard.history[1]
    assert (first.kl_mean, first.reward, first.grad_norm, first.beta) == (0.25, 2.0, 0.5, pytest.approx(0.1))
    assert first.learning_rate == 0.5
    assert second.learning_rate == pytest.approx(0.5 / 1.1)
    assert first.loss > 0


def test_a_name_that_is_not_logged_is_an_error(tmp_path):
    """Said once something was logged, with the names that there are, where the user called fit."""
    with pytest.raises(ValueError, match=r"kl_mean='klmean' is not logged .* there are: 'entropy', 'kl_mean'"):
        watch(tmp_path, Policy(), KLGuardCallback(kl_mean="klmean"))
    with pytest.raises(ValueError, match="kl_max='kl_max' is not logged"):
        watch(tmp_path, Policy(), KLGuardCallback(kl_max="kl_max"))
    with pytest.raises(TypeError, match="kl_mean must be the name of a metric"):
        KLGuardCallback(kl_mean=3)


def test_a_name_of_ones_own_is_read(tmp_path):
    """And nothing else in its place."""

    class Two(Policy):
        def training_step(self, batch, batch_idx):
            self.log("kl", 7.0)
            return super().training_step(batch, batch_idx)

    guard = watch(
        tmp_path, Two(lambda step: 0.5, name="drift/mean"), KLGuardCallback(action="warn", kl_mean="drift/mean")
    )
    assert set(guard.guard.history.column("kl_mean")) == {0.5}


def test_no_kl_under_a_usual_name_is_a_warning(tmp_path, caplog):
    """Once; training goes on."""
    guard = watch(tmp_path, Policy(name="divergence"))
    assert sum("logs no KL under a usual name" in line and "'divergence'" in line for line in said(caplog)) == 1
    assert len(guard.guard.history) == 14


def test_tokens_of_a_step_are_summed_up(tmp_path):
    """All micro-batches of a step together; loggers see the largest."""
    policy = -torch.rand(3, 5)
    reference = policy + torch.randn(3, 5) * 0.1
    mask = torch.rand(3, 5) > 0.2
    module = Policy(name=None)
    module.extra = {
        "policy_logprobs": policy,
        "ref_logprobs": reference,
        "mask": mask,
        "token_ids": torch.full((3, 5), 7),
    }
    guard = KLGuardCallback(action="warn")
    trainer = trainer_of(tmp_path, [guard], accumulate_grad_batches=2, max_steps=4)
    trainer.fit(module, loader())
    expected = summarize_tokens(policy, reference, mask).read()
    last = guard.guard.history[-1]
    assert last.kl_token_mean == pytest.approx(expected.kl_token_mean)
    assert last.kl_max == pytest.approx(expected.kl_max)
    assert float(trainer.callback_metrics["kl_guard/kl_max"]) == pytest.approx(expected.kl_max)
    assert last.id_of_share == 7
    assert "kl_guard/kl_without_special" not in trainer.callback_metrics


def test_special_tokens_are_told_apart(tmp_path):
    """KL without them is what loggers see, and an outlier has its text."""
    policy = torch.full((2, 4), -1.0)
    reference = policy - torch.tensor([0.1, 0.1, 0.1, 3.0])
    ids = torch.tensor([[5, 6, 7, 2]] * 2)
    module = Policy(name=None)
    module.extra = {"policy_logprobs": policy, "ref_logprobs": reference, "mask": ids > 0, "token_ids": ids}
    guard = KLGuardCallback(action="warn", special_ids=[2, 3], token_text=lambda token_id: f"<{token_id}>")
    trainer = trainer_of(tmp_path, [guard], max_steps=2)
    trainer.fit(module, loader())
    expected = summarize_tokens(policy, reference, ids > 0, ids, special_ids=[2, 3]).read()
    assert expected.kl_without_special < 0.01 < expected.kl_token_mean
    assert float(trainer.callback_metrics["kl_guard/kl_without_special"]) == pytest.approx(expected.kl_without_special)
    assert guard.guard.outliers.at(2)[0].text == "<2>"
    copy = pickle.loads(pickle.dumps(KLGuardCallback(special_ids=[2, 3], token_text=chr)))
    assert (copy._tokens.special_ids, copy._token_text) == ((2, 3), chr)


@pytest.mark.parametrize("ids", [7, "12", [1.5], [None]])
def test_special_ids_are_ids(ids):
    """Refused where they are set."""
    with pytest.raises(TypeError, match="special_ids must be token ids, whole numbers, got"):
        KLGuardCallback(special_ids=ids)
    with pytest.raises(TypeError, match="special_ids must be token ids, whole numbers, got"):
        TorchGuard(special_ids=ids)


def test_tokens_that_make_no_sense_cost_nothing(tmp_path, caplog):
    """Shapes that do not fit are a fault of the guard's, said once."""
    module = Policy()
    module.extra = {"policy_logprobs": torch.ones(2), "ref_logprobs": torch.ones(3), "mask": torch.ones(2)}
    guard = watch(tmp_path, module)
    assert len(guard.guard.history) == 14
    assert sum("a fault of the guard itself (take_batch)" in line for line in said(caplog)) == 1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_is_not_changed(tmp_path, accumulate):
    """Weights, moments and random state of every step are those of a run without the callback."""
    states = []
    for guarded in (False, True):
        torch.manual_seed(3)
        record = Record()
        module = Policy(lambda step: 0.01 * step)
        module.extra = {
            "policy_logprobs": torch.ones(2, 3),
            "ref_logprobs": torch.zeros(2, 3),
            "mask": torch.ones(2, 3),
        }
        callbacks = [record, KLGuardCallback(action="warn")] if guarded else [record]
        shuffled = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
        trainer_of(tmp_path / str(guarded), callbacks, accumulate_grad_batches=accumulate).fit(module, shuffled)
        states.append(record.states)
    assert states[0] == states[1]
    assert len(states[0]) >= 14


def test_a_resumed_run_remembers(tmp_path):
    """In a new process, with `ckpt_path`: the journal gives back what was observed up to that step."""
    series = [0.02 + 0.005 * (step % 3) for step in range(30)] + blow_up(start=5, length=30)
    guards = [KLGuardCallback(), KLGuardCallback()]
    saver = each(10, dirpath=tmp_path / "saved")
    trainer_of(tmp_path, [guards[0], saver], max_steps=33).fit(Policy(lambda s: series[s - 1]), loader(400))
    trainer = trainer_of(tmp_path, [guards[1], each(10, dirpath=tmp_path / "saved")], max_steps=len(series))
    trainer.fit(Policy(lambda s: series[s - 1]), loader(400), ckpt_path=tmp_path / "saved" / "step=30.ckpt")
    assert guards[1].halted
    assert guards[1].decision.reason.step == replay(series).fired_at == trainer.global_step
    assert list(guards[1].guard.history.column("kl_mean")) == series[: trainer.global_step]
    assert guards[1].guard.run_id == guards[0].guard.run_id


@pytest.mark.parametrize("fit", [pl.Trainer.fit, fit_with_rollback])
def test_a_checkpoint_that_a_kill_kept_from_the_guard(tmp_path, fit):
    """Written, and the process dies before the guard is told: it is taken note of, and pinned, once resumed from."""

    class KilledError(BaseException):
        pass

    def killed(path):
        if path.name == "step=10.ckpt":
            raise KilledError

    first = KLGuardCallback(action="rollback")
    told, first.keeping.saves._saved = first.keeping.saves._saved, lambda path: (killed(path), told(path))
    trainer = trainer_of(tmp_path, [first, each(5, dirpath=tmp_path / "saved")])
    with pytest.raises(KilledError):
        fit(trainer, Policy(), Resumable())
    first.guard.close()
    journal, _ = read_journal(tmp_path / "kl_guard" / "journal.jsonl")
    assert [r["step"] for r in journal if r["type"] == "checkpoint" and r["step"]] == [5]
    again = KLGuardCallback(action="rollback")
    trainer = trainer_of(tmp_path, [again, each(50, dirpath=tmp_path / "saved")])
    newest = tmp_path / "saved" / "step=10.ckpt"
    fit(trainer, Policy(), Resumable(), ckpt_path=newest)
    assert trainer.global_step == 14
    assert again.guard.run_id == first.guard.run_id
    assert Path(again.guard.checkpoints.get(10).path) == newest
    pin = tmp_path / "kl_guard" / "pins" / "step-10" / "step=10.ckpt"
    assert pin.read_bytes() == newest.read_bytes()


@pytest.mark.parametrize("place", ["kl_guard/halted/step-10", "../elsewhere"])
def test_what_is_no_checkpoint_of_the_run_is_not_taken_for_one(tmp_path, place):
    """The state at a halt, from the midst of the trouble, and what lies outside of the run's folder."""
    root = tmp_path / "root"
    halted = KLGuardCallback()
    trainer_of(root, [halted]).fit(Policy(lambda step: 1000.0 if step >= 8 else 0.01), Resumable())
    state = root / "kl_guard" / "halted" / "step-10" / "step=10.ckpt"
    (root / place).mkdir(parents=True, exist_ok=True)
    if not (root / place / "step=10.ckpt").exists():
        shutil.copy(state, root / place / "step=10.ckpt")
    again = KLGuardCallback()
    trainer_of(root, [again]).fit(Policy(), Resumable(), ckpt_path=root / place / "step=10.ckpt")
    assert again.guard.history.steps[-1] == 14
    assert again.guard.checkpoints.get(10) is None


KEEPING = ["note_saved", "note_finished", "keep_start", "keep_halted", "finish", "_tell", "_is_exact"]


@pytest.mark.parametrize("name", KEEPING)
def test_a_fault_in_keeping_costs_a_checkpoint_at_most(tmp_path, caplog, monkeypatch, name):
    """Training and halting go on."""
    from kl_guard_lightning.keeping import Keeping

    def broken(*_, **__):
        raise ZeroDivisionError("inserted")

    monkeypatch.setattr(Keeping, name, broken)
    guard = KLGuardCallback(action="rollback", pin_start=name == "keep_start", max_rollbacks=0)
    trainer = trainer_of(tmp_path, [guard, each(5, dirpath=tmp_path / "saved")])
    fit_with_rollback(trainer, Policy(lambda step: 1000.0 if step > 8 else 0.01), Resumable())
    assert trainer.global_step == 11
    assert guard.halted
    assert (tmp_path / "saved" / "step=5.ckpt").exists()
    assert sum("a fault of the guard itself" in line for line in said(caplog)) >= 1


BROKEN = ["_start", "_begin_batch", "_take_batch", "_observe", "_show", "_note_learning_rate", "_finish"]


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_raises_training_goes_on(tmp_path, caplog, name):
    """A fault of the guard is logged once."""

    def broken(*_, **__):
        raise ZeroDivisionError("inserted")

    guard = KLGuardCallback()
    setattr(guard, name, broken)
    trainer = trainer_of(tmp_path, [guard, each(5, dirpath=tmp_path / "saved")])
    trainer.fit(Policy(), Resumable())
    assert trainer.global_step == 14
    assert not guard.halted
    assert sum("a fault of the guard itself" in line for line in said(caplog)) >= 1


def test_a_fault_in_showing_loses_no_halt(tmp_path, monkeypatch):
    """What was decided stands, whatever fails after it."""

    def broken(*_, **__):
        raise ZeroDivisionError("inserted")

    guard = KLGuardCallback()
    monkeypatch.setattr(guard, "_show", broken)
    trainer = trainer_of(tmp_path, [guard])
    trainer.fit(Policy(lambda step: 1000.0 if step >= 8 else 0.01), loader())
    assert trainer.global_step == 10
    assert guard.halted


def test_a_second_guard_is_refused(tmp_path):
    """By the trainer, since both would keep their state under one key."""
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `KLGuardCallback`"):
        trainer_of(tmp_path, [KLGuardCallback(), KLGuardCallback(ratio=4.0)])


def test_rollback_needs_its_own_fit(tmp_path, caplog):
    """With plain `fit` the start says that the guard will halt, and it does."""
    guard = KLGuardCallback(action="rollback")
    trainer_of(tmp_path, [guard]).fit(Policy(lambda step: 1000.0 if step > 8 else 0.01), loader())
    assert any("needs fit_with_rollback" in line for line in said(caplog))
    assert guard.decision.action == "halt"
    assert guard.halted
