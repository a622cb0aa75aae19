"""How the processes of a run come to one decision."""

from __future__ import annotations

from dataclasses import replace

from kl_guard import Decision, Finding, KLGuard
from kl_guard_torch import ranks
from kl_guard_torch.faults import Faults


def settle(guard: KLGuard | None, decision: Decision, faults: Faults) -> tuple[Decision, bool]:
    """Return the decision of the run, and whether it is a rollback that rank 0 leads.

    On all ranks, after all have agreed that one of them wants to stop. A rank without a reason takes over that of the
    first rank that has one. Rank 0 has the pins; where its guard is broken, the run halts, and the first rank that
    knows a way back by hand says so.
    """
    reason = decision.reason
    try:
        told = [r for r in ranks.gather(reason.to_dict() if reason else None) if r is not None]
        if reason is None and told:
            decision = faults.guarded(_adopt, guard, Finding.from_dict(told[0])) or decision
        decisions = ranks.gather(decision)
    except Exception:
        faults.fault("sharing the reason for the halt")
        return decision or Decision("halt"), False
    other = next((d for d in decisions if d.checkpoint), next((d for d in decisions if d), Decision()))
    leading = decisions[0] or replace(other, action="halt")
    return replace(leading, findings=decision.findings), leading.action == "rollback"


def _adopt(guard: KLGuard | None, reason: Finding) -> Decision:
    decision = Decision("halt", (), None, reason)
    if guard is not None:
        guard.adopt(reason)
        decision = guard.decision or decision
    return decision
