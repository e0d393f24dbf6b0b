"""The demo's result in words and as plain data."""

from collections.abc import Callable, Sequence
from typing import Any

from unified_cache.demo.scale import Scale
from unified_cache.demo.serving import HOST_RATIO, PAGE_SIZE, Report, device_pages
from unified_cache.demo.workload import NEAR_TIE

__all__ = ["closest_lead", "difference", "drift", "headline", "pools", "summaries", "table", "verdict"]


def headline(scale: Scale, device: str) -> str:
    """Model and workload in one line."""
    traffic = scale.traffic
    return (
        f"{scale.model.name} on {device}; {traffic.clients} clients, {traffic.turns} turns each, "
        f"prompts up to {traffic.longest - traffic.answer} tokens; a restart half way"
    )


def pools(scale: Scale) -> str:
    """How large the tiers are."""
    device = device_pages(scale.traffic)
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


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs side by side."""
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("", lambda run: run["name"]),
        ("requests", lambda run: str(run["requests"])),
        ("hit rate, device", lambda run: f"{run['hit_rate']['device']:.1%}"),
        ("hit rate, host", lambda run: f"{run['hit_rate']['host']:.1%}"),
        ("hit rate, storage", lambda run: f"{run['hit_rate']['storage']:.1%}"),
        ("hit rate, all tiers", lambda run: f"{run['hit_rate']['total']:.1%}"),
        ("first token, median", lambda run: f"{run['ttft_ms']['median']:.1f} ms"),
        ("first token, p90", lambda run: f"{run['ttft_ms']['p90']:.1f} ms"),
        (
            "first token, median of the round after restart",
            lambda run: f"{run['ttft_ms']['median_after_restart']:.1f} ms",
        ),
        ("answered", lambda run: f"{run['tokens_per_second']:.1f} tokens/s"),
        ("speed-up, first token", lambda run: f"{run['speed_up']['ttft']:.2f}x"),
        ("speed-up, all requests", lambda run: f"{run['speed_up']['all']:.2f}x"),
    ]
    label = max(len(name) for name, _ in rows)
    return "\n".join(name.ljust(label) + "".join(cell(run).rjust(16) for run in runs) for name, cell in rows)


def closest_lead(reference: Report) -> float:
    """By how much the least sure token of all answers has won."""
    return min(margin for generation in reference.generations for margin in generation.margins)


def drift(reports: Sequence[Report]) -> float:
    """The most by which rounding moved the lead of a token, against the first report."""
    reference = reports[0].generations
    return max(
        abs(a - b)
        for report in reports[1:]
        for mine, theirs in zip(report.generations, reference, strict=True)
        for a, b in zip(mine.margins, theirs.margins, strict=True)
    )


def verdict(reports: Sequence[Report], redrawn: int) -> str:
    """That all answers are equal, and how far from a coincidence that is."""
    answers = sum(len(report.generations) for report in reports[1:])
    return (
        f"{answers} answers through the cache, every one token for token what the model gives without it.\n"
        f"The closest lead of a token was {closest_lead(reports[0]):.1e} standard deviations of the logits; "
        f"rounding moved leads by {drift(reports):.0e} at most.\n"
        f"Questions asked differently, since a lead was less than {NEAR_TIE:.0e}: {redrawn}."
    )


def difference(report: Report) -> str:
    """What is wrong with a run that has mismatches, in one line."""
    first = report.mismatches[0]
    return (
        f"{report.name}: {len(report.mismatches)} of {len(report.generations)} answers are not what the "
        f"model gives without a cache; first: request {first.request} (client {first.client}), token "
        f"{first.position} is {first.token} instead of {first.expected}"
    )
