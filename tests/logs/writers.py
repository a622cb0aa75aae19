"""One run, written in every format that is read."""

import csv
import gzip
import json
from pathlib import Path

from kl_guard import GuardConfig, KLGuard

Run = list[dict[str, float]]


def jsonl(path: Path, run: Run) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in run))


def jsonl_in_parts(path: Path, run: Run) -> None:
    """As trackers do that are told of a step twice; evaluations amid."""
    lines = []
    for row in run:
        lines += [{"step": row["step"], "reward": row["reward"], "loss": row["loss"]}]
        lines += [{"step": row["step"], "kl": row["kl"]}, {"step": row["step"], "eval_kl": 9.0, "eval_loss": 3.0}]
    jsonl(path, lines)


def packed(path: Path, run: Run) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in run).encode()))


def wandb_api(path: Path, run: Run) -> None:
    """Rows of `scan_history`, with W&B's own count beside the trainer's step."""
    jsonl(path, [{"_step": 3 * row["step"], "_runtime": 1.5, **_prefixed(row)} for row in run])


def _prefixed(row: dict[str, float]) -> dict[str, float]:
    return {"train/global_step" if key == "step" else f"train/{key}": value for key, value in row.items()}


def wide_csv(path: Path, run: Run) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(run[0]))
        writer.writeheader()
        writer.writerows(run)


def wandb_csv(path: Path, run: Run) -> None:
    """The export of a chart: run names in the columns, minimum and maximum beside them, everything quoted."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        names = [
            f"my-run, 2 - {name}" for name in ("actor/kl_loss", "actor/ppo_kl", "critic/score/mean", "actor/pg_loss")
        ]
        writer.writerow(["Step", *[n + end for n in names for end in ("", "__MIN", "__MAX")]])
        for row in run:
            values = [row["kl"], 0.0001, row["reward"], row["loss"]]
            writer.writerow([row["step"], *[v for value in values for v in (value, value - 1, value + 1)]])


def mlflow_csv(path: Path, run: Run) -> None:
    lines = [f"{key},{row[key]!r},{row['step']},1700000000" for key in ("kl", "reward", "loss") for row in run]
    path.write_text("\n".join(["key,value,step,timestamp", *lines]) + "\n")


def semicolons(path: Path, run: Run) -> None:
    path.write_text("\n".join([";".join(run[0]), *(";".join(map(repr, row.values())) for row in run)]) + "\n")


def console(path: Path, run: Run) -> None:
    """What transformers 4 prints, amid progress bars and other text; no steps."""
    lines = ["Loading weights: 100%|####| 3/3", "[INFO] {not a dict} at step: 7", "{'mode': 'train', 'model': 'tiny'}"]
    for row in run:
        shown = {key: value for key, value in row.items() if key != "step"} | {"epoch": 0.01}
        lines.append(f" 12%|##   | {row['step']}/80 [00:01<00:05, 1.2it/s]\r{' ' * 9}\r{shown}")
        if row["step"] % 10 == 0:
            lines.append("{'eval_loss': 0.1, 'eval_kl': 9.0, 'epoch': 0.01}")
    lines.append("{'train_runtime': 12.0, 'train_loss': 0.3, 'epoch': 1.0}")
    path.write_text("\n".join(lines) + "\n")


def console_strings(path: Path, run: Run) -> None:
    """What transformers 5 prints: every number as text."""
    path.write_text("".join(str({k: str(v) for k, v in row.items() if k != "step"}) + "\n" for row in run))


def console_with_steps(path: Path, run: Run) -> None:
    """What OpenRLHF and slime print: the step before the dictionary, numbers as numpy 2 shows them."""
    lines = [
        f"INFO Global step {row['step']}: {{'kl': np.float64({row['kl']!r}), 'reward': {row['reward']!r}, "
        f"'loss': {row['loss']!r}}}"
        for row in run
    ]
    path.write_text("starting\n" + "\n".join(lines) + "\n")


def verl_console(path: Path, run: Run) -> None:
    colour, end = "\x1b[36m", "\x1b[0m"
    lines = [
        f"{colour}(TaskRunner pid=123){end} step:{row['step']} - global_seqlen/min:5292 - "
        f"actor/kl_loss:{row['kl']!r} - actor/ppo_kl:np.float64(0.0001) - "
        f"critic/score/mean:{row['reward']!r} - actor/pg_loss:{row['loss']!r}"
        for row in run
    ]
    path.write_text("(TaskRunner pid=123) hello\n" + "\n".join(lines) + "\n")


def state_of(run: Run) -> str:
    history = [
        *run,
        {"eval_loss": 0.1, "eval_kl": 9.0, "step": 80},
        {"train_loss": 0.1, "train_runtime": 3, "step": 80},
    ]
    return json.dumps({"best_metric": None, "log_history": history, "global_step": 80}, indent=2, sort_keys=True)


def trainer_state(path: Path, run: Run) -> None:
    path.write_text(state_of(run))


def checkpoint(path: Path, run: Run) -> None:
    path.mkdir()
    (path / "trainer_state.json").write_text(state_of(run))


def output_dir(path: Path, run: Run) -> None:
    """The newest of several checkpoints counts."""
    checkpoint(path, run)
    (path / "trainer_state.json").rename(path / "aside")
    for step, upto in ((9, 9), (80, len(run)), (10, 10)):
        (path / f"checkpoint-{step}").mkdir()
        (path / f"checkpoint-{step}" / "trainer_state.json").write_text(state_of(run[:upto]))


def journal(path: Path, run: Run) -> None:
    guard = KLGuard(GuardConfig(action="warn"), output_dir=path.parent / "out", announce=False)
    for row in run:
        guard.observe(row["step"], row["kl"], reward=row["reward"], loss=row["loss"])
    guard.close()
    (path.parent / "out" / "kl_guard" / "journal.jsonl").rename(path)


def events(path: Path, run: Run) -> None:
    """A folder of TensorBoard, as transformers leaves it, with the folder of an older run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name, rows in (("older", run[:5]), ("runs", run)):
        writer = EventFileWriter(str(path / name))
        for row in rows:
            values = [Summary.Value(tag=f"train/{key}", simple_value=v) for key, v in row.items() if key != "step"]
            writer.add_event(Event(step=int(row["step"]), summary=Summary(value=values)))
        writer.close()


WRITERS = {
    function.__name__: function
    for function in (
        jsonl,
        jsonl_in_parts,
        packed,
        wandb_api,
        wide_csv,
        wandb_csv,
        mlflow_csv,
        semicolons,
        console,
        console_strings,
        console_with_steps,
        verl_console,
        trainer_state,
        checkpoint,
        output_dir,
        journal,
        events,
    )
}
