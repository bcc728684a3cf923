import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from orchestrator.chat_template import ChatTemplateError
from orchestrator.detokenizer import Detokenizer
from orchestrator.text import TextCodec
from stagespec.vocabulary import Vocabulary, read_vocabulary
from tests.fakes import write_model

BYTES = [bytes([byte]) for byte in range(256)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return TextCodec.load(
        write_model(folder, [*BYTES, b"ab"], ["<|user|>", "<|assistant|>"], chat_template=TEMPLATE)
    )


@given(st.lists(st.binary(max_size=5), max_size=12), st.sets(st.integers(0, 11)))
def test_text_in_pieces_is_the_text_at_once(tokens, special):
    vocabulary = Vocabulary(tuple(tokens), frozenset(special))
    detokenizer = Detokenizer(vocabulary)
    pieces = [detokenizer.decode(i) for i in range(len(tokens))]
    whole = b"".join(token for i, token in enumerate(tokens) if i not in special)
    assert "".join(pieces) + detokenizer.flush() == whole.decode(errors="replace")


@given(st.text(max_size=20))
def test_no_piece_of_valid_text_has_a_broken_character(text):
    text = text.replace("\ufffd", "")
    detokenizer = Detokenizer(Vocabulary(tuple(BYTES), frozenset()))
    pieces = [detokenizer.decode(byte) for byte in text.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


def test_impossible_bytes_are_replaced_at_once():
    detokenizer = Detokenizer(Vocabulary((b"\xf0\x9f", b"\xff", b"a"), frozenset()))
    assert [detokenizer.decode(i) for i in (0, 1, 2)] == ["", "\ufffd\ufffd", "a"]


def test_continuation_keeps_the_space_that_sentencepiece_drops_at_the_start():
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581Hello": 0, "\u2581you": 1}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert tokenizer.decode([0, 1]) == "Hello you"
    detokenizer = Detokenizer(read_vocabulary(tokenizer))
    assert [detokenizer.decode(0), detokenizer.decode(1)] == [" Hello", " you"]


def test_plain_text_and_back(codec):
    ids = codec.encode("aé")
    assert ids == list("aé".encode())
    assert codec.decode(ids) == "aé"
    assert codec.decode([257, 97]) == "<|user|>a"
    assert codec.encode("") == []


def test_beginning_of_sequence_token_is_added_to_text_only(tmp_path):
    folder = write_model(
        tmp_path, BYTES, ["<s>"], bos="<s>", chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    codec = TextCodec.load(folder)
    assert codec.encode("a") == [256, 97]
    assert codec.encode("") == [256]
    assert codec.encode_chat([{"role": "user", "content": "a"}]) == [256, 97]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    path = write_model(tmp_path, BYTES) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    assert TextCodec.load(tmp_path).encode("abc") == [97, 98, 99]


def test_chat_is_rendered_by_the_template(codec):
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [257, *b"hi", 10, 258]


def test_chat_template_refusal_is_told_and_its_failure_is_not(tmp_path, codec):
    with pytest.raises(ChatTemplateError, match="no system role"):
        codec.encode_chat([{"role": "system", "content": ""}])
    folder = write_model(tmp_path, BYTES, chat_template="{{ messages[5].content.secret }}")
    with pytest.raises(ChatTemplateError, match=r"cannot render it$"):
        TextCodec.load(folder).encode_chat([{"role": "user", "content": ""}])


def test_chat_template_cannot_reach_python(tmp_path):
    source = "{{ messages.__class__.__base__.__subclasses__() }}"
    codec = TextCodec.load(write_model(tmp_path, BYTES, chat_template=source))
    with pytest.raises(ChatTemplateError):
        codec.encode_chat([{"role": "user", "content": ""}])


def test_chat_template_tools(tmp_path):
    source = (
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}"
        "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('') }}"
    )
    codec = TextCodec.load(write_model(tmp_path, BYTES, chat_template=source))
    assert codec.decode(codec.encode_chat([{"role": "user", "content": ""}])) == '{"a": "<é>"}1'


def test_template_file_wins_over_the_configuration(tmp_path):
    write_model(tmp_path, BYTES, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    codec = TextCodec.load(tmp_path)
    assert codec.decode(codec.encode_chat([{"role": "user", "content": ""}])) == "new"


def test_named_templates_give_the_default_one(tmp_path):
    write_model(tmp_path, BYTES)
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    config = {"chat_template": templates, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec = TextCodec.load(tmp_path)
    assert codec.decode(codec.encode_chat([{"role": "user", "content": ""}])) == "y"


def test_what_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        TextCodec.load(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        TextCodec.load(write_model(tmp_path, BYTES)).encode_chat([{"role": "user", "content": ""}])
    write_model(tmp_path, BYTES, chat_template="a\n{% if %}")
    with pytest.raises(ValueError, match="wrong in line 2"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        TextCodec.load(tmp_path)
