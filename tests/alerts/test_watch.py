"""`kl-guard watch` with alerts, as a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from alert_receiver import SECRET, VALUES, receiver, run
from kl_guard import KLGuard


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"step": i, "kl": v}) + "\n" for i, v in enumerate(VALUES, start=1)))
    return path


def watch(log, *arguments, **environment):
    command = [sys.executable, "-m", "kl_guard", "watch", str(log), "--interval", "0.05", "--idle", "0.5", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


def test_each_url_hears_of_it_once(log):
    """Before the command ends; it says that nothing was stopped, since it cannot stop the run."""
    with receiver() as one, receiver() as two:
        done = watch(log, "--alert", one.url, "--alert", two.url)
        assert done.returncode == 1, done.stderr
        (post,) = one.posts
        assert two.posts == one.posts
    fired = run(KLGuard(announce=False, alerts=[])).reason.step
    assert post["title"] == f"KL_BLOWUP: critical at step {fired}"
    assert f"It was seen in {log}; kl-guard watch does not stop the run." in post["message"]
    assert SECRET not in done.stdout + done.stderr


def test_from_the_environment(log):
    """Where no other user of the machine sees it; and the command is named where there is one."""
    with receiver() as service:
        done = watch(log, "--on-critical", "true", KL_GUARD_ALERTS=service.url)
        assert done.returncode == 1, done.stderr
        (post,) = service.posts
    assert "the command given for it is run" in post["message"]


def test_a_wrong_url_is_a_usage_error(log):
    """Before anything is watched, without what it holds."""
    done = watch(log, "--alert", f"nosuch://{SECRET}")
    assert done.returncode == 2
    assert done.stderr.startswith("kl-guard: error: --alert: entry 1 of 1, which begins with 'nosuch://'")
    assert SECRET not in done.stderr
    assert done.stderr.count("\n") == 1
