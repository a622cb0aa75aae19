"""Reported values that are no numbers: NaN, missing, zero, negative, clamped."""

import math

import pytest
import torch
from transformers import TrainerControl, TrainerState

from field_runs import NAN, batch, feed, findings, lines, silent, start
from kl_guard import GuardConfig, KLGuard, replay
from kl_guard.tokens import per_token_kl, summarize_tokens
from kl_guard_torch import TorchGuard
from kl_guard_trl import KLGuardCallback
from trl import KTOConfig

SOUND = {"kl_mean": 0.02, "grad_norm": 0.4, "loss": 0.01}
BROKEN = {"kl_mean": NAN, "grad_norm": NAN, "loss": NAN}


def test_agent_r1_30_verl_751_747_2626_1581(tmp_path):
    """Finite to step 82, then all NaN for ever and every reward -1: halted at 83, and nothing is saved after it."""
    model = torch.nn.Linear(2, 2)
    guard = TorchGuard(model=model, optimizer=torch.optim.AdamW(model.parameters()), output_dir=tmp_path)
    guard.resume()
    for step in range(1, 91):
        row = {**SOUND, "reward": 0.4} if step <= 82 else {**BROKEN, "entropy": NAN, "reward": -1.0}
        decision = guard.step(step, **row)
        if step % 10 == 0:
            guard.save(step)
    guard.close()
    assert (decision.reason.signature, decision.reason.step) == ("KL_NONFINITE", 83)
    assert decision.reason.severity == "critical"
    assert (tmp_path / "checkpoint-80").is_dir()
    assert not (tmp_path / "checkpoint-90").exists()


def test_agent_r1_30_by_verls_names():
    """The same as verl logs it."""
    guard = KLGuard(announce=False)
    for step in range(1, 90):
        kl = 0.02 if step <= 82 else NAN
        log = {
            "actor/kl_loss": kl,
            "actor/entropy": kl,
            "actor/grad_norm": kl,
            "critic/score/mean": 0.4 if kl == kl else 0,
        }
        decision = guard.log(log, step)
        if decision:
            break
    assert (decision.action, step, decision.reason.signature) == ("halt", 83, "KL_NONFINITE")


def test_verl_747(tmp_path):
    """Resumed with other settings it is NaN at exactly the same step: no second rollback, and leave that batch out."""
    guard = KLGuard(GuardConfig(action="rollback", max_rollbacks=5), announce=False, output_dir=tmp_path)
    for step in range(1, 83):
        guard.observe(step, **SOUND)
        if step % 20 == 0:
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "weights").write_text("w")
            guard.checkpoint_saved(step, folder)
    assert guard.observe(83, **BROKEN).action == "rollback"
    back = guard.go_back().step
    assert back == 80
    guard.rolled_back(back)
    assert feed(guard, [{**SOUND, "learning_rate": 1e-7}] * 2, first=81).action == "continue"
    again = guard.observe(83, **BROKEN)
    assert again.action == "halt"
    assert "Look at that batch (and leave it out)" in again.note
    guard.close()


def test_ms_swift_4465_unsloth_zoo_1262_trl_3248():
    """KL NaN on and off while loss, gradient and reward are finite, a fully masked batch: KL_MISSING, no halt."""
    masked = {"loss": -0.037, "grad_norm": 0.006, "reward": 1.55, "kl_mean": NAN}
    guard = KLGuard(announce=False)
    assert feed(guard, [SOUND] * 299 + [masked, SOUND, masked, masked, SOUND] * 20).action == "continue"
    assert [(f.signature, f.severity.value, f.step) for f in guard.findings] == [("KL_MISSING", "info", 300)]
    assert "masked" in guard.findings[0].message


