"""The benchmark's arithmetic: medians, pairs, whose turn it is, limits, charts, and the report of it all."""

import itertools
import json
import statistics
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.order import turn_order
from deploy.bench.plan import all_units
from deploy.bench.plots import write_plots
from deploy.bench.progress import Progress
from deploy.bench.records import Records
from deploy.bench.report import build_report
from deploy.bench.roofline import Machine, Work, attention_flops, minimal_seconds
from deploy.bench.sessions import steady_rate
from deploy.bench.settings import Settings, Variant
from deploy.bench.statistics import pair_ratios, spread
from deploy.bench.tables import show
from deploy.bench.ways import Sample

values = st.floats(0.001, 1000)


@given(st.lists(values, min_size=2, max_size=40))
def test_spread_is_what_the_standard_library_says(found):
    whole = spread(found)
    assert whole is not None
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    assert (whole.low, whole.median, whole.high) == pytest.approx((low, median, high))
    assert whole.deviation == statistics.median(abs(value - whole.median) for value in found)
    assert whole.count == len(found)


def test_spread_of_nothing_and_of_one():
    assert spread([]) is None
    whole = spread([3.0])
    assert whole is not None
    assert (whole.low, whole.median, whole.high, whole.deviation) == (3.0, 3.0, 3.0, 0.0)


@given(
    st.dictionaries(st.integers(0, 9), st.none() | values),
    st.dictionaries(st.integers(0, 9), st.none() | values | st.just(0.0)),
)
def test_ratios_are_taken_where_both_sides_are_there(own, other):
    expected = []
    for key in range(10):
        a, b = own.get(key), other.get(key)
        if a is not None and b:
            expected.append(a / b)
    assert sorted(pair_ratios(own, other)) == sorted(expected)


@given(st.integers(1, 7), st.integers(0, 20))
def test_turns_are_fair(num_items, first_pair):
    items = list(range(num_items))
    turns = [turn_order(items, 2 * first_pair + turn) for turn in range(2 * num_items)]
    assert all(sorted(turn) == items for turn in turns)
    for place in range(num_items):
        assert Counter(turn[place] for turn in turns) == dict.fromkeys(items, 2)
    follows = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert all(follows[b, a] == count for (a, b), count in follows.items())


def test_nobody_takes_no_turns():
    assert turn_order([], 3) == []


def test_every_way_runs_once_for_each_prompt_and_round_side_by_side():
    settings = Settings(
        modes=("off", "staged"),
        samplings=("greedy", "topk50"),
        peers=("hf",),
        variants=(Variant("float32"), Variant("int8")),
        num_pairs=5,
        parts=("generate",),
    )
    units = all_units(settings, num_prompts=3)
    own = {f"{mode} {weights}" for mode in ("off", "staged") for weights in ("float32", "int8")}
    expected = {
        ("generate", name, sampling, prompt, round_)
        for sampling in ("greedy", "topk50")
        for prompt in range(3)
        for round_ in range(2)  # 6 pairs are the first 5 or more
        for name in (own | {"hf"} if sampling == "greedy" else own)
    }
    assert {unit.key for unit in units} == expected
    assert len(units) == len(expected)
    groups = [unit.group for unit in units]
    assert [group for group, before in zip(groups, [None, *groups], strict=False) if group != before] == list(
        dict.fromkeys(groups)
    ), "what is compared is measured in one go"
    firsts = [next(u.subject for u in units if u.group == group) for group in dict.fromkeys(groups)]
    assert len(set(firsts)) > 1


def test_the_limit_is_the_slower_of_reading_and_computing():
    machine = Machine(read_bytes_per_s=100.0, flops=1000.0)
    work = Work(weight_bytes=400, num_weights=100, cache_bytes_per_token=2, attention_flops=1)
    assert minimal_seconds(work, machine, num_rows=1, context=50) == (400 + 100) / 100
    assert minimal_seconds(work, machine, num_rows=1, context=50, num_sessions=4) == (400 + 400) / 100
    assert minimal_seconds(work, machine, num_rows=40, context=50) == 40 * (200 + 50) / 1000


def test_attention_is_read_from_either_kind_of_configuration(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 8})
    )
    assert attention_flops(str(tmp_path)) == 4 * 3 * 4 * 8
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 3, "n_head": 4, "n_embd": 64}))
    assert attention_flops(str(tmp_path)) == 4 * 3 * 64
    assert attention_flops("no/such-model") == 0.0


