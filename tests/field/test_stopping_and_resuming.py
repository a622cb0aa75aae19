"""Reported stops, saves and resumes: what is kept, who decides, and what comes back."""

import itertools
import math
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from transformers import TrainerControl, TrainerState

from field_runs import NAN, feed, findings, lines, silent, start
from kl_guard import GuardConfig, KLGuard, KLGuardHalted, replay
from kl_guard_lightning import KLGuardCallback as LightningGuard
from kl_guard_torch import TorchGuard
from kl_guard_trl import KLGuardCallback
from lightning_runs import Policy, loader, trainer_of
from loops import Loop, trouble
from streams import blow_up
from trl import GRPOConfig

ROOT = Path(__file__).parent.parent.parent
SAVES = {"save_strategy": "steps", "logging_nan_inf_filter": False}


def test_transformers_24614_15089_11748_lightrft_53(tmp_path):
    """Two are kept and the best, of step 220, is written over: a pin from before the trouble stays, complete."""
    guard = KLGuard(output_dir=tmp_path, announce=False)
    for step, kl in enumerate(blow_up(start=290, length=400), start=1):
        decision = guard.observe(step, kl)
        if step % 20 == 0:
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "weights").write_text(f"weights of {step}")
            guard.checkpoint_saved(step, folder)
            guard.checkpoints.wait()
            shutil.rmtree(tmp_path / f"checkpoint-{step - 40}", ignore_errors=True)
        if decision:
            break
    guard.close()
    for folder in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(folder)
    assert decision.action == "halt"
    assert decision.checkpoint.step == 280
    pin = tmp_path / "kl_guard" / "pins" / "step-280"
    assert (pin / "weights").read_text() == "weights of 280"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"save_steps": 50, "save_total_limit": 1}, "save_total_limit is 1 with save_steps 50"),
        ({"save_steps": 50, "action": "rollback"}, "nothing is saved before step 50: for trouble that begins earlier"),
        ({"save_steps": 10, "action": "rollback"}, None),
    ],
)
def test_transformers_24614_at_the_start(tmp_path, caplog, arguments, line):
    """One checkpoint only, or none before step 10 with rollback on: said at the start."""
    said = start(tmp_path, caplog, **{**SAVES, **arguments})
    assert bool([text for text in said if line is not None and text.startswith(f"kl-guard: {line}")]) == bool(line)
    assert bool(line) or not [text for text in said if "nothing is saved" in text or "save_total_limit" in text]


def test_lightning_379_2467_sleap_nn_471_skorch_952():
    """What one rank sees all ranks take over, with its reason: the decision is passed on, not only awaited."""
    sees, does_not = KLGuard(rank=1, announce=False), KLGuard(rank=0, announce=False)
    assert feed(sees, [{"kl_mean": 0.02}] * 20 + [{"kl_mean": 500.0}] * 3).action == "halt"
    feed(does_not, [{"kl_mean": 0.02}] * 23)
    does_not.adopt(sees.decision.reason)
    assert (does_not.decision.action, does_not.decision.reason) == ("halt", sees.decision.reason)


def test_trl_1160(caplog):
    """Metrics are on rank 0 only: to another rank a missing key is no health and no error, and it follows rank 0."""
    guard = KLGuard(rank=1)
    assert feed(guard, [{"loss": 0.1, "grad_norm": 0.2}] * 60).action == "continue"
    assert {f.signature for f in guard.findings} == {"KL_MISSING"}
    assert not guard.blind
    assert not lines(caplog)
    zero = KLGuard(rank=0, announce=False)
    feed(zero, [{"kl_mean": 0.02}] * 20 + [{"kl_mean": 500.0}] * 3)
    guard.adopt(zero.decision.reason)
    assert guard.decision.action == "halt"


@pytest.mark.parametrize("least", [{"min_steps": 12}, {"min_epochs": 2, "max_steps": -1, "max_epochs": 2}])
def test_lightning_13789_13890(tmp_path, caplog, least):
    """`should_stop` waits for the least steps or epochs: said at the start; a halt of the guard does not wait."""
    guard = LightningGuard()
    trainer = trainer_of(tmp_path, [guard], **least)
    trainer.fit(Policy(lambda step: 1000.0 if step > 4 else 0.01), loader())
    assert trainer.global_step == 7
    name, value = next(iter(least.items()))
    assert [line for line in lines(caplog) if f"{name} is {value}: trainer.should_stop waits for it" in line]