def test_trl_6702_6771(tmp_path, caplog):
    """The trainer puts a running mean in the place of a NaN loss: said at the start, and a loss proves nothing."""
    assert [line for line in start(tmp_path, caplog) if "logging_nan_inf_filter is on" in line]
    guard = KLGuard(announce=False)
    decision = feed(guard, [SOUND] * 30 + [{"kl_mean": NAN, "grad_norm": NAN, "loss": 0.01}])
    assert decision.reason.signature == "KL_NONFINITE"
    assert feed(KLGuard(announce=False), [SOUND] * 30 + [{**SOUND, "grad_norm": NAN}] * 3).action == "halt"


@pytest.mark.parametrize("value", [NAN, None])
def test_trl_6693(value):
    """NaN passes `r < low or r > high`: it is never within limits nor beyond them, and a missing value is no 0."""
    guard = KLGuard(GuardConfig(hard_ceiling=5.0, kl_kind="k1"), announce=False)
    feed(guard, [{"kl_mean": value, "loss": 0.1, "grad_norm": 0.3}] * 60)
    assert {f.signature for f in guard.findings} == {"KL_MISSING"}
    # A hole among values above the ceiling is no value below it, and none above.
    holed = [{"kl_mean": kl} for kl in (0.1, 6.0, 6.0, value, 6.0)]
    assert feed(KLGuard(GuardConfig(hard_ceiling=5.0), announce=False), holed[:4]).action == "continue"
    # As a 0, a hole in each second step would pull the baseline down and make growth of a plateau.
    plateau = [kl for step in range(60) for kl in (0.9 + 0.001 * step, value)]
    assert silent([f for f in replay(plateau).findings if f.signature != "KL_MISSING" and f.signature[:3] == "KL_"])


def test_r1_v_69():
    """Step 1: KL .00072, gradient and spread of rewards NaN: halted, and there is nothing to go back to."""
    guard = KLGuard(GuardConfig(action="rollback"), announce=False)
    decision = guard.observe(1, 0.00072, grad_norm=NAN, reward_std=NAN)
    assert decision.action == "halt"
    assert decision.checkpoint is None
    assert "there is no checkpoint from before the departure" in decision.note
    assert decision.reason.evidence.keys() >= {"grad_norm", "reward_std"}


def test_trl_3015_5984_6549_6637_openrlhf_1335():
    """The exp of a log-ratio above 88 leaves float32: the log-ratio is kept, and inf is called inf."""
    policy, reference, mask, ids = batch(0)
    policy[0, 0], reference[0, 0] = -95.0, -5.0
    stats = summarize_tokens(policy, reference, mask, ids).read()
    assert stats.log_ratio_max == pytest.approx(90)
    assert (stats.infs, stats.kl_max > 1e38) == (1, True)
    policy[0, 0] = -math.inf
    guard = KLGuard(announce=False)
    for step in range(1, 4):
        decision = guard.observe(step, tokens=summarize_tokens(policy, reference, mask, ids))
    assert guard.history[0].kl_mean == guard.history[0].log_ratio_extreme == math.inf
    assert decision.reason.signature == "KL_NONFINITE"
    assert "kl_mean is inf" in decision.reason.message


def test_trl_3015_clipped_after_exp():
    """Clipped after exp, KL is finite and its gradient NaN: ours is clipped before, and such a gradient is halted."""
    policy = torch.tensor([[-95.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-5.0, -1.1]])
    torch.clamp(torch.exp((reference - policy) * 10) - 1 - (reference - policy), max=10).sum().backward()
    assert not torch.isfinite(policy.grad).all()
    policy.grad = None
    kl = per_token_kl(policy, reference, "k3", log_ratio_clip=20.0)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(policy.grad).all()
    clipped = [{"kl_mean": 0.3, "kl_max": 10.0, "grad_norm": NAN}] * 3
    assert feed(KLGuard(announce=False), [SOUND] * 20 + clipped).reason.signature == "KL_NONFINITE"


