"""Which charts a report gives, and where they are written."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.bench.svg import Bar, bar_chart, column_chart, line_chart, share_chart
from deploy.bench.ways import name_of


def write_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes a chart for each part of a report that has been measured.

    Args:
        report: From `report.build_report`.
        folder: Where to write.

    Returns:
        The files.
    """
    written = []
    for name, chart in _charts(report):
        path = folder / f"{name}.svg"
        path.write_text(chart, encoding="utf-8")
        written.append(path)
    return written


def _charts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for sampling in report["settings"]["samplings"]:
        bars = [
            Bar(_title(result), spread["median"], spread["low"], spread["high"])
            for result in report["results"]
            if result["sampling"] == sampling and (spread := result["tokens_per_s_spread"]) is not None
        ]
        if bars:
            yield f"speed-{sampling}", bar_chart(f"Decoding, {sampling}, one session", "tokens/s", bars)
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for result in report["sessions"]:
            if result["sampling"] == sampling and result["tokens_per_s"] is not None:
                lines[_title(result)].append((result["sessions"], result["tokens_per_s"]))
        if lines:
            title = f"Throughput, {sampling}"
            yield f"sessions-{sampling}", line_chart(title, "sessions at once", "tokens/s", lines)
        yield from _speculation_charts(report, sampling)
    for context in report["settings"]["contexts"]:
        curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for result in report["verify"]:
            if result["context"] == context:
                name = f"{result['variant']} ({result['weight_format']})"
                curves[name].append((result["num_rows"], 1e3 * result["seconds"]))
        if curves:
            title = f"One pass of the target at context {context}"
            yield f"verify-{context}", line_chart(title, "rows", "ms", curves)


def _speculation_charts(report: Mapping[str, Any], sampling: str) -> Iterator[tuple[str, str]]:
    """What drafts bring: as in figures 2 and 3 of arXiv 2308.04623, and by the size of the drafts."""
    results = [result for result in report["results"] if result["sampling"] == sampling and "rates" in result]
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        sizes = {each["max_nodes"]: each["acceptance_length"] for each in (result, *result["budgets"])}
        if len(sizes) > 1:
            lines[name_of(result)] = sorted(sizes.items())
    if lines:
        title = f"Tokens a step by the size of drafts, {sampling}"
        yield f"budgets-{sampling}", line_chart(title, "most nodes in a draft", "tokens/step", lines)
    for result in results:
        if result["mode"] == "staged":
            lengths = [record["num_tokens"] / record["num_steps"] for record in result["records"]]
            yield (
                "-".join(["prompts", sampling, *_suffix(report, result)]),
                column_chart(
                    f"Tokens a step of each prompt, {name_of(result)}, {sampling}",
                    "prompts, sorted",
                    "tokens/step",
                    sorted(lengths, reverse=True),
                ),
            )
    if any(len(result["origins"]) > 1 for result in results):
        shares = {name_of(result): result["origins"] for result in results}
        yield f"origins-{sampling}", share_chart(f"Who proposed the tokens, {sampling}", shares)


def _suffix(report: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """What tells the files of several variants apart."""
    return [result["variant"]] if len(report["settings"]["variants"]) > 1 else []


def _title(result: Mapping[str, Any]) -> str:
    return f"{name_of(result)} ({result['weight_format']})"