@pytest.mark.parametrize("bad", [NAN, 1000.0])
def test_lightning_1008_11930(tmp_path, bad):
    """A NaN as best score, a bad step as "last": once it is halted neither "last" nor "best" is from the trouble."""
    saver = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="best-{step}", monitor="kl_mean", every_n_train_steps=1, save_last=True
    )

    class Broken(Policy):
        def training_step(self, batch, batch_idx):
            broken = self.global_step + 1 > 6
            output = super().training_step(batch, batch_idx)
            return {**output, "loss": output["loss"] * (NAN if broken and math.isnan(bad) else 1)}

    guard = LightningGuard(sustain=1)
    trainer = trainer_of(tmp_path, [guard, saver])
    trainer.fit(Broken(lambda step: bad if step > 6 else 0.01), loader())
    assert guard.halted
    assert trainer.global_step == 7
    steps = [torch.load(path, weights_only=False)["global_step"] for path in tmp_path.glob("*.ckpt")]
    assert (tmp_path / "last.ckpt").is_file()
    assert max(steps) <= 6


def test_trl_7047_7053_4086_ms_swift_9261(tmp_path, caplog):
    """One logged number is the mean of micro-batches and steps: that a spike of S shows as S/k is said at the start."""
    said = start(tmp_path, caplog, logging_steps=10, gradient_accumulation_steps=4)
    assert [line for line in said if "a one-step spike of S shows as S/10" in line and "attach(trainer)" in line]
    assert [line for line in said if "a spike of S in one shows as S/4" in line]


def test_lightning_accumulates(tmp_path, caplog):
    """The same of Lightning's accumulated batches."""
    trainer_of(tmp_path, [LightningGuard()], max_steps=2, accumulate_grad_batches=4).fit(Policy(), loader())
    assert [line for line in lines(caplog) if "a spike of S shows as S/4" in line]


def test_unsloth_zoo_873(tmp_path):
    """A callback that forces logs changes the numbers in them: ours never does."""
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, logging_steps=10)
    guard, state, control = KLGuardCallback(), TrainerState(), TrainerControl()
    state.max_steps, state.num_train_epochs = 100, 1
    guard.on_train_begin(args, state, control)
    for step in range(1, 30):
        state.global_step = step
        for event in (guard.on_step_begin, guard.on_step_end):
            event(args, state, control)
            assert not control.should_log
        if step % 10 == 0:
            logs = {"loss": 0.1, "kl": 0.02}
            guard.on_log(args, state, control, logs=logs)
            assert logs == {"loss": 0.1, "kl": 0.02}
    guard.on_train_end(args, state, control)
    assert [o.window for o in guard.guard.history] == [10, 10]


def test_trl_3247_2657_3185_open_r1_450(tmp_path):
    """After a resume other curves: ours goes on with the very weights, moments and streams of the checkpoint."""
    loop, states = Loop(tmp_path, action="rollback", lr_factor=1.0, new_noise=False), {}
    made = loop.run(16, trouble(12), record=states)
    back = next(a for a, b in itertools.pairwise(made) if b <= a)
    first = made[made.index(back) + 1]
    undisturbed, expected = Loop(tmp_path / "other"), {}
    undisturbed.run(16, record=expected)
    assert loop.guard.attempt == 1
    assert {step: states[step] for step in range(first, 17)} == {step: expected[step] for step in range(first, 17)}


