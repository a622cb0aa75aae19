"""A scaled learning rate lasts, whatever the schedule, and through a checkpoint."""

import pytest

torch = pytest.importorskip("torch")
from torch.optim import lr_scheduler as schedules  # noqa: E402

from kl_guard import learning_rate  # noqa: E402

SCHEDULES = {
    "none": lambda o: None,
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "steps": lambda o: schedules.StepLR(o, 4, 0.5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 20),
    "linear": lambda o: schedules.LinearLR(o, 0.1, 1.0, 8),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=2),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.ExponentialLR(o, 0.9)], [5]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=40, cycle_momentum=False),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=4, cycle_momentum=False),
}


def build(schedule, groups=2):
    """An optimizer with two groups of different rates, and its scheduler."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(groups)]
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)])
    return parameters, optimizer, SCHEDULES[schedule](optimizer)


def advance(parameters, optimizer, scheduler, steps):
    """Train; return the rates in force at each step."""
    seen = []
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.ones_like(p)
        seen.append(learning_rate.rates(optimizer))
        optimizer.step()
        if isinstance(scheduler, schedules.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("through_a_checkpoint", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_later_step_is_scaled(schedule, through_a_checkpoint):
    """At once and to the end; a checkpoint saved afterwards holds it."""
    usual = advance(*build(schedule), 16)
    parameters, optimizer, scheduler = build(schedule)
    before = advance(parameters, optimizer, scheduler, 6)
    learning_rate.scale(optimizer, scheduler, 0.25)
    if through_a_checkpoint:
        states = optimizer.state_dict(), scheduler and scheduler.state_dict()
        parameters, optimizer, scheduler = build(schedule)
        optimizer.load_state_dict(states[0])
        if scheduler is not None:
            scheduler.load_state_dict(states[1])
    after = advance(parameters, optimizer, scheduler, 10)
    assert before == usual[:6]
    for now, was in zip(after, usual[6:], strict=True):
        assert now == pytest.approx([0.25 * rate for rate in was])


def test_wrapped_schedulers_and_logged_rates():
    """Accelerate hands out a wrapper; what is logged next is `get_last_lr`."""
    _, optimizer, scheduler = build("lambda")
    wrapper = type("Wrapper", (), {"scheduler": scheduler})()
    learning_rate.scale(optimizer, wrapper, 0.5)
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.1])
    assert learning_rate.base_rates(wrapper) == pytest.approx([0.05, 0.1])
    assert learning_rate.base_rates(None) == []
