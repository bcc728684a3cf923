import math
from dataclasses import replace

import grpc
import pytest

from orchestrator.request import ServedModel, settle
from orchestrator.settings import SpeculationSettings
from stagespec.rpc import RpcError
from stagespec.v1.generation_pb2 import GenerateRequest
from tests.serving import codec_of, make_request

MODEL = ServedModel(
    vocabulary_size=17,
    max_context_length=64,
    max_cache_tokens=None,
    eos_token_ids=(16,),
    drafter_names=("ngram", "draft"),
    max_nodes=64,
    default_max_tokens=256,
    speculation=SpeculationSettings(),
)
NAN, INF = math.nan, math.inf

REFUSED = [
    # field, what the text must say, request
    ("prompt", "not set", GenerateRequest()),
    ("text", "no tokens", GenerateRequest(text="")),
    ("token_ids.token_ids", "empty", GenerateRequest(token_ids={})),
    ("token_ids.token_ids[1]", "17 is not from 0 to 16, and 1 more", make_request([0, 17, -1])),
    ("token_ids", "70 tokens, the model's context takes 64", make_request([1] * 70)),
    ("token_ids", "64 tokens, the model's context takes 64", make_request([1] * 64)),
    ("text", "70 tokens", GenerateRequest(text="A" * 70)),
    ("chat.messages", "at least one", GenerateRequest(chat={})),
    ("chat.messages[0].role", "empty", GenerateRequest(chat={"messages": [{"content": "A"}]})),
    ("chat", "no chat template", GenerateRequest(chat={"messages": [{"role": "user"}]})),
    ("request_id", "128", make_request(request_id="x" * 129)),
    ("request_id", "ASCII", make_request(request_id="a\nb")),
    *(
        (f"sampling.{name}", f"{value:g} is not {limit}", make_request(sampling={name: value}))
        for name, limit, values in [
            ("temperature", "from 0 to 100", [-0.1, 100.5, NAN, INF]),
            ("top_k", "from 1 to 17", [0, 18, -1]),
            ("top_p", "above 0 and at most 1", [0.0, 1.1, NAN]),
            ("min_p", "from 0 to 1", [-0.1, 1.1, NAN]),
            ("repetition_penalty", "from 0.01 to 100", [0.0, 0.009, -1.0, 101.0, NAN, INF]),
            ("frequency_penalty", "from -100 to 100", [-101.0, 101.0, NAN, -INF]),
            ("presence_penalty", "from -100 to 100", [-101.0, 101.0, NAN, INF]),
        ]
        for value in values
    ),
    *(
        (f"sampling.logit_bias{where}", said, make_request(sampling={"logit_bias": bias}))
        for where, said, bias in [
            ("[3]", "1001 is not from -1000 to 1000", {3: 1001}),
            ("[3]", "nan is not", {3: NAN}),
            ("[17]", "17 is not from 0 to 16", {17: 1}),
            ("", "1025 entries are more than 1024", dict.fromkeys(range(1025), 1.0)),
        ]
    ),
    ("stop.max_tokens", "0 is below 1", make_request(stop={"max_tokens": 0})),
    ("stop.max_tokens", "-5 is below 1", make_request(stop={"max_tokens": -5})),
    ("stop.min_tokens", "-1 is below 0", make_request(stop={"min_tokens": -1})),
    ("stop.min_tokens", "9 is above max_tokens, 8", make_request(stop={"min_tokens": 9, "max_tokens": 8})),
    ("stop.strings", "17 entries are more than 16", make_request(stop={"strings": ["A"] * 17})),
    ("stop.strings[1]", "0 bytes; 1 to 256", make_request(stop={"strings": ["A", ""]})),
    ("stop.strings[0]", "258 bytes; 1 to 256", make_request(stop={"strings": ["é" * 129]})),
    ("stop.token_ids", "65 entries are more than 64", make_request(stop={"token_ids": [1] * 65})),
    ("stop.token_ids[0]", "17 is not from 0 to 16", make_request(stop={"token_ids": [17]})),
    ("speculation.drafters[0]", "has: ngram, draft", make_request(speculation={"drafters": ["nope"]})),
    ("speculation.drafters[1]", "twice", make_request(speculation={"drafters": ["draft", "draft"]})),
    ("speculation.max_nodes", "65 is not from 1 to 64", make_request(speculation={"max_nodes": 65})),
    ("speculation.max_nodes", "0 is not from 1 to 64", make_request(speculation={"max_nodes": 0})),
    ("speculation.max_depth", "0 is below 1", make_request(speculation={"max_depth": 0})),
    ("speculation.max_rounds", "0 is below 1", make_request(speculation={"max_rounds": 0})),
    ("speculation.max_children", "0 is below 1", make_request(speculation={"max_children": 0})),
    ("num_logprobs", "21 is not from 0 to 20", make_request(num_logprobs=21)),
    ("num_logprobs", "-1 is not from 0 to 20", make_request(num_logprobs=-1)),
    ("chunk_granularity", "9 is no value", make_request(chunk_granularity=9)),
]  # fmt: skip