class Cached(torch.optim.AdamW):
    """Keeps a learning rate of its own over what it loads."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 0.7


class Fresh(torch.optim.AdamW):
    """Loads no moments."""

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})


class Random(torch.nn.Linear):
    """Loads nothing, silently."""

    def load_state_dict(self, *args, **kwargs):
        with torch.no_grad():
            self.weight.normal_()
        return torch.nn.modules.module._IncompatibleKeys([], [])


@pytest.mark.parametrize(
    ("model", "optimizer", "named"),
    [
        (torch.nn.Linear, Cached, "learning rate"),
        (torch.nn.Linear, Fresh, "optimizer steps"),
        (Random, torch.optim.AdamW, "weights"),
    ],
)
def test_rsl_rl_221_molt_130_lerobot_4560_accelerate_1479(tmp_path, model, optimizer, named):
    """A cached rate, fresh moments, random weights after loading: halted, and the check that failed is named."""
    policy = model(3, 1)
    made = optimizer(policy.parameters(), lr=0.01)
    guard = TorchGuard(model=policy, optimizer=made, output_dir=tmp_path, action="rollback", sustain=1)
    guard.resume()
    for step in range(1, 12):
        made.zero_grad()
        policy(torch.ones(2, 3)).sum().backward()
        made.step()
        if guard.step(step, 1000.0 if step == 11 else 0.01):
            break
        if step == 5:
            guard.save(step)
    with pytest.raises(KLGuardHalted, match=rf"rank 0: {named}: "):
        guard.rollback()
    assert guard.halted
    guard.close()


def test_lerobot_4560_first_kl(tmp_path):
    """Everything equal and KL still far above what was recorded: halted, by the check of the first KL."""
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "weights").write_text("w")
    feed(guard, [{"kl_mean": 0.02}] * 10)
    guard.checkpoint_saved(10, folder)
    feed(guard, [{"kl_mean": 0.02}] * 10 + [{"kl_mean": 500.0}] * 3, first=11)
    guard.rolled_back(guard.go_back().step)
    decision = feed(guard, [{"kl_mean": 2.0}] * 9, first=11)
    guard.close()
    assert (decision.action, decision.reason.signature) == ("halt", "RESTORED_KL_HIGH")
    assert "the check of the first KL failed" in decision.note


@pytest.mark.parametrize("died", [6, 40, 115])
def test_soup_342(died):
    """Runs died within 6 to 115 steps without a sign before: the alarm comes after it, and nothing is said earlier."""
    guard = KLGuard(GuardConfig(hard_ceiling=5.0), announce=False)
    rows = [{"kl_mean": 0.02 + 0.001 * (step % 3)} for step in range(1, died)] + [{"kl_mean": 30.0}] * 3
    assert feed(guard, rows).action == "halt"
    assert guard.decision.reason.step == died + 2
    assert [f for f in guard.findings if f.step < died] == []
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any("it does not predict" in path.read_text() for path in texts)


class Controller:
    """Doubles beta each time that it is asked."""

    def __init__(self):
        self.beta = 0.1

    def state_dict(self):
        return {"beta": self.beta}

    def load_state_dict(self, state):
        self.beta = state["beta"]


def test_openrlhf_1289_ray_18492():
    """An adaptive coefficient doubles to infinity: BETA_RUNAWAY; where it breaks the gradient it is the first cause."""
    guard = KLGuard(announce=False)
    beta = 0.01
    for step in range(1, 1100):
        broken = math.isinf(beta)
        decision = guard.observe(step, NAN if broken else 0.02, beta=beta, grad_norm=NAN if broken else 0.4)
        if decision:
            break
        beta *= 2
    (runaway,) = findings(guard, "BETA_RUNAWAY")
    assert runaway.severity == "warn"
    assert runaway.step < 20
    assert decision.reason.signature == "KL_NONFINITE"
    assert decision.reason.causes[0].name == "what adapts beta has lost hold of it"
    assert silent(replay([{"step": s, "kl": 0.02, "beta": 0.001 * s} for s in range(1, 300)]).findings)  # a schedule


def test_openrlhf_1289_is_restored(tmp_path):
    """The controller comes back with the rollback."""
    controller, policy = Controller(), torch.nn.Linear(2, 1)
    guard = TorchGuard(
        model=policy,
        optimizer=torch.optim.SGD(policy.parameters(), lr=0.1),
        extras={"controller": controller},
        output_dir=tmp_path,
        action="rollback",
    )
    step = guard.resume()
    while step < 20:
        step += 1
        controller.beta *= 2 if step > 10 and not guard.attempt else 1
        decision = guard.step(step, 1000.0 if step > 15 and not guard.attempt else 0.01, beta=controller.beta)
        if decision.action == "rollback":
            assert controller.beta > 1
            step = guard.rollback()
            assert controller.beta == 0.1
        elif step == 10:
            guard.save(step)
    guard.close()
    assert guard.attempt == 1


def test_trl_232_238_nemo_rl_3404_rl_games_348(tmp_path, caplog):
    """Stopping on KL, and an unknown name of a metric fails loudly and lists the keys there are."""
    rows = [{"step": step, "kl": kl, "reward": 0.1} for step, kl in enumerate(blow_up(), start=1)]
    assert replay(rows).decision.action == "halt"
    with pytest.raises(ValueError, match=r"there is no 'kl_div'; there are: kl, reward, step"):
        replay(rows, key="kl_div")
    with pytest.raises(ValueError, match=r"kl_mean='kl_div' is not logged .* there are: 'entropy', 'kl_mean'"):
        trainer_of(tmp_path, [LightningGuard(kl_mean="kl_div")], max_steps=2).fit(Policy(), loader())
    KLGuard().log(rows[0], key="kl_div")
    assert [line for line in lines(caplog) if "there is no 'kl_div'; there are: kl, reward, step" in line]
