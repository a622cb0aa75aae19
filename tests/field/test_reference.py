"""Reported references and measurements: what KL is measured against, and over which tokens."""

import copy
import random

import pytest
import torch

from field_runs import batch, feed, findings, silent
from kl_guard import GuardConfig, KLGuard
from kl_guard.tokens import summarize_tokens
from kl_guard_torch import TorchGuard


def mismatch(first_kl, facts=None, step=1):
    """The guard of a run that begins with this KL, and the finding about its reference."""
    guard = KLGuard(GuardConfig(action="rollback"), announce=False)
    guard.note(facts or {})
    guard.observe(step, first_kl)
    found = findings(guard, "REFERENCE_MISMATCH")
    return guard, found[0] if found else None


@pytest.mark.parametrize("first_kl", [2300.0, 0.86])  # "in the thousands"; .86 nats per token
def test_trl_3500_reef_536(first_kl):
    """Dropout was on: REFERENCE_MISMATCH at step 1, which names it, and no checkpoint is better."""
    _, finding = mismatch(first_kl, {"dropout": "model.layers.0.self_attn (p = 0.1)"})
    assert finding.severity == "warn"
    assert finding.causes[0].name == "dropout is on while log-probs are computed"
    assert "model.layers.0.self_attn (p = 0.1)" in finding.causes[0].evidence


@pytest.mark.parametrize(("training", "named"), [(True, True), (False, False)])
def test_reef_536_in_a_loop_of_ones_own(training, named):
    """A module in training mode that drops out is named; in evaluation mode it is not."""
    policy = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1)).train(training)
    guard = TorchGuard(model=policy)
    guard.step(1, 0.86)
    (finding,) = findings(guard.guard, "REFERENCE_MISMATCH")
    said = [
        cause.evidence for cause in finding.causes if cause.name == "dropout may be on while log-probs are computed"
    ]
    assert [text.startswith("in training mode: 1 (p = 0.1)") for text in said] == [True] * named


def test_trl_3194_1340_495_4723_ms_swift_6910():
    """With its adapter off the model is the base, not the fine-tuned policy: said at step 1, with the adapter."""
    _, finding = mismatch(0.4, {"adapter": "the adapter was not empty at the start (q_proj and 3 more were not 0)"})
    assert finding.severity == "warn"
    assert finding.causes[0].name == "the reference is the base model without the adapter that the policy started from"


def test_marinfold_208_sharded():
    """1.33 nats at step 0 sharded: REFERENCE_MISMATCH, which blocks a rollback. .017 unsharded: nothing."""
    guard, finding = mismatch(1.33, step=0)
    assert finding.severity == "warn"
    assert "policy and reference are not scored alike" in {cause.name for cause in finding.causes}
    guard.observe(1, 1.4)
    assert guard._panel.wrong_from_the_start
    assert mismatch(0.017, step=0)[1] is None


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_rlinf_470_tinker_22(noise):
    """Engine noise at the first update: silent, and the baseline absorbs it."""
    rng = random.Random(0)
    guard = KLGuard(announce=False)
    feed(guard, [{"kl_mean": noise * rng.uniform(0.8, 1.2)} for _ in range(200)])
    assert guard.findings == []


def test_nemo_rl_2955_3048_3722(tmp_path):
    """The reference is captured after the checkpoint is loaded, so each resume sets KL to about 0: REFERENCE_RESET."""
    before = KLGuard(output_dir=tmp_path, announce=False)
    feed(before, [{"kl_mean": 0.2}] * 60)
    before.close()
    after = KLGuard(output_dir=tmp_path, announce=False)
    after.resumed(50)
    feed(after, [{"kl_mean": kl} for kl in (0.0, 0.0008, 0.001)], first=51)
    (finding,) = findings(after, "REFERENCE_RESET")
    assert (finding.severity, finding.step) == ("warn", 53)
    after.close()