def test_trl_4040_open_r1_704(tmp_path, caplog):
    """Beta 0, the default: no reference and no `kl`, so a blow-up cannot be seen. Said at the start, with the probe."""
    said = [line for line in start(tmp_path, caplog) if "beta is 0: there is no reference model" in line]
    assert len(said) == 1
    assert "a blow-up cannot be seen" in said[0]
    assert "probe='auto'" in said[0]
    assert [r.levelname for r in caplog.records if r.getMessage() == said[0]] == ["WARNING"]


def test_ms_swift_5571_5890_7229_lmm_r1_8():
    """KL 0.0 and gradient 0.0 while rewards vary: KL_FROZEN, a warning."""
    guard = KLGuard(announce=False)
    feed(guard, [{"kl_mean": 0.0, "grad_norm": 0.0, "reward_std": 0.3, "learning_rate": 1e-6}] * 20)
    assert [(f.signature, f.severity.value) for f in guard.findings] == [("KL_FROZEN", "warn")]


def test_marinfold_237_control():
    """Learning rate 0: KL exactly 0 for 8 steps. No crash, no alarm."""
    guard = KLGuard(announce=False)
    rows = [{"kl_mean": 0.0, "grad_norm": 0.4, "reward": 0.1 * (step % 3), "learning_rate": 0.0} for step in range(8)]
    feed(guard, rows)
    assert guard.findings == []
    assert guard.level == 0


def test_trl_1005_925_1161_llamafactory_664():
    """-0.3 is noise of k1; -1.5, -2.44, -5.27 and -233.5 that last are not; k3 is never below 0."""
    k1 = GuardConfig(kl_kind="k1")
    assert replay([0.0] + [-0.3, 0.2, 0.1] * 30, k1).findings == ()
    for value in (-1.5, -2.44, -5.27, -233.5):
        (finding,) = replay([0.0] * 5 + [value] * 15, k1).findings
        assert (finding.signature, finding.severity, finding.step) == ("KL_NEGATIVE", "warn", 15)
        assert finding.onset_step == 6
    (impossible,) = findings_of_k3 = [f for f in replay([0.1, -0.3], GuardConfig(kl_kind="k3")).findings if f.step == 2]
    assert impossible.signature == "KL_NEGATIVE"
    assert "k3 cannot be negative" in impossible.message
    assert len(findings_of_k3) == 1


def test_verl_1779_ms_swift_8464():
    """Log-ratios clamped to +-20 and k3 to +-10 before the mean: the maximum sits at its ceiling, and is hidden."""
    guard = KLGuard(announce=False)
    for step in range(1, 21):
        log_ratio = (20 * torch.randn(64, generator=torch.Generator().manual_seed(step))).clamp(-20, 20)
        kl = (torch.exp(log_ratio) - 1 - log_ratio).clamp(-10, 10)
        guard.observe(step, 0.1, kl_max=kl.max())
    (finding,) = findings(guard, "KL_SATURATED")
    assert finding.severity == "info"
    assert finding.evidence["ceiling"] == 10


def test_halos_24(tmp_path, caplog):
    """KTO's "kl" of .108, .0655, 0.0 is another quantity: not watched, by the callback or by name."""
    values = [0.108, 0.0655, 0.0] + [1e6] * 40  # whatever it becomes
    guard = KLGuardCallback()
    args = KTOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    state, control = TrainerState(), TrainerControl()
    guard.on_train_begin(args, state, control)
    for step, kl in enumerate(values, start=1):
        state.global_step, control.should_log = step, True
        guard.on_step_end(args, state, control)
        guard.on_log(args, state, control, logs={"loss": 0.1, "kl": kl})
    assert not control.should_training_stop
    assert [line for line in lines(caplog) if "it is not watched" in line]
    core = KLGuard(announce=False)
    for step, kl in enumerate(values, start=1):
        core.log({"kl": kl, "logps/chosen": -50.0, "loss": 0.1}, step)
    assert core.source is None
    assert {f.signature for f in core.findings} == {"KL_MISSING"}
