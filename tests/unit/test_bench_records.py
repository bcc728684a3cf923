"""Records on disk: what survives, what is refused; and which measurements are left."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.bench.plan import all_units, pending
from deploy.bench.records import FILE, Records
from deploy.bench.settings import Settings
from deploy.errors import SetupError

SETTINGS = {"modes": ("off", "staged"), "max_tokens": 8, "config": {"a": [1, 2]}}


def test_records_come_back_and_the_newest_counts(tmp_path):
    folder = tmp_path / "new" / "folder"
    with Records(folder, SETTINGS) as records:
        records.add(("generate", "off", 0), {"seconds": 1.5, "ids": (1, 2)})
        records.add(("generate", "hf", 0), {"seconds": 2.0})
        records.add(("generate", "off", 0), {"seconds": 1.25})
        records.add(("machine",), {"flops": 1e9})
        here = records.of("generate")
    with Records(folder, SETTINGS) as records:
        assert records.of("generate") == here == {("hf", 0): {"seconds": 2.0}, ("off", 0): {"seconds": 1.25}}
        assert list(records.of("generate")) == [("hf", 0), ("off", 0)]
        assert records.get(("machine",)) == {"flops": 1e9}
        assert records.get(("machine", "other")) is None
        assert ("generate", "off", 1) not in records


def test_without_a_folder_they_are_kept_in_memory():
    with Records(None, SETTINGS) as records:
        records.add(("a",), {"b": (1,)})
        assert records.get(("a",)) == {"b": [1]}


@settings(max_examples=30)
@given(st.integers(1, 400))
def test_a_torn_end_costs_no_whole_record(tmp_path_factory, num_lost):
    folder = tmp_path_factory.mktemp("torn")
    with Records(folder, SETTINGS) as records:
        for index in range(5):
            records.add(("generate", index), {"seconds": index, "text": "ü" * index})
    path = folder / FILE
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - num_lost)])
    whole = path.read_bytes().count(b"\n")
    with Records(folder, SETTINGS) as records:
        assert list(records.of("generate")) == [(index,) for index in range(whole - 1)]
        records.add(("generate", 9), {"seconds": 9})
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == max(whole, 1) + 1
    with Records(folder, SETTINGS) as records:
        assert records.get(("generate", 9)) == {"seconds": 9}


def test_other_settings_are_refused_by_name(tmp_path):
    with Records(tmp_path, SETTINGS) as records:
        records.add(("a",), {})
    for other, says in [
        (SETTINGS | {"max_tokens": 16}, "max_tokens was 8 and is 16"),
        (SETTINGS | {"config": {"a": [1, 3]}}, "config was"),
        ({"modes": ("off", "staged"), "max_tokens": 8}, "config was"),
        (SETTINGS | {"new": None}, "new was"),
    ]:
        with pytest.raises(SetupError, match=says), Records(tmp_path, other):
            pass
    with Records(tmp_path, SETTINGS) as records:
        assert ("a",) in records


def test_what_is_no_file_of_ours_is_refused_and_not_touched(tmp_path):
    path = tmp_path / FILE
    for content, says in [
        (b'{"settings": {}}\nnonsense\n{"key": ["a"]}\n', "line 2 is damaged"),
        (b'{"key": ["a"]}\n', "line 1 has no settings"),
        (b"[]\n", "line 1 is damaged"),
        (b'{"settings": {}}\n{"key": []}\n', "line 2 has no key"),
    ]:
        path.write_bytes(content)
        with pytest.raises(SetupError, match=says), Records(tmp_path, {}):
            pass
        assert path.read_bytes() == content
    with pytest.raises(SetupError, match="cannot be written"), Records(path, {}):
        pass


def test_two_runs_cannot_share_a_folder(tmp_path):
    with (
        Records(tmp_path, SETTINGS),
        pytest.raises(SetupError, match="in use by another run"),
        Records(tmp_path, SETTINGS),
    ):
        pass
    with Records(tmp_path, SETTINGS):
        pass


@given(st.data())
def test_a_group_is_left_until_all_of_it_is_there(data):
    plan = Settings(
        modes=("off", "ngram"),
        peers=("hf",),
        num_pairs=2,
        contexts=(64, 128),
        row_counts=(1, 2),
        prompt_lengths=(32,),
        session_counts=(1, 2),
    )
    units = all_units(plan, num_prompts=2)
    there = set(data.draw(st.sets(st.integers(0, len(units) - 1))))
    skipped = data.draw(st.sets(st.sampled_from(["hf", "off configured", "verify at 64", "2 sessions"])))
    records = Records(None, {})
    for index in there:
        records.add(units[index].key, {})
    left = pending(units, records, skipped)
    assert left == [unit for unit in units if unit in left], "in the order of the plan"
    for unit in units:
        partners = [
            other
            for other in units
            if other.group == unit.group and other.subject not in skipped and other.case not in skipped
        ]
        is_whole = all(partner.key in records for partner in partners)
        assert (unit in left) == (unit in partners and not is_whole)
