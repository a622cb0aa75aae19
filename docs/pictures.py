"""Draws the pictures of the documentation from the recorded runs in `docs/data`, with what the guard says of them.

    python docs/pictures.py               # writes docs/img/*.svg
    python docs/pictures.py --png FOLDER  # as PNG, to look at them

Every mark is what `kl_guard` finds when it is fed the recorded rows; nothing is drawn in by hand.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kl_guard import Finding, GuardConfig, KLGuard, Observation

HERE = Path(__file__).parent
DATA = HERE / "data"
IMAGES = HERE / "img"

KL, MAX, OTHER = "#0550ae", "#8250df", "#57606a"
GOOD, ONSET, BAD = "#116329", "#9a6700", "#b3261e"
INK, SOFT = "#1b1f24", "#57606a"
NAMES = {
    "kl_mean": "KL mean",
    "kl_max": "KL max",
    "reward": "reward",
    "reward_std": "reward std",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "beta": "beta",
    "padding": "padding tokens\ncounted",
    "id_share": "share on\none token id",
    "top_share": "share on a\nthousandth",
    "reference_checksum": "checksum of\nthe reference",
}
_ATTRIBUTE = re.compile(r' (?:d|x|y|x1|x2|y1|y2|width|height|transform)="[^"]*"')
_NUMBER = re.compile(r"\d+\.\d{3,}")
Row = dict[str, float]


@dataclass(frozen=True)
class Panel:
    """One set of axes: the metrics it shows, and how."""

    metrics: Sequence[str]
    log: bool = False
    thresholds: bool = False
    lines: dict[float, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """What is drawn of a run, and which signature the run shows."""

    signature: str
    panels: Sequence[Panel]
    run: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    """Another run, drawn thin behind this one."""
    attempts: Sequence[str] = ("this run",)


LOG_KL = Panel(["kl_mean"], log=True)
TRIES = ("attempt 0", "attempt 1")
RISE = Panel(["kl_mean"], log=True, thresholds=True)
PICTURES: dict[str, Picture] = {
    "kl_blowup": Picture("KL_BLOWUP", [RISE, Panel(["reward"]), Panel(["learning_rate"], log=True)], beside="healthy"),
    "kl_growth": Picture("KL_GROWTH", [RISE, Panel(["reward"])]),
    "kl_nonfinite": Picture("KL_NONFINITE", [LOG_KL, Panel(["grad_norm"])]),
    "kl_missing": Picture("KL_MISSING", [Panel(["kl_mean"], note="no KL is logged"), Panel(["reward"])]),
    "kl_frozen": Picture("KL_FROZEN", [Panel(["kl_mean"]), Panel(["grad_norm"]), Panel(["reward"])]),
    "kl_negative": Picture(
        "KL_NEGATIVE", [Panel(["kl_mean"], lines={-1.0: "-1 nat"}), Panel(["reward"])], config={"kl_kind": "k1"}
    ),
    "kl_saturated": Picture("KL_SATURATED", [Panel(["kl_max", "kl_mean"]), Panel(["reward"])]),
    "kl_plateau": Picture("KL_PLATEAU", [Panel(["kl_mean"], lines={1.0: "plateau_level"}), Panel(["reward"])]),
    "kl_spikes": Picture(
        "KL_SPIKES", [Panel(["kl_max", "kl_mean"], log=True, lines={0.5: "abs_floor"}), Panel(["reward"])]
    ),
    "beta_runaway": Picture("BETA_RUNAWAY", [Panel(["beta"], log=True), LOG_KL, Panel(["grad_norm"], log=True)]),
    "reference_mismatch": Picture("REFERENCE_MISMATCH", [Panel(["kl_mean"], lines={0.1: "0.1"})], beside="healthy"),
    "reference_changed": Picture("REFERENCE_CHANGED", [Panel(["kl_mean"]), Panel(["reference_checksum"])]),
    "reference_reset": Picture(
        "REFERENCE_RESET", [Panel(["kl_mean"]), Panel(["reward"])], attempts=("before", "resumed")
    ),
    "restored_kl_high": Picture("RESTORED_KL_HIGH", [LOG_KL], config={"action": "rollback"}, attempts=TRIES),
    "token_outlier": Picture("TOKEN_OUTLIER", [Panel(["kl_max", "kl_mean"], log=True), Panel(["top_share"])]),
    "ref_policy_drift_asymmetry": Picture(
        "REF_POLICY_DRIFT_ASYMMETRY",
        [Panel(["kl_mean"], lines={0.1: "0.1"}), Panel(["id_share"])],
    ),
    "padding_in_mask": Picture("PADDING_IN_MASK", [LOG_KL, Panel(["padding"])], config={"action": "warn"}),
    "entropy_collapse": Picture("ENTROPY_COLLAPSE", [Panel(["entropy"], lines={0.25: "0.25"}), LOG_KL]),
    "rollback": Picture("KL_BLOWUP", [RISE, Panel(["learning_rate"], log=True)], beside="unguarded", attempts=TRIES),
}


@lru_cache
def rows_of(run: str) -> list[Row]:
    """Return the recorded rows of a run; empty cells are left out."""
    with (DATA / f"{run}.csv").open(newline="") as file:
        return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]


def findings_of(name: str) -> list[Finding]:
    """Return what the guard says about the run of a picture, fed row by row.

    Where the attempt changes, the run was resumed or taken back there, and the guard is told so.
    """
    config = GuardConfig(**PICTURES[name].config)
    rows = rows_of(PICTURES[name].run or name)
    guard = KLGuard(config, rank=0, expected_observations=len(rows), announce=False)
    findings: list[Finding] = []
    attempt = 0.0
    for row in rows:
        step = int(row["step"])
        if row.get("attempt", 0.0) != attempt:
            attempt = row["attempt"]
            if config.action == "rollback" or name == "rollback":
                guard.rolled_back(step - 1)
            else:
                guard.resumed(step - 1)
        metrics = {key: value for key, value in row.items() if key not in ("step", "attempt")}
        findings += guard.take(Observation.from_mapping(metrics, step)).findings
    return findings


def finding_of(name: str) -> Finding:
    """Return the finding that a picture is about: the first of its signature."""
    return next(f for f in findings_of(name) if f.signature == PICTURES[name].signature)


def caption(name: str) -> str:
    """Return what is marked in a picture, in words; the file of the picture holds it too."""
    finding = finding_of(name)
    marks = {"departure": finding.departure_step, "onset": finding.onset_step, "said": finding.step}
    where = ", ".join(f"{what} {step}" for what, step in marks.items() if step is not None)
    return f"{finding.signature} ({finding.severity}): {where}"


def draw(name: str, path: Path) -> None:
    """Draw one picture into a file; its suffix says which kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    picture = PICTURES[name]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kl-guard",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": "#afb8c1",
        "axes.labelcolor": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.use_mathtext": False,
    }
    with mpl.rc_context(style):
        heights = [2.4] + [1.0] * (len(picture.panels) - 1)
        figure, axes = plt.subplots(
            len(heights),
            1,
            sharex=True,
            squeeze=False,
            figsize=(7.6, 0.75 + sum(heights)),
            height_ratios=heights,
            layout="constrained",
        )
        finding = finding_of(name)
        steps = [row["step"] for row in rows_of(picture.run or name)]
        room = 0.02 * (max(steps) - min(steps))
        axes[0, 0].set_xlim(min(steps) - room, max(steps) + room)
        for place, (panel, area) in enumerate(zip(picture.panels, axes[:, 0], strict=True)):
            _fill(area, panel, picture, name)
            _mark(area, finding, panel, named=place == 0)
        axes[-1, 0].set_xlabel("step")
        figure.align_ylabels()
        metadata = {"Date": None, "Title": picture.signature, "Description": caption(name)}
        figure.savefig(path, dpi=110, metadata=metadata if path.suffix == ".svg" else None)
        plt.close(figure)
    if path.suffix == ".svg":
        path.write_text(_ATTRIBUTE.sub(lambda found: _NUMBER.sub(_rounded, found[0]), path.read_text()))


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def _fill(area: Any, panel: Panel, picture: Picture, name: str) -> None:
    """Draw the curves of a panel."""
    rows = rows_of(picture.run or name)
    attempts = sorted({row.get("attempt", 0.0) for row in rows})
    several = len(panel.metrics) > 1
    for metric in panel.metrics:
        colour = MAX if metric == "kl_max" else KL if metric == "kl_mean" else OTHER
        if picture.beside and metric in ("kl_mean", "reward"):
            behind = rows_of(picture.beside)
            area.plot(*_points(behind, metric, panel.log), color="#8c959f", linewidth=1, label=picture.beside)
        for attempt in attempts:
            points = _points([row for row in rows if row.get("attempt", 0.0) == attempt], metric, panel.log)
            label = NAMES[metric].replace("\n", " ") if several else picture.attempts[int(attempt)]
            line = "-" if attempt == attempts[-1] else "--"
            area.plot(*points, color=colour, linewidth=1.6, label=label, linestyle=line)
        broken = {row["step"]: row[metric] for row in rows if not math.isfinite(row.get(metric, 0.0))}
        if broken:
            first = next(iter(broken))
            area.plot([*broken], [0.06] * len(broken), "x", color=BAD, transform=area.get_xaxis_transform())
            area.annotate(
                "NaN" if math.isnan(broken[first]) else "infinite",
                (first, 0.06),
                xycoords=("data", "axes fraction"),
                xytext=(-7, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                color=BAD,
                fontsize=8.5,
            )
    if panel.log:
        area.set_yscale("log")
    if panel.note:
        area.text(0.5, 0.5, panel.note, transform=area.transAxes, ha="center", va="center", color=SOFT)
        area.set_yticks([])
    for height, text in panel.lines.items():
        _level(area, height, text, ONSET)
    area.set_ylabel(" / ".join(NAMES[metric] for metric in panel.metrics[-1:]) if not several else "KL")
    if (several or picture.beside or len(attempts) > 1) and "kl_mean" in panel.metrics:
        area.legend(frameon=False, fontsize=8, loc="lower right" if panel.log else "best")
    area.margins(x=0.02)


def _points(rows: Sequence[Row], metric: str, log: bool) -> tuple[list[float], list[float]]:
    """Return steps and values; where there is none, or none that can be drawn, the curve has a gap."""
    values = [row.get(metric, math.nan) for row in rows]
    shown = [value if math.isfinite(value) and (value > 0 or not log) else math.nan for value in values]
    if metric == "reference_checksum":  # looked at now and then
        known = [(row["step"], value) for row, value in zip(rows, shown, strict=True) if not math.isnan(value)]
        return [step for step, _ in known], [value for _, value in known]
    return [row["step"] for row in rows], shown


def _level(area: Any, height: float, text: str, colour: str) -> None:
    area.axhline(height, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
    area.annotate(
        text,
        (0.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 2),
        textcoords="offset points",
        color=colour,
        fontsize=8,
    )


def _mark(area: Any, finding: Finding, panel: Panel, *, named: bool) -> None:
    """Draw where the guard puts departure and onset, and where it spoke."""
    marks = [("departure", finding.departure_step, GOOD), ("onset", finding.onset_step, ONSET)]
    marks = [(what, step, colour) for what, step, colour in marks if step is not None and step != finding.step]
    marks.append((f"{finding.signature}, {finding.severity}", finding.step, BAD))
    for row, (what, step, colour) in enumerate(marks):
        area.axvline(step, color=colour, linewidth=1.2, linestyle="-" if colour == BAD else ":")
        if named:
            right = step <= area.get_xlim()[0] + 0.65 * (area.get_xlim()[1] - area.get_xlim()[0])
            area.annotate(
                f"{what} {step}",
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4 if right else -4, 4 + 11 * (len(marks) - 1 - row)),
                textcoords="offset points",
                ha="left" if right else "right",
                color=colour,
                fontsize=8.5,
                annotation_clip=False,
            )
    if panel.thresholds:
        for what, colour in (("baseline", OTHER), ("threshold", BAD)):
            value = finding.evidence.get(what)
            if isinstance(value, float):
                _level(area, value, f"{what} {value:.2g}", colour)


def main() -> None:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all where none is given")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write PNG files there instead")
    options = parser.parse_args()
    folder, suffix = (options.png, "png") if options.png else (IMAGES, "svg")
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        draw(name, folder / f"{name}.{suffix}")
        print(f"{name}: {caption(name)}")


if __name__ == "__main__":
    main()
