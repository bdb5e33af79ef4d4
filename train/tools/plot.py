"""Diagrams of runs over the global step: loss, learning rate, gradient norm, and what evaluations found.

A run that was interrupted has one line for each step, so its curves go on as if nothing had happened; runs that follow
each other, such as the phases of a pre-training, lie in one diagram. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import SourceError, UnsupportedError
from train.start.run_folder import EVALUATIONS, LOG, lines_of

Curve = Mapping[int, float]
"""Global step to value."""
PANELS: Mapping[str, str] = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm"}
"""Number of a step, and what stands beside its axis."""
TEXTS = {"rouge": "ROUGE", "bleu": "BLEU"}
"""Beginnings of metrics that have a panel of their own, where they were computed."""
WIDTH, HEIGHT, DPI = 10.0, 2.6, 160
"""Inches of the diagram and of each panel, and dots of an inch."""
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class History:
    """What a run's logs tell.

    Attributes:
        name: of the run's folder.
        steps: number of a step to its curve, the keys of `PANELS`.
        scores: for each panel of evaluations, name of the set (and of the metric) to its curve.
    """

    name: str
    steps: Mapping[str, Curve]
    scores: Mapping[str, Mapping[str, Curve]]


def read_history(run: Path) -> History:
    """Read the logs of a run. Where a step was evaluated twice, the later evaluation counts.

    Raises:
        SourceError: there is no log, or it is damaged.
    """
    lines = lines_of(run / LOG)
    if not lines:
        raise SourceError(f"{run} has no {LOG} with a step in it", "name a run's folder, the save.path of a training")
    steps = {name: {one["global_step"]: one[name] for one in lines if name in one} for name in PANELS}
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines_of(run / EVALUATIONS):
        for key, value in line.items():
            name, _, metric = key.rpartition("_")
            panel = next((one for one in ("loss", *TEXTS) if metric.startswith(one)), None)
            if name and panel is not None:
                label = name if metric in ("loss", "bleu") else f"{name} {metric}"
                scores.setdefault(panel, {}).setdefault(label, {})[line["global_step"]] = value
    return History(run.resolve().name, steps, scores)


def draw(runs: Sequence[History], out: Path) -> None:
    """Draw runs into one PNG, a panel below the other.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UnsupportedError(f"diagrams need matplotlib: {error}", "pip install '.[plot]'") from None
    panels = dict(PANELS) | {name: title for name, title in TEXTS.items() if any(name in run.scores for run in runs)}
    figure = Figure((WIDTH, HEIGHT * len(panels)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for number, run in enumerate(runs):
            _panel(axis, name, run, f"C{number}", len(runs) > 1)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="upper right" if name in PANELS else "upper left", fontsize="small", frameon=False)
    axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[-1].set_xlabel("global step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].ticklabel_format(axis="x", style="plain", useOffset=False)
    axes[0].set_title(", ".join(run.name for run in runs))
    figure.savefig(out, format="png")


def _panel(axis: Any, name: str, run: History, colour: str, several: bool) -> None:
    """The curves of a run in a panel."""
    held = run.steps.get(name, {})
    scores = run.scores.get(name, {})
    before = f"{run.name} " if several else ""
    if held:
        label = f"{before}train" if scores else run.name if several else None
        axis.plot(list(held), list(held.values()), color=colour, linewidth=1, label=label)
    for number, (label, curve) in enumerate(scores.items()):
        steps = sorted(curve)
        style = {"linestyle": "--", "linewidth": 1.2, "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        colours = {"color": colour} if several else {"color": f"C{number + bool(held)}"}
        axis.plot(steps, [curve[step] for step in steps], label=before + label, **style, **colours)
