"""Diagrams of runs over the global step: loss, learning rate, gradient norm, and evaluations.

The log of an interrupted run has one line for each step, so its curves have no gaps; runs that follow each other, such
as the phases of a pre-training, are drawn in one diagram. No torch.
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
"""Key in the log of steps, and the label of its axis."""
TEXTS = {"rouge": "ROUGE", "bleu": "BLEU"}
"""Prefixes of metrics that have a panel of their own, where they were computed."""
WIDTH, HEIGHT, DPI = 10.0, 2.6, 160
"""Width of the diagram and height of a panel in inches, and dots per inch."""
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class History:
    """The curves of a run's logs.

    Attributes:
        name: of the run folder.
        steps: key of `PANELS` to its curve.
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
        raise SourceError(f"{run} has no {LOG} with a step in it", "name a run folder, the save.path of a training")
    steps = {name: {line["global_step"]: line[name] for line in lines if name in line} for name in PANELS}
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines_of(run / EVALUATIONS):
        for key, value in line.items():
            name, _, metric = key.rpartition("_")
            panel = next((prefix for prefix in ("loss", *TEXTS) if metric.startswith(prefix)), None)
            if name and panel is not None:
                label = name if metric in ("loss", "bleu") else f"{name} {metric}"
                scores.setdefault(panel, {}).setdefault(label, {})[line["global_step"]] = value
    return History(run.resolve().name, steps, scores)


def draw(runs: Sequence[History], out: Path) -> None:
    """Draw runs into one PNG, with the panels below each other.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UnsupportedError(f"diagrams need matplotlib: {error}", "pip install 'vitruvian[plot]'") from None
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
    curve_of_steps = run.steps.get(name, {})
    scores = run.scores.get(name, {})
    before = f"{run.name} " if several else ""
    if curve_of_steps:
        label = f"{before}train" if scores else run.name if several else None
        axis.plot(list(curve_of_steps), list(curve_of_steps.values()), color=colour, linewidth=1, label=label)
    for number, (label, curve) in enumerate(scores.items()):
        steps = sorted(curve)
        style = {"linestyle": "--", "linewidth": 1.2, "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        colours = {"color": colour} if several else {"color": f"C{number + bool(curve_of_steps)}"}
        axis.plot(steps, [curve[step] for step in steps], label=before + label, **style, **colours)
