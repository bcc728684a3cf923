"""From text files to a table: selection, limits, refusals, and the command."""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deploy.cli import build_ngram
from deploy.errors import SetupError
from services.ngram import builder, corpus
from services.ngram.builder import build_table
from services.ngram.corpus import CorpusError
from services.ngram.table import NgramTable
from stagespec.vocabulary import read_vocabulary

WORDS = [f"w{number}" for number in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({word: token_id for token_id, word in enumerate(WORDS)}, unk_token="w0")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of random words in lines, a hidden one, and one with another ending."""
    draw = np.random.default_rng(1)
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        words = np.minimum(draw.geometric(0.15, size=(60, 9)), 29)
        folder.joinpath(name).write_text("\n".join(" ".join(f"w{w}" for w in line) for line in words))
    (folder / ".hidden.txt").write_text("w29 " * 500)
    (folder / "binary.pyc").write_bytes(b"\xff\xfe\x00")
    return folder


def build(tmp_path: Path, tokenizer: Tokenizer, paths: list[Path], name: str = "table", **options):
    options = {"suffixes": [".txt"], **options}
    summary = build_table(paths, tokenizer, tmp_path / name, **options)
    return summary, (tmp_path / name).read_bytes()


def test_the_same_input_gives_the_same_bytes_however_it_is_cut(tmp_path, tokenizer, folder, monkeypatch):
    summary, content = build(tmp_path, tokenizer, [folder])
    assert build(tmp_path, tokenizer, [folder / "a.txt", folder], "named twice")[0].num_files == 3
    assert build(tmp_path, tokenizer, [folder], "again")[1] == content
    monkeypatch.setattr(builder, "CHUNK_TOKENS", 50)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 333)
    monkeypatch.setattr(corpus, "BATCH_BYTES", 400)
    assert build(tmp_path, tokenizer, [folder], "in small pieces")[1] == content

    assert summary.num_tokens == 3 * 60 * 9
    assert summary.num_bytes == len(content)
    assert summary.num_kept == summary.num_counted
    assert summary.tokenizer_hash == read_vocabulary(tokenizer).hash
    assert summary.vocabulary_size == len(WORDS)


@pytest.mark.parametrize("share", [0.97, 0.7, 0.45, 0.2])
def test_the_size_cap_is_kept_and_used(tmp_path, tokenizer, folder, share):
    whole, _ = build(tmp_path, tokenizer, [folder], order=4)
    cap = 4096 + int((whole.num_bytes - 4096) * share)
    capped, content = build(tmp_path, tokenizer, [folder], "capped", order=4, max_bytes=cap)

    assert cap - 100 < len(content) <= cap
    lost = [kept < counted for kept, counted in zip(capped.num_kept, capped.num_counted, strict=True)]
    # Only the longest n-grams go, and shorter ones only when no longer one is left.
    shortest_lost = lost.index(True)
    assert all(kept == 0 for kept in capped.num_kept[shortest_lost + 1 :])
    table = NgramTable(tmp_path / "capped")
    for context in np.random.default_rng(2).integers(0, len(WORDS), size=(200, 3)).tolist():
        assert abs(table.probabilities(table.find(context), np.arange(len(WORDS))).sum() - 1.0) < 1e-6


def test_the_rarest_go_first(tmp_path, tokenizer):
    text = tmp_path / "text"
    text.write_text("\n".join(["w1 w2 w3"] * 5 + ["w4 w5 w6"] * 2 + ["w7 w8 w9"]))
    whole, _ = build(tmp_path, tokenizer, [text])
    build(tmp_path, tokenizer, [text], "capped", max_bytes=whole.num_bytes - 1)
    table = NgramTable(tmp_path / "capped")
    assert [length for length, _ in table.find([1, 2])] == [2, 3]
    build(tmp_path, tokenizer, [text], "frequent", min_count=3)
    table = NgramTable(tmp_path / "frequent")
    assert [length for length, _ in table.find([1, 2])] == [2, 3]
    assert table.find([4, 5]) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text; a table of order 3 needs a file of 3 tokens or more"),
        (b"w1 w2", "has 2 tokens; a table of order 3 needs a file of 3 tokens or more"),
        (b"w1 w2 w3 \xff w4", "is not UTF-8 text: byte 0xff, 9 bytes in"),
        (b"w1 w2 w3 \xc3", "is not UTF-8 text: byte 0xc3, 9 bytes in"),
    ],
)
def test_a_useless_file_is_named(tmp_path, tokenizer, content, message):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    with pytest.raises(CorpusError, match=re.escape(f"{bad} {message}")):
        build(tmp_path, tokenizer, [bad])
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 6}, "order is 6 and must be from 2 to 5"),
        ({"min_count": 0}, "min_count is 0 and must be at least 1"),
        ({"max_bytes": 4000}, "max_bytes is 4000; a table for 30 token ids needs .* at least"),
        ({"paths": [Path("/nowhere/at/all")]}, "/nowhere/at/all does not exist"),
        ({"output": Path("/nowhere/table")}, "the folder /nowhere does not exist"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path, tokenizer, folder, options, message):
    arguments = {"paths": [folder], "output": tmp_path / "table", **options}
    with pytest.raises(ValueError, match=message):
        build_table(arguments.pop("paths"), tokenizer, arguments.pop("output"), **arguments)


def test_too_much_text_is_refused_before_memory_is(tmp_path, tokenizer, folder, monkeypatch):
    monkeypatch.setattr(builder, "MAX_NGRAMS", 100)
    with pytest.raises(CorpusError, match="the limit is 100; use less text or a lower order"):
        build(tmp_path, tokenizer, [folder])


def test_no_ngram_spans_two_files(tmp_path, tokenizer):
    (tmp_path / "one").write_text("w1 w2 w3")
    (tmp_path / "two").write_text("w4 w5 w6")
    build(tmp_path, tokenizer, [tmp_path / "one", tmp_path / "two"])
    table = NgramTable(tmp_path / "table")
    assert table.find([3]) == []
    assert len(table.find([1])) == 1


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    build_ngram.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["build-ngram", *arguments])


def test_the_command_prints_one_json_object_and_progress_apart(tmp_path, tokenizer, folder, capsys):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    output = tmp_path / "table.ngram"
    arguments = [
        "--tokenizer",
        str(tmp_path),
        "--output",
        str(output),
        "--max-bytes",
        "6K",
        "--suffix",
        ".txt",
    ]
    args = parse(*arguments, "--json", str(folder))
    assert args.run(args) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["num_bytes"] == output.stat().st_size <= 6 * 1024
    assert summary["num_tokens"] == 3 * 60 * 9
    assert "MB counted" in printed.err

    args = parse(*arguments, str(folder / "missing"))
    with pytest.raises(SetupError, match=f"^{folder / 'missing'} does not exist or is no file or folder$"):
        args.run(args)
    args = parse("--tokenizer", str(folder), "--output", str(output), str(folder))
    with pytest.raises(SetupError, match=r"there is no file .*tokenizer.json"):
        args.run(args)
    (tmp_path / "tokenizer.json").write_text("{}")
    args = parse(*arguments, str(folder))
    with pytest.raises(SetupError, match=r"tokenizer.json is no tokenizer"):
        args.run(args)


def test_sizes_and_times_are_read_and_written_for_people():
    assert [build_ngram.parse_bytes(text) for text in ("10", "2K", "16M", "1GiB")] == [
        10,
        2048,
        16 << 20,
        1 << 30,
    ]
    for text in ("", "M", "1.5M", "-1", "3Q"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            build_ngram.parse_bytes(text)
    assert build_ngram.time_left(25, 100, 10.0) == "about 30 s left"
    assert build_ngram.time_left(1, 100, 10.0) == "about 16 min left"
    assert build_ngram.time_left(0, 100, 10.0) == "time left unknown"