def test_decoding_is_what_follows_the_first_tokens():
    sample = Sample((1, 2, 3, 4, 5), seconds=3.0, first_token_s=1.0, num_first=3)
    assert sample.tokens_per_s == 2 / 2.0
    assert sample.plain()["end_to_end_tokens_per_s"] == pytest.approx(5 / 3)
    assert Sample((1,), seconds=1.0, first_token_s=1.0).tokens_per_s is None


def test_the_steady_rate_counts_while_all_decode():
    # All decode from 2.0 (the second one's first token) to 4.0 (the first one's last).
    streams = [[(1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1)], [(2.0, 1), (2.5, 3), (4.5, 1)]]
    assert steady_rate(streams) == (2 + 1 + 3) / 2.0
    assert steady_rate([[(1.0, 1), (2.0, 1)], [(2.5, 1), (3.0, 1)]]) is None


def test_the_time_left_goes_by_kind():
    now, said = [0.0], []
    progress = Progress(said.append, ["slow", "fast", "fast", "other"], clock=lambda: now[0])
    assert progress.seconds_left() == 0.0
    now[0] = 100.0  # starting is not measuring
    progress.begin()
    now[0] = 110.0
    progress.done("slow")
    progress.begin()
    now[0] = 112.0
    progress.done("fast")
    assert progress.seconds_left() == 2.0 + (10.0 + 2.0) / 2
    progress.drop("other")
    assert progress.seconds_left() == 2.0
    progress.begin()
    progress.done("fast")
    assert progress.seconds_left() == 0.0
    assert said[0] == "  1 of 4, about 30 s left"
    assert said[-1] == "  3 of 3, about 0 s left"


SETTINGS = Settings(
    modes=("off", "staged"),
    samplings=("greedy",),
    peers=("hf",),
    num_pairs=3,
    contexts=(64,),
    row_counts=(1, 4),
    prompt_lengths=(32,),
    session_counts=(1, 2),
)


def filled_records() -> Records:
    """What a run on a machine of 100 bytes and 1000 operations a second would record."""
    records = Records(None, {})
    work = {
        "weight_bytes": 100.0,
        "num_weights": 10.0,
        "cache_bytes_per_token": 0.0,
        "attention_flops": 0.0,
    }
    records.add(
        ("machine",), {"processor": "P", "num_threads": 2, "read_bytes_per_s": 100.0, "flops": 1000.0}
    )
    for name, mode, variant in (
        ("off configured", "off", "configured"),
        ("staged configured", "staged", "configured"),
        ("hf", "hf", ""),
    ):
        records.add(
            ("way", name),
            {
                "mode": mode,
                "variant": variant,
                "weight_format": "float32",
                "kernel": "torch",
                "num_threads": 2,
                "work": None if mode == "staged" else work,
                "software": "",
            },
        )
    records.add(
        ("variant", "configured"),
        {"weight_format": "float32", "kernel": "torch", "max_context_length": 256, "work": work},
    )
    # The machine slows down from round to round; ratios of pairs do not notice.
    speeds = {"hf": 0.25, "off configured": 0.5, "staged configured": 1.5}
    for unit in all_units(SETTINGS, num_prompts=1):
        slowness = 1.0 + int(unit.key[-1])
        if unit.part == "generate":
            seconds = 1.0 + 4 / speeds[unit.subject] * slowness
            counts = {"num_steps": 5, "num_drafted": 0, "num_accepted": 0, "num_draft_passes": 0}
            if unit.subject == "staged configured":
                counts = {"num_steps": 2, "num_drafted": 6, "num_accepted": 3, "num_draft_passes": 4}
            ids = (1, 2, 3, 4, 9 if unit.subject == "hf" and slowness == 3 else 5)
            sample = Sample(ids, seconds, 1.0, 1, {} if unit.subject == "hf" else counts)
            entry = {
                "num_prompt_tokens": 8,
                **sample.plain(),
                "peak_bytes": {unit.subject: 7 * int(slowness)},
            }
        elif unit.part == "prefill":
            entry = {"seconds": slowness / speeds[unit.subject], "peak_bytes": {}}
        elif unit.part == "sessions":
            speed = int(unit.key[3]) ** 0.5 * speeds[unit.subject] / slowness
            entry = {
                "tokens_per_s": speed,
                "steady_tokens_per_s": None,
                "num_prompt_tokens": 8,
                "peak_bytes": {},
            }
        elif unit.part == "verify":
            entry = {"seconds": (2.0 if unit.key[3] == 1 else 3.0) * slowness}
        elif unit.part == "quality":
            entry = {"num_tokens": 8, "loss": 20.0, "loss_float32": 16.0, "divergence": 2.0, "num_agreed": 6}
        else:
            entry = {"seconds": 1.5 * slowness}
        records.add(unit.key, entry)
    return records


