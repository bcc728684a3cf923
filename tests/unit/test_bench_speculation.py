"""What drafts bring, from records to figures, tables and charts; the figures are worked out by hand."""

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict
from typing import Any

import pytest

from deploy.bench.plan import all_units, draft_sizes
from deploy.bench.plots import write_plots
from deploy.bench.records import Records
from deploy.bench.report import build_report
from deploy.bench.settings import Settings
from deploy.bench.tables import show
from deploy.bench.traffic import PassSize, relative_traffic

SIZES = {"ngram": PassSize(0, 0), "draft": PassSize(100, 1), "target": PassSize(1000, 10)}
SETTINGS = Settings(
    parts=("speculation",), modes=("off", "staged", "chain"), samplings=("greedy",), budgets=(2, 8)
)


def entry(
    num_tokens: int, num_first: int, stages: dict[str, tuple[int, int]], **changes: Any
) -> dict[str, Any]:
    """A record after a prompt of five tokens, with the passes and rows of cache of each stage."""
    work = [
        {"name": name, "num_passes": passes, "num_cache_rows": rows, "num_rows": 0}
        for name, (passes, rows) in stages.items()
    ]
    return {
        "num_prompt_tokens": 5,
        "num_tokens": num_tokens,
        "decode_work": {"num_tokens": num_tokens - num_first, "num_steps": 0, "stages": work},
        **changes,
    }


# Six tokens at contexts of 7 to 12: plain decoding reads 6 * 1000 + 57 * 10.
STAGED = entry(8, 2, {"ngram": (0, 0), "draft": (4, 34), "target": (2, 17)})
PLAIN = entry(8, 1, {"target": (7, 6 + 7 + 8 + 9 + 10 + 11 + 12)})


def test_traffic_is_all_that_is_read_by_what_plain_decoding_reads():
    assert relative_traffic([STAGED], SIZES) == pytest.approx((434 + 2170) / 6570)
    assert relative_traffic([PLAIN], SIZES) == 1.0
    both = (434 + 2170 + 7630) / (6570 + 7630)
    assert relative_traffic([STAGED, PLAIN], SIZES) == pytest.approx(both), "sums, not a mean of ratios"


def test_traffic_is_not_guessed():
    assert relative_traffic([STAGED], SIZES | {"draft": PassSize(0, 1)}) is None
    assert relative_traffic([STAGED], {"target": SIZES["target"]}) is None
    assert relative_traffic([PLAIN], {}) is None
    assert relative_traffic([entry(2, 2, {"target": (0, 0)})], SIZES) is None
    assert relative_traffic([], SIZES) is None


def test_a_mode_with_drafts_of_its_own_size_is_counted_once():
    assert draft_sizes(SETTINGS, "off") == draft_sizes(SETTINGS, "chain") == [0]
    assert draft_sizes(SETTINGS, "staged") == [0, 2, 8]
    assert draft_sizes(Settings(max_nodes=8, budgets=(2, 8)), "staged") == [8, 2]
    units = all_units(SETTINGS, num_prompts=2)
    assert len({unit.key for unit in units}) == len(units) == 2 * (1 + 3 + 1)
    assert {unit.group for unit in units} == {unit.key for unit in units}, "each stands for itself"


def filled_records() -> Records:
    """Two prompts; drafts of 8 nodes bring more than those of 2."""
    records = Records(None, {})
    records.add(("sizes", "configured"), {name: asdict(size) for name, size in SIZES.items()})
    for mode in SETTINGS.modes:
        way = {"mode": mode, "variant": "configured", "weight_format": "float16", "kernel": "native"}
        more = {"num_threads": 1, "work": None, "software": ""}
        records.add(("way", f"{mode} configured"), way | more)
    for unit in all_units(SETTINGS, num_prompts=2):
        _, name, _, max_nodes, prompt = unit.key
        counts = {"num_skipped_steps": 0, "num_rounds": 0, "accepted_histogram": [], "token_ids": [1] * 8}
        if name == "off configured":
            steps = {"num_steps": 8, "num_drafted": 0, "num_accepted": 0, "num_draft_passes": 0}
            more = {"num_levels": 0, "origins": {"target": 8}, "ranks": [], "max_nodes": 24}
            found = PLAIN | counts | steps | more
        else:
            num_steps = {2: 6, 8: 4, 0: 4 - int(prompt)}[int(max_nodes)]
            steps = {"num_steps": num_steps, "num_drafted": 20, "num_accepted": 8 - num_steps}
            more = {
                "num_draft_passes": 6,
                "num_levels": 9,
                "max_nodes": int(max_nodes) or 24,
                "origins": {"target": num_steps, "draft": 8 - num_steps},
                "ranks": [["draft", 0, 0, 4, 3], ["draft", 0, 1, 4, int(prompt)], ["ngram", 1, 0, 2, 2]],
            }
            found = STAGED | counts | steps | more
            if name == "chain configured" and prompt == 1:
                found["token_ids"] = [2] * 8
        records.add(unit.key, found)
    return records


