"""What has been counted of drafts, as tables for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.bench.settings import PLAIN
from deploy.bench.ways import name_of
from deploy.cli.output import table

Row = tuple[str, ...]


def speculation_lines(sampling: str, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines about one sampling.

    Args:
        sampling: Its name.
        results: From `generate_results`, those with counts.
    """
    for title, rows in (
        (
            f"drafts, {sampling}, over all prompts; traffic: bytes of weights and cache that a session reads "
            "to decode, over those of plain decoding",
            _figure_rows(results),
        ),
        (f"tokens a step by most nodes in a draft, {sampling}", _budget_rows(results)),
        (f"how often the likeliest child was right, by its depth, {sampling}", _rate_rows(results)),
        (f"share of the tokens by who proposed them, {sampling}", _origin_rows(results)),
    ):
        if len(rows) > 1:
            yield from ("", title)
            yield from table(rows)
    for result in results:
        if result["num_skipped_steps"]:
            text = f"{result['num_skipped_steps']} of {result['num_steps']} steps went on without a drafter"
            yield f"{name_of(result)}, {sampling}: {text}"


def _figure_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    figures = ("tokens/step", "accepted", "traffic", "draft passes/step", "levels/step", "same tokens")
    rows: list[Row] = [("mode", "nodes", "tokens", *figures)]
    for result in results:
        same, rate, traffic = (
            result[name] for name in ("same_tokens", "acceptance_rate", "relative_traffic")
        )
        rows.append(
            (
                name_of(result),
                "-" if result["mode"] == PLAIN else str(result["max_nodes"]),
                str(result["num_tokens"]),
                f"{result['acceptance_length']:.2f}",
                "-" if rate is None else f"{rate:.0%}",
                "-" if traffic is None else f"{traffic:.2f}",
                f"{result['draft_passes_per_step']:.2f}",
                f"{result['level_passes_per_step']:.2f}",
                f"{same['same']} of {same['of']}",
            )
        )
    return rows


def _budget_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    lengths = {
        name_of(result): {each["max_nodes"]: each["acceptance_length"] for each in result["budgets"]}
        for result in results
        if result["budgets"]
    }
    budgets = sorted({budget for each in lengths.values() for budget in each})
    rows: list[Row] = [("mode", *map(str, budgets))]
    for name, each in lengths.items():
        rows.append((name, *(f"{each[budget]:.2f}" if budget in each else "-" for budget in budgets)))
    return rows


def _rate_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    found: dict[tuple[str, str], dict[int, str]] = {}
    for result in results:
        for each in result["rates"]:
            if each["rank"] == 0:
                found.setdefault((name_of(result), each["drafter"]), {})[each["depth"]] = (
                    f"{each['rate']:.0%}"
                )
    depths = sorted({depth for each in found.values() for depth in each})
    rows: list[Row] = [("mode", "drafter", *map(str, depths))]
    for names, each in found.items():
        rows.append((*names, *(each.get(depth, "-") for depth in depths)))
    return rows


def _origin_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = sorted({name for result in results for name in result["origins"]})
    rows: list[Row] = [("mode", *names)] if len(names) > 1 else []
    for result in results if rows else ():
        rows.append((name_of(result), *(f"{result['origins'].get(name, 0.0):.0%}" for name in names)))
    return rows