def test_a_report_adds_up():
    report = json.loads(json.dumps(build_report(SETTINGS, 1, filled_records())))
    assert report["complete"]
    off, staged, hf = report["results"]
    assert [result["mode"] for result in report["results"]] == ["off", "staged", "hf"]
    assert off["tokens_per_s"] == 0.25  # the second of three rounds, at half the speed
    assert off["ratios"]["hf"]["tokens_per_s"] == {
        "median": 2.0,
        "low": 2.0,
        "high": 2.0,
        "deviation": 0.0,
        "count": 3,
    }
    assert staged["ratios"]["off configured"]["tokens_per_s"]["median"] == pytest.approx(3.0)
    assert set(hf["ratios"]) == {"off configured", "staged configured"}
    # A token reads 100 bytes, a second's worth.
    assert off["share_of_limit"]["median"] == pytest.approx(0.25)
    assert staged["share_of_limit"] is None
    assert staged["acceptance_length"] == 15 / 6
    assert staged["acceptance_rate"] == 0.5
    assert staged["draft_passes_per_step"] == 2.0
    assert off["acceptance_rate"] is None
    assert "acceptance_length" not in hf
    assert hf["same_tokens"] == {"as": "off configured", "same": 2, "of": 3}
    assert [record["round"] for record in hf["records"]] == [0, 1, 2]
    assert [
        (entry["mode"], entry["tokens_per_s"], entry["ratios"].get("hf", {}).get("median"))
        for entry in report["prefill"]
    ] == [("off", 8.0, 2.0), ("hf", 4.0, None)]
    two = next(entry for entry in report["sessions"] if entry["sessions"] == 2)
    assert two["tokens_per_s_ratio"]["median"] == pytest.approx(2**0.5)
    assert two["steady_tokens_per_s"] is None
    one, four = report["verify"]
    assert (four["num_rows"], four["ratio"]["median"], four["seconds"]) == (4, 1.5, 6.0)
    assert one["share_of_limit"] == 0.25
    assert report["outside_linear"][0]["share"] == 0.25
    [quality] = report["quality"]
    figures = [quality[name] for name in ("num_tokens", "loss", "loss_float32", "divergence", "agreement")]
    assert figures == [8, 2.5, 2.0, 0.25, 0.75]
    assert report["peak_bytes"] == {"off configured": 21, "staged configured": 21, "hf": 21}


def test_a_report_of_half_a_run_and_of_nothing():
    whole, half = filled_records(), Records(None, {})
    for kind in ("machine", "way", "generate"):
        for key, entry in list(whole.of(kind).items())[:4]:
            half.add((kind, *key), entry)
    half.add(("skipped", "hf"), {"reason": "it is not installed"})
    report = build_report(SETTINGS, 1, half)
    assert not report["complete"]
    lines = "\n".join(show(report))
    assert "left out: hf: it is not installed" in lines
    assert f"unfinished: {report['num_missing']} measurements are missing" in lines
    empty = build_report(SETTINGS, 1, Records(None, {}))
    assert empty["results"] == empty["sessions"] == empty["verify"] == []
    assert list(show(empty))


def test_tables_and_plots_show_the_report(tmp_path):
    report = build_report(SETTINGS, 1, filled_records())
    lines = list(show(report))
    row = next(line.split() for line in lines if line.startswith("staged configured") and "float32" in line)
    assert "2.50" in row
    paths = write_plots(report, tmp_path)
    assert [path.name for path in paths] == ["speed-greedy.svg", "sessions-greedy.svg", "verify-64.svg"]
    texts = {path.stem: [e.text for e in ET.parse(path).iter() if e.text] for path in paths}
    assert "off configured (float32)" in texts["speed-greedy"]
    assert {"rows", "ms", "1", "4"} <= set(texts["verify-64"])
    bars = [e for e in ET.parse(paths[0]).iter() if e.tag.endswith("rect") and e.get("x")]
    widths = [float(bar.get("width") or 0) for bar in bars]
    speeds = [result["tokens_per_s"] for result in report["results"]]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [speed / speeds[0] for speed in speeds], rel=0.01
    )
