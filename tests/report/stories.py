"""Runs to report on."""

from __future__ import annotations

from kl_guard import GuardConfig, KLGuard

HOSTILE = [
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\u202eright to left\u202c",
    "\x00\x1b[2J\x07",
    '" onmouseover="alert(1)',
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;",
    "x" * 10_000,
]


def run_into_trouble(folder, action="halt", **more):
    """A run that blows up, with checkpoints; return the guard."""
    guard = KLGuard(GuardConfig(action=action), output_dir=folder, announce=False, **more)
    for step in range(1, 80):
        decision = guard.observe(step, 0.02 * 1.6 ** max(0, step - 40), reward=0.01 * step, learning_rate=1e-6)
        if decision:
            break
        if step % 10 == 0:
            (folder / f"checkpoint-{step}").mkdir(parents=True)
            (folder / f"checkpoint-{step}" / "weights.bin").write_bytes(b"weights")
            guard.checkpoint_saved(step, folder / f"checkpoint-{step}")
    guard.checkpoints.wait()
    return guard
