"""The demo's result in words and as plain data."""

from collections.abc import Callable, Sequence
from typing import Any

from unified_cache.demo.scale import Scale
from unified_cache.demo.serving import HOST_RATIO, PAGE_SIZE, Report, demo_sizes
from unified_cache.demo.workload import NEAR_TIE

__all__ = [
    "closest_lead",
    "difference",
    "drift",
    "headline",
    "pools",
    "rows",
    "summaries",
    "table",
    "verdict",
]


def headline(scale: Scale, device: str) -> str:
    """Model and workload in one line."""
    traffic = scale.traffic
    return (
        f"{scale.model.name} on {device}; {traffic.clients} clients, {traffic.turns} turns each, "
        f"prompts up to {traffic.longest - traffic.answer} tokens; a restart half way"
    )


def pools(scale: Scale) -> str:
    """How large the tiers are."""
    device = demo_sizes(scale.traffic).device_pages
    return (
        f"Pages of {PAGE_SIZE} tokens: device pool {device}, host pool {int(device * HOST_RATIO)}; "
        f"all conversations together take about {scale.traffic.expected // PAGE_SIZE}"
    )


def summaries(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Each report as plain numbers, with how much faster it was than the first one."""
    runs = [report.summary() for report in reports]
    first = runs[0]
    for run in runs:
        run["speed_up"] = {
            "ttft": first["ttft_ms"]["median"] / run["ttft_ms"]["median"],
            "all": first["seconds"] / run["seconds"],
        }
    return runs


def rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """What there is to say of the runs: a label, and a cell for each of them. The first row names them."""
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("", lambda run: run["name"]),
        ("requests", lambda run: str(run["requests"])),
        ("hit rate, device", lambda run: f"{run['hit_rate']['device']:.1%}"),
        ("hit rate, host", lambda run: f"{run['hit_rate']['host']:.1%}"),
        ("hit rate, storage", lambda run: f"{run['hit_rate']['storage']:.1%}"),
        ("hit rate, all tiers", lambda run: f"{run['hit_rate']['total']:.1%}"),
        ("tokens through the model", lambda run: f"{run['computed_tokens']:,}"),
        ("first token, median", lambda run: f"{run['ttft_ms']['median']:.1f} ms"),
        ("first token, p90", lambda run: f"{run['ttft_ms']['p90']:.1f} ms"),
        (
            "first token, median of the round after restart",
            lambda run: f"{run['ttft_ms']['median_after_restart']:.1f} ms",
        ),
        ("prompts", lambda run: f"{run['prompt_tokens_per_second']:.0f} tokens/s"),
        ("answered", lambda run: f"{run['tokens_per_second']:.1f} tokens/s"),
        ("speed-up, first token", lambda run: f"{run['speed_up']['ttft']:.2f}x"),
        ("speed-up, all requests", lambda run: f"{run['speed_up']['all']:.2f}x"),
    ]
    if "median_after_restart" not in runs[0]["ttft_ms"]:
        rows = [row for row in rows if "restart" not in row[0]]
    return [(name, [cell(run) for run in runs]) for name, cell in rows]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs side by side."""
    shown = rows(runs)
    label = max(len(name) for name, _ in shown)
    return "\n".join(name.ljust(label) + "".join(cell.rjust(16) for cell in cells) for name, cells in shown)


def closest_lead(reports: Sequence[Report]) -> float:
    """By how much the least sure token of all answers has won."""
    return min(report.closest_lead for report in reports)


def drift(reports: Sequence[Report]) -> float:
    """The most by which rounding moved the lead of a token, against the reference."""
    return max(report.drift for report in reports)


def verdict(reports: Sequence[Report], redrawn: int) -> str:
    """That all answers are equal, and how far from a coincidence that is."""
    answers = sum(len(report.generations) for report in reports)
    return (
        f"{answers} answers of the engine, every one token for token what transformers gives without it.\n"
        f"The closest lead of a token was {closest_lead(reports):.1e} standard deviations of the logits; "
        f"rounding moved leads by {drift(reports):.0e} at most.\n"
        f"Questions asked differently, since a lead was less than {NEAR_TIE:.0e}: {redrawn}."
    )


def difference(report: Report, reference: str = "the model") -> str:
    """What is wrong with a run that has mismatches, in one line.

    Args:
        reference: who has answered without a cache.
    """
    first = report.mismatches[0]
    return (
        f"{report.name}: {len(report.mismatches)} of {len(report.generations)} answers are not what "
        f"{reference} gives without a cache; first: request {first.request} (client {first.client}), token "
        f"{first.position} is {first.token} instead of {first.expected}"
    )
