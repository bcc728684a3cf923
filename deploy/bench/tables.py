"""A report as tables for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.bench.speculation_tables import speculation_lines
from deploy.bench.ways import name_of
from deploy.cli.output import table

Row = tuple[str, ...]


def show(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a report."""
    machine = report["machine"]
    if machine is not None:
        yield f"machine: {machine['processor'] or 'unknown processor'}, {machine['num_threads']} threads"
        yield f"it reads {machine['read_bytes_per_s'] / 1e9:.1f} GB/s"
        yield f"it computes {machine['flops'] / 1e9:.0f} GFLOP/s in float32"
        yield "of limit: share of the speed that reading weights and cache once, and the arithmetic, allow"
    if any(result["weight_format"] == "int8" for result in (*report["results"], *report["verify"])):
        yield "  (8-bit numbers are multiplied faster than float32: their share may pass 100%)"
    for sampling in report["settings"]["samplings"]:
        everything = [result for result in report["results"] if result["sampling"] == sampling]
        results = [result for result in everything if result["first_token_s"] is not None]
        if results:
            yield from (
                "",
                f"generating, {sampling}: medians (quartiles); decoding is what follows the first token",
            )
            yield from table(_generate_rows(results))
            yield from ("", f"ratios of decoding speed, {sampling}, pair by pair: medians (quartiles)")
            yield from table(_ratio_rows(results))
        yield from speculation_lines(sampling, [result for result in everything if "rates" in result])
    for title, rows in (
        ("prefill, tokens/s", _prefill_rows(report["prefill"])),
        ("sessions at once, tokens/s of all together", _session_rows(report["sessions"])),
        ("one pass of the target", _verify_rows(report["verify"])),
        ("share of a pass of one row outside the linear layers", _outside_rows(report["outside_linear"])),
        (
            "against float32, on the text of the prompts (loss in nats a token)",
            _quality_rows(report["quality"]),
        ),
        ("peak memory", [(name, f"{size / 2**20:.0f} MiB") for name, size in report["peak_bytes"].items()]),
    ):
        if rows:
            yield from ("", title)
            yield from table(rows)
    if report["skipped"]:
        yield ""
    for entry in report["skipped"]:
        yield f"left out: {entry['what']}: {entry['reason']}"
    if not report["complete"]:
        yield f"unfinished: {report['num_missing']} measurements are missing"


def _generate_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    figures = ("decoding, tokens/s", "end to end", "first token, s", "of limit", "tokens/step", "same tokens")
    rows: list[Row] = [("mode", "weights", "tokens", *figures)]
    for result in results:
        same = result["same_tokens"]
        length = result.get("acceptance_length")
        rows.append(
            (
                name_of(result),
                result["weight_format"],
                str(result["num_tokens"]),
                _spread(result["tokens_per_s_spread"], 1),
                _spread(result["end_to_end_tokens_per_s_spread"], 1),
                _spread(result["first_token_s_spread"], 3),
                _share(result["share_of_limit"] and result["share_of_limit"]["median"]),
                "-" if length is None else f"{length:.2f}",
                f"{same['same']} of {same['of']}",
            )
        )
    return rows


def _ratio_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = [name_of(result) for result in results]
    rows: list[Row] = [("", *(f"/ {name}" for name in names))]
    for result in results:
        ratios = [result["ratios"].get(name) for name in names]
        cells = ["" if each is None else _spread(each["tokens_per_s"], 2) for each in ratios]
        rows.append((name_of(result), *cells))
    return rows


def _prefill_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    if not results:
        return []
    rows: list[Row] = [("mode", "weights", "tokens", "tokens/s", "of limit", "/ hf")]
    for result in results:
        rows.append(
            (
                name_of(result),
                result["weight_format"],
                str(result["length"]),
                _spread(result["tokens_per_s_spread"], 0),
                _share(result["share_of_limit"]),
                _spread(result["ratios"].get("hf"), 2),
            )
        )
    return rows


def _session_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    if not results:
        return []
    first = results[0]["compared_with"]
    figures = ("end to end", f"/ {first}", "all decoding", f"/ {first}", "of limit")
    rows: list[Row] = [("mode", "weights", "sampling", "sessions", *figures)]
    for result in results:
        rows.append(
            (
                name_of(result),
                result["weight_format"],
                result["sampling"],
                str(result["sessions"]),
                _spread(result["tokens_per_s_spread"], 1),
                _spread(result["tokens_per_s_ratio"], 2),
                _spread(result["steady_tokens_per_s_spread"], 1),
                _spread(result["steady_tokens_per_s_ratio"], 2),
                _share(result["share_of_limit"]),
            )
        )
    return rows


def _verify_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    if not results:
        return []
    least = f"/ {results[0]['compared_with']} row"
    rows: list[Row] = [("variant", "weights", "kernel", "context", "rows", "ms", least, "of limit")]
    for result in results:
        spent = {name: 1e3 * value for name, value in result["seconds_spread"].items()}
        rows.append(
            (
                result["variant"],
                result["weight_format"],
                result["kernel"],
                str(result["context"]),
                str(result["num_rows"]),
                _spread(spent, 1),
                _spread(result["ratio"], 2),
                _share(result["share_of_limit"]),
            )
        )
    return rows


def _outside_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows: list[Row] = [("variant", "context", "share")] if results else []
    for result in results:
        rows.append((result["variant"], str(result["context"]), f"{result['share']:.0%}"))
    return rows


def _quality_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    figures = ("loss", "more than float32", "KL divergence", "same likeliest token")
    rows: list[Row] = [("variant", "weights", "tokens", *figures)] if results else []
    for result in results:
        rows.append(
            (
                result["variant"],
                result["weight_format"],
                str(result["num_tokens"]),
                f"{result['loss']:.4f}",
                f"{result['loss'] - result['loss_float32']:+.4f}",
                f"{result['divergence']:.1e}",
                f"{result['agreement']:.2%}",
            )
        )
    return rows


def _spread(found: Mapping[str, float] | None, digits: int) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
