"""The table's file: what is read back, and what is refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from services.ngram import layout
from services.ngram.counts import MAX_VOCABULARY_SIZE, SEPARATOR, count_ngrams
from services.ngram.katz import fit
from services.ngram.layout import TableError
from services.ngram.table import NgramTable, store

TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1, SEPARATOR, 3, 3, 0, 1]


def write(path: Path, text: list[int] = TEXT, vocabulary_size: int = 5, order: int = 3) -> Path:
    counted = count_ngrams(np.array(text), order)
    kept = [np.ones(len(keys), dtype=np.bool_) for keys in counted.keys]
    store(path, fit(counted, kept, vocabulary_size), "the tokenizer")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "table.ngram")


def test_a_table_knows_what_it_was_made_for(path):
    table = NgramTable(path, order=3, tokenizer_hash="the tokenizer", vocabulary_size=5)
    assert (table.order, table.vocabulary_size, table.tokenizer_hash) == (3, 5, "the tokenizer")
    assert table.num_bytes == path.stat().st_size


def test_continuations_come_the_most_probable_first(path):
    table = NgramTable(path)
    contexts = table.find([0, 1])
    assert [length for length, _ in contexts] == [2, 3]
    assert [tokens.tolist() for tokens in table.leading(contexts, 2)] == [[1, 0], [2, 3], [2, 3]]
    assert table.find([4]) == []  # never seen
    assert [length for length, _ in table.find([4, 1])] == [2]
    assert table.find([]) == []


def test_the_probability_of_a_token_does_not_depend_on_what_else_is_asked(path):
    table = NgramTable(path)
    for context in ([], [0], [0, 1], [4, 3]):
        contexts = table.find(context)
        whole = table.probabilities(contexts, np.arange(5))
        for chosen in ([3], [4, 0], [2, 1, 3]):
            assert table.probabilities(contexts, np.array(chosen)).tolist() == whole[chosen].tolist()


def test_ids_of_large_vocabularies_are_told_apart(tmp_path):
    high = MAX_VOCABULARY_SIZE - 1
    text = [high, high - 1, high, high - 1, high - (1 << 16), high, high - 1, high]
    table = NgramTable(write(tmp_path / "large", text, MAX_VOCABULARY_SIZE))
    contexts = table.find([high, high - 1])
    assert [tokens.tolist() for tokens in table.leading(contexts, 1)] == [[high], [high], [high]]
    probabilities = table.probabilities(contexts, np.arange(MAX_VOCABULARY_SIZE))
    assert abs(probabilities.sum() - 1.0) < 1e-6
    assert int(probabilities.argmax()) == high


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"order": 4}, "order is 4 and n-gram table .* has order 3"),
        (
            {"tokenizer_hash": "another"},
            "for the tokenizer with hash the tokenizer, and this one has another",
        ),
        ({"vocabulary_size": 6}, "for 5 token ids, not 6"),
    ],
)
def test_a_table_for_something_else_is_refused_with_both_values(path, wanted, message):
    with pytest.raises(TableError, match=message) as refusal:
        NgramTable(path, **wanted)
    assert str(path) in str(refusal.value)


def test_every_altered_byte_is_noticed(path):
    content = path.read_bytes()
    places = [*range(64), *range(64, len(content), 29), len(content) - 1]
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(TableError, match=str(path)):
            NgramTable(path)


@pytest.mark.parametrize("size", [0, 7, 100, layout.HEADER_BYTES, -1, -9])
def test_a_truncated_table_is_refused(path, size):
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(TableError, match=f"{path} (has . bytes|has 100 bytes|is damaged: it has)"):
        NgramTable(path)


def test_a_table_that_has_grown_is_refused(path):
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(TableError, match="its header says"):
        NgramTable(path)


def test_another_version_is_refused_by_name(path):
    content = bytearray(path.read_bytes())
    content[8:12] = (2).to_bytes(4, "little")
    content[24:56] = hashlib.sha256(content[:24] + content[56:]).digest()
    path.write_bytes(content)
    with pytest.raises(TableError, match=f"{path} is an n-gram table of version 2; this program reads 1"):
        NgramTable(path)


def test_what_is_no_table_is_refused(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("not a table " * 1000)
    with pytest.raises(TableError, match=f"{other} is no n-gram table"):
        NgramTable(other)
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(TableError, match=f"{missing} cannot be read"):
            NgramTable(missing)


def test_a_failed_write_leaves_the_old_table(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(layout.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(path, [1, 2, 3, 4])
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
