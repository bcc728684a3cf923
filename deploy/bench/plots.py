"""Which charts a report gives, and where they are written."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.bench.svg import Bar, bar_chart, line_chart
from deploy.bench.tables import name_of


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
    for context in report["settings"]["contexts"]:
        curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for result in report["verify"]:
            if result["context"] == context:
                name = f"{result['variant']} ({result['weight_format']})"
                curves[name].append((result["num_rows"], 1e3 * result["seconds"]))
        if curves:
            title = f"One pass of the target at context {context}"
            yield f"verify-{context}", line_chart(title, "rows", "ms", curves)


def _title(result: Mapping[str, Any]) -> str:
    return f"{name_of(result)} ({result['weight_format']})"
