"""The demo's result as an image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_TTFT = (("median", "#555555"), ("p90", "#bbbbbb"))
_TIERS = (("device", "#228833"), ("host", "#4477aa"), ("storage", "#aa3377"))


def draw(runs: Sequence[dict[str, Any]], caption: str, path: Path) -> None:
    """Time to first token and hit rate by tier of each run (a `Report.summary`), side by side."""
    # Not pyplot: that would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [run["name"] for run in runs]
    places = range(len(runs))

    width = 0.38
    for i, (key, colour) in enumerate(_TTFT):
        bars = left.bar(
            [place + (i - 0.5) * width for place in places],
            [run["ttft_ms"][key] for run in runs],
            width,
            color=colour,
            label=key,
        )
        left.bar_label(bars, fmt="%.0f", padding=2, fontsize=9)
    left.set_title("Time to first token")
    left.set_ylabel("milliseconds (lower is better)")

    base = [0.0] * len(runs)
    for tier, colour in _TIERS:
        shares = [100 * run["hit_rate"][tier] for run in runs]
        bars = right.bar(places, shares, 0.6, bottom=base, color=colour, label=tier)
        labels = [f"{share:.0f} %" if share >= 5 else "" for share in shares]
        right.bar_label(bars, labels, label_type="center", fontsize=9, color="white")
        base = [below + share for below, share in zip(base, shares, strict=True)]
    for place, total in zip(places, base, strict=True):
        right.annotate(f"{total:.0f} %", (place, total), (0, 3), textcoords="offset points", ha="center")
    right.set_title("Hit rate, by the tier that had the tokens")
    right.set_ylabel("% of prompt tokens")
    right.set_ylim(0, 112)

    for axes in (left, right):
        axes.set_xticks(list(places), names)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right" if axes is left else "upper left")
    figure.supxlabel(caption, fontsize=9, color="#555555")
    figure.savefig(path)