def test_figures_are_pooled_over_all_prompts():
    report = json.loads(json.dumps(build_report(SETTINGS, 2, filled_records())))
    assert report["complete"]
    off, staged, chain = report["results"]
    assert [result["mode"] for result in report["results"]] == ["off", "staged", "chain"]
    assert (off["acceptance_length"], off["acceptance_rate"], off["relative_traffic"]) == (1.0, None, 1.0)
    assert staged["acceptance_length"] == 16 / 7
    assert staged["acceptance_rate"] == 9 / 40
    assert staged["draft_passes_per_step"] == 12 / 7
    assert staged["level_passes_per_step"] == 18 / 7
    assert staged["relative_traffic"] == pytest.approx((434 + 2170) / 6570)
    assert staged["origins"] == {"draft": 9 / 16, "target": 7 / 16}
    assert staged["rates"] == [
        {"drafter": "draft", "depth": 0, "rank": 0, "num_reached": 8, "num_accepted": 6, "rate": 0.75},
        {"drafter": "draft", "depth": 0, "rank": 1, "num_reached": 8, "num_accepted": 1, "rate": 0.125},
        {"drafter": "ngram", "depth": 1, "rank": 0, "num_reached": 4, "num_accepted": 4, "rate": 1.0},
    ]
    budgets = [(each["max_nodes"], each["acceptance_length"]) for each in staged["budgets"]]
    assert budgets == [(2, 16 / 12), (8, 2.0)]
    assert off["budgets"] == chain["budgets"] == []
    assert [record["prompt"] for record in staged["records"]] == [0, 1]
    assert staged["same_tokens"] == {"as": "off configured", "same": 2, "of": 2}
    assert chain["same_tokens"]["same"] == 1
    for result in report["results"]:
        assert result["tokens_per_s"] is None, "nothing was timed"
        assert result["timed_records"] == []


def test_a_run_cut_short_is_reported_as_far_as_it_went():
    whole = filled_records()
    for num_kept in range(len(whole)):
        part = Records(None, {})
        for kind in ("way", "sizes"):
            for key, found in whole.of(kind).items():
                part.add((kind, *key), found)
        for key, found in list(whole.of("speculation").items())[:num_kept][::-1]:
            part.add(("speculation", *key), found)
        report = build_report(SETTINGS, 2, part)
        assert report["complete"] == (num_kept >= 10)
        assert list(show(report))


def test_tables_and_charts_show_what_was_counted(tmp_path):
    report = build_report(SETTINGS, 2, filled_records())
    lines = list(show(report))
    assert any(line.split()[:6] == ["staged", "configured", "24", "16", "2.29", "22%"] for line in lines)
    assert any(line.split() == ["staged", "configured", "1.33", "2.00"] for line in lines)
    paths = write_plots(report, tmp_path)
    names = ["budgets-greedy.svg", "prompts-greedy.svg", "origins-greedy.svg"]
    assert [path.name for path in paths] == names
    texts, widths, heights = {}, {}, {}
    for path in paths:
        tree = ET.parse(path)
        rects = [e for e in tree.iter() if e.tag.endswith("rect") and e.get("x")]
        texts[path.stem] = {e.text for e in tree.iter() if e.text}
        widths[path.stem] = [float(rect.get("width") or 0) for rect in rects]
        heights[path.stem] = [float(rect.get("height") or 0) for rect in rects]
    assert {"most nodes in a draft", "2", "8", "24", "staged configured"} <= texts["budgets-greedy"]
    assert "off configured" not in texts["budgets-greedy"]
    first, second = heights["prompts-greedy"]
    assert first / second == pytest.approx((8 / 3) / (8 / 4), rel=0.01), "the best prompt first"
    assert {"draft", "target", "56%", "44%", "100%"} <= texts["origins-greedy"]
    off, staged = widths["origins-greedy"][:2], widths["origins-greedy"][2:4]
    assert off[0] == 0
    assert sum(staged) == pytest.approx(off[1], abs=0.2)
    assert staged[0] / off[1] == pytest.approx(9 / 16, rel=0.01)


def test_what_is_in_a_setting_twice_or_too_small_is_named():
    with pytest.raises(ValueError, match="budgets name something twice"):
        Settings(budgets=(4, 4))
    with pytest.raises(ValueError, match="budgets must be"):
        Settings(budgets=(0,))
    with pytest.raises(ValueError, match="chain_length is 0"):
        Settings(chain_length=0)
