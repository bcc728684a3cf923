import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.detokenizer import Detokenizer
from orchestrator.stopping import Finish, Stopper, StopRules
from stagespec.v1.generation_pb2 import FinishReason
from stagespec.vocabulary import Vocabulary

EMOJI = "😀".encode()
TOKENS = (b"E", b"N", b"D", b"ENDING", b"a", b"aa", EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"\xff", b"<eos>")
VOCABULARY = Vocabulary(TOKENS, frozenset({10}))
EOS, STOP = 10, 4


def run(rules: StopRules, blocks: list[list[int]]) -> tuple[list[int], list[str], Finish | None]:
    """Ids, text of each block, and why it ended."""
    stopper = Stopper(rules, Detokenizer(VOCABULARY))
    ids: list[int] = []
    texts = []
    for block in blocks:
        output = stopper.clip(block)
        assert len(output.texts) == len(output.token_ids)
        ids += output.token_ids
        texts.append("".join(output.texts))
        if output.finish is not None:
            return ids, texts, output.finish
    return ids, texts, None


def test_stop_token_inside_a_block_comes_before_the_cap():
    rules = StopRules(max_tokens=5, token_ids=frozenset({2}))
    ids, texts, finish = run(rules, [[0, 1, 2, 5, 5, 5]])
    assert ids == [0, 1, 2]
    assert texts == ["EN"]
    assert finish == Finish(FinishReason.FINISH_REASON_STOP, token_id=2)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("blocks", "kept", "text"),
    [
        ([[4, 0, 1], [2, 4]], [4, 0, 1, 2], "a"),  # the border after "EN"
        ([[4, 3, 4]], [4, 3], "a"),  # a token that holds more than the string
    ],
)
def test_stop_string_over_tokens_and_blocks(blocks, kept, text, include):
    rules = StopRules(max_tokens=9, strings=("END",), include_in_text=include)
    ids, texts, finish = run(rules, blocks)
    assert ids == kept
    assert "".join(texts) == text + ("END" if include else "")
    assert finish == Finish(FinishReason.FINISH_REASON_STOP, string="END")
    if len(blocks) > 1:
        assert texts[0] == "a", "what may become the stop string was shown"


def test_text_that_did_not_become_a_stop_string_comes_later():
    ids, texts, finish = run(StopRules(max_tokens=9, strings=("END",)), [[0, 1], [4]])
    assert (ids, texts, finish) == ([0, 1, 4], ["", "ENa"], None)


@pytest.mark.parametrize(("include", "text"), [(False, "E"), (True, "E<eos>")])
def test_end_of_sequence(include, text):
    rules = StopRules(max_tokens=9, eos_token_ids=frozenset({EOS, 9}), include_in_text=include)
    ids, texts, finish = run(rules, [[0, EOS, 1]])
    assert (ids, texts) == ([0, EOS], [text])
    assert finish == Finish(FinishReason.FINISH_REASON_EOS, token_id=EOS)
    assert run(rules, [[0, 9]])[2] == Finish(FinishReason.FINISH_REASON_EOS, token_id=9)


def test_context_length():
    ids, _, finish = run(StopRules(max_tokens=9, num_context_left=2), [[0, 1, 2]])
    assert ids == [0, 1]
    assert finish == Finish(FinishReason.FINISH_REASON_CONTEXT_LENGTH)


def test_unfinished_character_is_replaced_at_the_end():
    assert run(StopRules(max_tokens=2), [[4, 6]])[1] == ["a\ufffd"]


def naive(rules: StopRules, ids: list[int]) -> tuple[list[int], str, Finish | None]:
    """Everything decoded anew after each token."""

    def text_of(kept: list[int], final: bool) -> str:
        detokenizer = Detokenizer(VOCABULARY)
        text = "".join(detokenizer.decode(i) for i in kept)
        return text + (detokenizer.flush() if final else "")

    for n in range(1, len(ids) + 1):
        last, kept = ids[n - 1], ids[:n]
        if n > rules.min_tokens:
            for among, reason in (
                (rules.eos_token_ids, FinishReason.FINISH_REASON_EOS),
                (rules.token_ids, FinishReason.FINISH_REASON_STOP),
            ):
                if last in among:
                    detokenizer = Detokenizer(VOCABULARY)
                    text = "".join(detokenizer.decode(i) for i in kept[:-1])
                    if rules.include_in_text:
                        text += detokenizer.decode(last, show_special=True)
                    return kept, text + detokenizer.flush(), Finish(reason, token_id=last)
            before, text = text_of(kept[:-1], False), text_of(kept, False)
            for end in range(len(before) + 1, len(text) + 1):
                endings = [s for s in rules.strings if text[:end].endswith(s)]
                if endings:
                    string = max(endings, key=len)
                    cut = end if rules.include_in_text else end - len(string)
                    return kept, text[:cut], Finish(FinishReason.FINISH_REASON_STOP, string=string)
        if n == rules.max_tokens:
            return kept, text_of(kept, True), Finish(FinishReason.FINISH_REASON_LENGTH)
        if n == rules.num_context_left:
            return kept, text_of(kept, True), Finish(FinishReason.FINISH_REASON_CONTEXT_LENGTH)
    return ids, text_of(ids, False), None


@given(
    ids=st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    strings=st.lists(
        st.sampled_from(["END", "D", "EN", "aaa", "aE", "😀a", "a<", "\ufffd"]), max_size=3, unique=True
    ),
    rules=st.builds(
        StopRules,
        max_tokens=st.integers(1, 14),
        num_context_left=st.none() | st.integers(1, 14),
        min_tokens=st.integers(0, 5),
        token_ids=st.frozensets(st.integers(0, 9), max_size=1),
        eos_token_ids=st.frozensets(st.sampled_from([EOS, 9]), max_size=2),
        include_in_text=st.booleans(),
    ),
)
def test_same_as_decoding_everything_anew_after_each_token(ids, cuts, strings, rules):
    rules = replace(rules, strings=tuple(strings))
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    blocks = [ids[a:b] for a, b in itertools.pairwise(borders)]
    kept, texts, finish = run(rules, blocks)
    expected_ids, expected_text, expected_finish = naive(rules, ids)
    assert (kept, finish) == (expected_ids, expected_finish)
    shown = "".join(texts)
    if finish is not None:
        assert shown == expected_text
    else:
        held = expected_text.removeprefix(shown)
        assert expected_text == shown + held
        # Only what may become a stop string is held back, and all of that is.
        assert held == max(
            (p for s in strings for n in range(len(s)) if expected_text.endswith(p := s[:n])),
            key=len,
            default="",
        )


def test_end_tokens_are_what_min_tokens_bans():
    rules = StopRules(max_tokens=9, min_tokens=2, token_ids=frozenset({7}), eos_token_ids=frozenset({EOS}))
    assert rules.end_token_ids == [7, EOS]