class Drifting:
    """A policy that leaves its reference by as much as `rate` says, measured over tokens as they are."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.policy = torch.nn.Linear(6, 12)
        self.reference = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.02)
        self.guard = TorchGuard(
            model=self.policy,
            optimizer=self.optimizer,
            output_dir=folder,
            action="rollback",
            hard_ceiling=3.0,
        )
        self.x = torch.randn(64, 6)
        self.ids = torch.randint(0, 12, (64, 1))

    def step(self, step, push=1.0):
        loss = -push * self.scores(self.policy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            policy, reference = self.scores(self.policy), self.scores(self.reference)
        return self.guard.step(
            step, policy_logprobs=policy, ref_logprobs=reference, mask=torch.ones_like(policy, dtype=torch.bool)
        )

    def scores(self, model):
        return torch.log_softmax(model(self.x), -1).gather(1, self.ids)


def test_nemo_rl_2955_our_own_rollback(tmp_path):
    """A rollback of ours does not: the reference is the one of before, and KL goes on where it was recorded."""
    run = Drifting(tmp_path)
    reference = copy.deepcopy(run.reference.state_dict())
    run.guard.resume()
    step = 0
    while step < 60:
        step += 1
        decision = run.step(step, push=1.0 if step <= 40 or run.guard.attempt else -400.0)
        if decision.action == "rollback":
            recorded = {o.step: o.kl_mean for o in run.guard.guard.history}
            step = run.guard.rollback()
            first = run.step(step + 1)
            assert not first
            step += 1
            assert run.guard.guard.history[-1].kl_mean == pytest.approx(recorded[step], rel=0.2)
        elif step % 10 == 0:
            run.guard.save(step)
    run.guard.close()
    assert run.guard.attempt == 1
    assert all(torch.equal(reference[name], value) for name, value in run.reference.state_dict().items())
    assert not findings(run.guard.guard, "REFERENCE_RESET")


@pytest.mark.parametrize("restored", [True, False])
def test_slime_2224_1695(tmp_path, restored):
    """KL and gradient spike for 2 to 3 steps after a resume, then recover: no rollback, no second one."""
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    (folder / "weights").write_text("w")
    calm = {"kl_mean": 0.03, "grad_norm": 0.3}  # without noise each spike is a trend
    feed(guard, [calm] * 40)
    guard.checkpoint_saved(40, folder)
    feed(guard, [calm] * 5, first=41)
    if restored:
        assert feed(guard, [{"kl_mean": 500.0}] * 3, first=46).action == "rollback"
        guard.rolled_back(guard.go_back().step)
    else:
        guard.resumed(40)
    spike = [{"kl_mean": 150.0, "grad_norm": 90.0}] * 3
    assert feed(guard, spike + [calm] * 40, first=41).action == "continue"
    assert guard.attempt == int(restored)
    guard.close()


def shifted(seed, rows=100, wrong=2):
    """The summary of a batch in which the reference scored `wrong` rows with their ids shifted by one."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference, mask, ids = batch(seed, rows=rows, scale=0.24)  # a KL of .028
    reference[:wrong] = policy[:wrong] - 61 - 5 * torch.rand(wrong, policy.shape[1], generator=generator)
    return summarize_tokens(policy, reference, mask, ids)


def test_eval_protocol_457(tmp_path):
    """KL of 60 on 1 to 2 % of rows against .028: these rows share a fault, and going back cannot help."""
    guard = KLGuard(GuardConfig(action="rollback"), announce=False)
    guard.observe(1, tokens=shifted(1))
    assert guard.history[0].kl_mean == pytest.approx(0.02 * 62 + 0.98 * 0.028, rel=0.05)
    (finding,) = findings(guard, "REFERENCE_MISMATCH")
    assert finding.causes[0].name == "a few completions are scored wrongly, the others are not"
    assert finding.causes[0].evidence.startswith("2 of 100 completions carry the KL")
    assert finding.causes[0].remedy.endswith("Going back cannot help")


def test_eval_protocol_457_from_some_step_on(tmp_path):
    """Where it begins later it is halted, not gone back from."""
    guard = KLGuard(GuardConfig(action="rollback"), output_dir=tmp_path, announce=False)
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "weights").write_text("w")
    for step in range(1, 100):
        decision = guard.observe(step, tokens=shifted(step, wrong=0 if step <= 40 else 1 + step // 60))
        if step == 10:
            guard.checkpoint_saved(10, folder)
        if decision:
            break
    guard.close()
    assert decision.action == "halt"
    assert "of 100 completions carry the KL and the others do not" in decision.note


def test_trl_2933_6667():
    """The end of text has 100 times the KL of content while all is well: by id, and KL without it is reported."""
    guard = KLGuard(announce=False)
    for step in range(1, 31):
        policy, reference, mask, ids = batch(step, scale=0.1)  # a KL of .005
        ids[:, -1] = 2
        reference[:, -1] = policy[:, -1] + 0.85  # and one of .5
        decision = guard.observe(step, tokens=summarize_tokens(policy, reference, mask, ids, special_ids=[2]))
    assert decision.action == "continue"
    latest = guard.outliers.latest
    assert latest.kl_without_special == pytest.approx(0.005, rel=0.2)
    assert latest.kl_token_mean > 2 * latest.kl_without_special
    assert guard.outliers.ids()[0].token_id == latest.id_of_share == 2
    assert guard.outliers.ids()[0].steps == 30
    assert silent(guard.findings)


def test_slime_1370_trl_5144_4974():
    """Tool responses and padding count by the mask that is given, also where padding is the end of text."""
    policy, reference, _, ids = batch(0, rows=1, width=10, scale=0.0)
    end = pad = 2
    ids[0, 5:] = pad  # the end of text at 5, padding behind it
    reference[0, 2:4] -= 8.0  # a tool's response
    reference[0, 5] -= 1.0
    reference[0, 6:] -= 30.0
    mask = torch.tensor([[True] * 2 + [False] * 2 + [True] * 2 + [False] * 4])
    options = {"pad_token_id": pad, "eos_token_ids": [end]}
    given = summarize_tokens(policy, reference, mask, ids, **options).read()
    assert (given.tokens, given.padding) == (4, 0)
    assert [outlier.position for outlier in given.outliers] == [5]  # the end itself counts
    with pytest.raises(TypeError):
        summarize_tokens(policy, reference, token_ids=ids)
    guard = KLGuard(announce=False)
    for step in range(1, 4):
        guard.observe(step, tokens=summarize_tokens(policy, reference, torch.ones_like(mask), ids, **options))
    (finding,) = findings(guard, "PADDING_IN_MASK")
    assert finding.evidence["padding"] == 4