def refuse(request: GenerateRequest) -> RpcError:
    with pytest.raises(RpcError) as caught:
        settle(request, "id", codec_of(), MODEL)
    return caught.value


@pytest.mark.parametrize(("field", "said", "request_"), REFUSED)
def test_every_bad_value_is_refused_by_field_value_and_limit(field, said, request_):
    error = refuse(request_)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = [v for v in error.violations if v.field == field]
    assert said in violation.description


def test_everything_wrong_is_said_at_once_within_what_a_status_can_carry():
    both = refuse(make_request([99], sampling={"temperature": -1}, stop={"max_tokens": 0}))
    assert [v.field for v in both.violations] == [
        "token_ids.token_ids[0]",
        "sampling.temperature",
        "stop.max_tokens",
    ]
    many = refuse(make_request(sampling={"logit_bias": dict.fromkeys(range(1000), NAN)}))
    assert many.violations[-1].description == "1973 more fields are at fault"
    long = refuse(make_request(speculation={"drafters": ["x" * 100_000] * 50}))
    assert sum(len(v.description) for v in long.violations) < 4000


def test_defaults_are_filled_in():
    generation = settle(make_request([1, 2], request_id="mine"), "mine", codec_of(), MODEL)
    effective = generation.effective
    assert (effective.sampling.temperature, effective.sampling.top_k, effective.sampling.top_p) == (
        1.0,
        17,
        1.0,
    )
    assert (effective.sampling.repetition_penalty, effective.sampling.min_p) == (1.0, 0.0)
    assert (effective.stop.max_tokens, effective.stop.min_tokens) == (256, 0)
    speculation = effective.speculation
    assert list(speculation.drafters) == ["ngram", "draft"]
    assert (speculation.enabled, speculation.max_nodes, speculation.max_depth, speculation.max_rounds) == (
        True,
        24,
        8,
        4,
    )
    for message in (effective.sampling, effective.stop, speculation):
        for field in message.DESCRIPTOR.fields:
            assert not field.has_presence or message.HasField(field.name), field.name
    assert effective.sampling.seed == generation.sampling.seed
    assert generation.sampling.prompt_length == 2
    assert generation.rules.num_context_left == 62


def test_settings_without_effect_are_not_sent_to_the_stages():
    neutral = {"top_k": 17, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    sampling = settle(make_request(sampling=neutral), "id", codec_of(), MODEL).sampling
    assert not any(sampling.HasField(name) for name in neutral)
    used = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 0.5, "frequency_penalty": -1.0}
    sampling = settle(make_request(sampling=used), "id", codec_of(), MODEL).sampling
    assert {name: getattr(sampling, name) for name in used} == used


def test_each_request_without_a_seed_gets_its_own():
    seeds = {settle(make_request(), "id", codec_of(), MODEL).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    fixed = settle(make_request(sampling={"seed": 2**64 - 1}), "id", codec_of(), MODEL)
    assert fixed.sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("stop", "banned"),
    [
        ({"min_tokens": 3, "token_ids": [4]}, [4, 16]),
        ({"min_tokens": 3, "token_ids": [4], "ignore_eos": True}, [4]),
        ({"token_ids": [4]}, []),
    ],
)
def test_min_tokens_bans_what_would_end_the_generation(stop, banned):
    sampling = settle(make_request(stop=stop), "id", codec_of(), MODEL).sampling
    assert list(sampling.end_token_ids) == banned


def test_off_uses_no_drafter_and_names_choose_them():
    off = settle(make_request(speculation={"enabled": False}), "id", codec_of(), MODEL)
    assert off.drafters == ()
    assert list(off.effective.speculation.drafters) == []
    chosen = settle(make_request(speculation={"drafters": ["draft"]}), "id", codec_of(), MODEL)
    assert chosen.drafters == ("draft",)
    assert settle(make_request(), "id", codec_of(), MODEL).drafters is None


def test_a_limit_on_children_is_kept_and_without_one_there_is_none():
    chain = settle(make_request(speculation={"max_children": 1, "fixed_size": True}), "id", codec_of(), MODEL)
    assert (chain.limits.max_children, chain.limits.fixed_size) == (1, True)
    assert chain.effective.speculation.max_children == 1
    plain = settle(make_request(speculation={"max_nodes": 7}), "id", codec_of(), MODEL)
    assert (plain.limits.max_children, plain.limits.fixed_size) == (None, False)
    assert plain.effective.speculation.max_children == 7


def test_a_model_without_limits_or_end_tokens_is_served():
    model = replace(MODEL, max_context_length=None, eos_token_ids=())
    generation = settle(make_request([1] * 1000), "id", codec_of(), model)
    assert generation.rules.num_context_left is None
    assert generation.rules.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: SpeculationSettings(max_depth=-1), r"speculation\.max_depth is -1"),
        (lambda: SpeculationSettings(node_price=NAN), r"speculation\.node_price is nan"),
    ],
)
def test_settings_out_of_range_are_named(make, setting):
    with pytest.raises(ValueError, match=setting):
        make()
