"""Generation through the public API, over real gRPC, with fakes for stages: what comes out, where it ends."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.settings import SpeculationSettings
from stagespec.v1.draft_pb2 import DraftTree
from stagespec.v1.generation_pb2 import ChunkGranularity, FinishReason, GenerateRequest, StopOptions
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.fakes import (
    ScriptedDrafter,
    TableVerifier,
    always,
    chain,
    hostile_scripts,
    keep_hint,
    level_by_level,
    oracle,
    random_target,
    random_trees,
    scripted_target,
)
from tests.oracle import oracle_draw
from tests.serving import Generated, codec_of, serve

CODEC = codec_of()
SIZE = len(CODEC.vocabulary.tokens)
EOS = SIZE - 1
TARGET = random_target(SIZE)
OFF = {"enabled": False}
DEPTH = 6


def verifier(target: Any = TARGET, **info: Any) -> TableVerifier:
    return TableVerifier(target, CODEC.vocabulary, **info)


def drafter(name: str, script: Any, **info: Any) -> ScriptedDrafter:
    return ScriptedDrafter(name, script, CODEC.vocabulary, **info)


def plain(target: Any, prompt: list[int], num_tokens: int, **sampling: Any) -> list[int]:
    """Plain decoding, written down once more."""
    params = SamplingParams(prompt_length=len(prompt), **sampling)
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(oracle_draw(target(tuple(context)), params, context, len(context)))
    return context[len(prompt) :]


def check_identities(generated: Generated) -> None:
    """What must hold for the numbers of any generation."""
    stats, usage = generated.end.speculation, generated.end.usage
    assert len(generated.token_ids) == len(generated.origins) == usage.num_completion_tokens
    assert sum(stats.accepted_histogram) == stats.num_steps
    assert sum(k * n for k, n in enumerate(stats.accepted_histogram)) == stats.num_accepted
    assert usage.num_completion_tokens <= stats.num_steps + stats.num_accepted
    if generated.end.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        # Depth is limited to what is left, so the length limit never cuts a step.
        assert usage.num_completion_tokens == stats.num_steps + stats.num_accepted
    assert sum(d.num_proposed for d in stats.drafters) == stats.num_drafted
    assert sum(d.num_accepted for d in stats.drafters) == stats.num_accepted
    for each in stats.drafters:
        mine = [entry for entry in stats.ranks if entry.drafter == each.name]
        assert sum(entry.num_accepted for entry in mine) == each.num_accepted
        assert sum(entry.num_reached for entry in mine) <= each.num_proposed
    work = stats.decode_work
    assert work.num_steps == stats.num_steps - 1
    assert work.num_tokens == usage.num_completion_tokens - len(generated.chunks[0].token_ids)
    assert [stage.name for stage in work.stages] == [*(each.name for each in stats.drafters), "target"]
    assert work.stages[-1].num_passes == work.num_steps
    origins = Counter(generated.origins)
    for each in stats.drafters:
        assert origins[each.name] <= each.num_accepted <= each.num_proposed


@pytest.mark.parametrize("name", hostile_scripts(TARGET, SIZE))
async def test_hostile_drafter_costs_speed_only(name):
    broken = {"outside the vocabulary", "too deep", "too wide", "cycle", "parents out of range"}
    broken |= {"lists of different lengths", "log_probs not numbers", "log_probs above 0"}
    bad = drafter("bad", hostile_scripts(TARGET, SIZE)[name])
    good = drafter("good", oracle(TARGET))
    async with serve(CODEC, verifier(), [bad, good], speculation=SpeculationSettings(max_nodes=8)) as o:
        for i, sampling in enumerate([{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]):
            prompt = [i, 2, 3]
            expected = plain(TARGET, prompt, 40, **sampling)
            for drafters in (["bad"], ["bad", "good"]):
                generated = await o.generate(
                    prompt, sampling=sampling, stop={"max_tokens": 40}, speculation={"drafters": drafters}
                )
                assert generated.token_ids == expected
                assert generated.text == CODEC.decode([t for t in expected if t != EOS])
                check_identities(generated)
                stats = generated.end.speculation.drafters[0]
                assert (stats.num_dropped_nodes > 0) >= (name in broken)
                assert (stats.num_failures, stats.num_skipped_steps) == (0, 0)
        assert all(len(tree.token_ids) <= 8 for tree in o.verifier.trees)


async def test_the_oracle_needs_few_steps_and_all_origins_are_told():
    first, second = drafter("first", oracle(TARGET, 2)), drafter("second", oracle(TARGET))
    settings = SpeculationSettings(max_depth=DEPTH)
    async with serve(CODEC, verifier(), [first, second], speculation=settings) as o:
        generated = await o.generate(stop={"max_tokens": 63}, sampling={"temperature": 0.7, "seed": 1})
    check_identities(generated)
    stats = generated.end.speculation
    assert stats.num_steps == 63 / (DEPTH + 1)
    assert stats.num_rounds == stats.num_steps
    assert list(stats.accepted_histogram) == [0] * DEPTH + [9]
    assert generated.origins[: DEPTH + 1] == ["first"] * 2 + ["second"] * 4 + ["target"]
    assert [(d.num_proposed, d.num_accepted, d.num_calls, d.num_passes) for d in stats.drafters] == [
        (18, 18, 9, 9),
        (36, 36, 9, 9),
    ]


@pytest.mark.parametrize("max_nodes", [1, 8, 24])
async def test_same_seed_same_tokens_in_every_mode(max_nodes):
    drafters = [drafter("ngram", oracle(TARGET, 2)), drafter("draft", oracle(TARGET))]
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    async with serve(CODEC, verifier(), drafters) as o:
        expected = plain(TARGET, [1, 2, 3], 60, **sampling)
        for names in ([], ["ngram"], ["draft"], ["ngram", "draft"], ["draft", "ngram"]):
            speculation = {"drafters": names, "max_nodes": max_nodes} if names else OFF
            generated = await o.generate(sampling=sampling, stop={"max_tokens": 60}, speculation=speculation)
            assert generated.token_ids == expected
            assert list(generated.end.effective.speculation.drafters) == names


async def test_requests_at_once_don_t_mix():
    prompts = {seed: [seed, seed + 1] * (seed + 1) for seed in range(8)}
    async with serve(CODEC, verifier(), [drafter("draft", oracle(TARGET, 3))]) as o:
        for order in (range(8), reversed(range(8))):
            jobs = {
                seed: asyncio.create_task(
                    o.generate(
                        prompts[seed],
                        sampling={"temperature": 1.0, "seed": seed, "top_k": 5 + seed},
                        stop={"max_tokens": 10 + 5 * seed},
                        speculation=OFF if seed % 2 else {},
                    )
                )
                for seed in order
            }
            for seed, job in jobs.items():
                expected = plain(
                    TARGET, prompts[seed], 10 + 5 * seed, temperature=1.0, seed=seed, top_k=5 + seed
                )
                assert (await job).token_ids == expected


async def test_requests_without_a_seed_differ_and_can_be_repeated():
    async with serve(CODEC, verifier(lambda context: [0.0] * SIZE)) as o:
        generations = await asyncio.gather(*(o.generate(stop={"max_tokens": 20}) for _ in range(8)))
        assert len({tuple(g.token_ids) for g in generations}) == 8
        again = await o.generate(stop={"max_tokens": 20}, sampling={"seed": generations[3].end.seed})
        assert again.token_ids == generations[3].token_ids
        assert again.end.effective.sampling.seed == again.end.seed


# Where it ends


@dataclass(frozen=True)
class Ending:
    """What the target says, the stop options, and what must come of it."""

    says: list[int]
    stop: dict[str, Any]
    ids: list[int]
    text: str
    reason: str
    matched: int | str | None = None
    eos: tuple[int, ...] = (EOS,)


ENDINGS = {
    "stop token before the cap": Ending(
        [9, 10, 11, 0, 1, 2], {"max_tokens": 5, "token_ids": [11]}, [9, 10, 11], "JK", "STOP", 11
    ),
    "stop token kept in the text": Ending(
        [9, 10, 11, 0], {"token_ids": [11], "include_in_text": True}, [9, 10, 11], "JKL", "STOP", 11
    ),
    "stop string": Ending([9, 10, 11, 0], {"strings": ["KL"]}, [9, 10, 11], "J", "STOP", "KL"),
    "stop string kept": Ending(
        [9, 10, 11, 0], {"strings": ["KL"], "include_in_text": True}, [9, 10, 11], "JKL", "STOP", "KL"
    ),
    "first of several strings": Ending([9, 10, 11, 0], {"strings": ["LA", "K"]}, [9, 10], "J", "STOP", "K"),
    "end of sequence in a draft": Ending([0, 1, 2, EOS, 3, 4], {}, [0, 1, 2, EOS], "ABC", "EOS", EOS),
    "end of sequence kept": Ending([0, EOS], {"include_in_text": True}, [0, EOS], "A<eos>", "EOS", EOS),
    "second end of sequence": Ending([0, 5, EOS], {}, [0, 5], "A", "EOS", 5, eos=(EOS, 5)),
    "no end of sequence": Ending([0, EOS, 1], {"max_tokens": 4}, [0, EOS, 1, 1], "ABB", "LENGTH", eos=()),
    "end of sequence ignored": Ending(
        [0, EOS, 1], {"max_tokens": 3, "ignore_eos": True}, [0, EOS, 1], "AB", "LENGTH"
    ),
    "min_tokens": Ending([EOS], {"max_tokens": 6, "min_tokens": 4}, [0, 0, 0, 0, EOS], "AAAA", "EOS", EOS),
    "min_tokens and a string": Ending(
        [0], {"max_tokens": 9, "min_tokens": 4, "strings": ["A"]}, [0] * 5, "AAAA", "STOP", "A"
    ),
    "length 1": Ending([0, 1, 2], {"max_tokens": 1}, [0], "A", "LENGTH"),
    "length 2": Ending([0, 1, 2], {"max_tokens": 2}, [0, 1], "AB", "LENGTH"),
    "length 3": Ending([0, 1, 2], {"max_tokens": 3}, [0, 1, 2], "ABC", "LENGTH"),
}  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2, 6])
@pytest.mark.parametrize("case", ENDINGS)
async def test_everything_is_cut_at_the_first_event_in_token_order(case, depth):
    ending = ENDINGS[case]
    target = scripted_target(SIZE, 3, ending.says)
    draft = drafter("draft", oracle(target, depth))
    async with serve(CODEC, verifier(target, eos_token_ids=ending.eos), [draft]) as o:
        generated = await o.generate(
            sampling={"temperature": 0.0},
            stop={"max_tokens": 40, **ending.stop},
            num_logprobs=1,
            speculation=OFF if depth == 0 else {},
        )
        if ending.stop.get("max_tokens") == 1:
            assert draft.num_requests == 0, "no draft fits into one token"
    end = generated.end
    assert generated.token_ids == ending.ids
    assert generated.text == ending.text
    assert FinishReason.Name(end.finish_reason) == f"FINISH_REASON_{ending.reason}"
    matched = end.WhichOneof("matched_stop")
    assert (getattr(end, matched) if matched else None) == ending.matched
    assert (
        len(generated.logprobs)
        == len(generated.origins)
        == end.usage.num_completion_tokens
        == len(ending.ids)
    )
    check_identities(generated)


@pytest.mark.parametrize("tokens", [(b"E", b"N", b"D", b"x"), (b"EN", b"D", b"x"), (b"ENDING", b"x")])
async def test_a_stop_string_over_tokens_and_steps_is_never_shown(tokens):
    codec = codec_of((b"-", *tokens), ())
    says = [0, *range(1, len(tokens) + 1)]
    target = scripted_target(len(says), 1, says)
    for depth in (0, 1, 2, 5):
        draft = ScriptedDrafter("draft", oracle(target, depth), codec.vocabulary)
        fake = TableVerifier(target, codec.vocabulary)
        async with serve(codec, fake, [draft]) as o:
            generated = await o.generate([0], sampling={"temperature": 0.0}, stop={"strings": ["END"]})
        assert generated.text == "-"
        assert generated.end.matched_string == "END"
        assert (
            generated.token_ids == says[: 1 + sum(len(b"".join(tokens[:i])) < 3 for i in range(len(tokens)))]
        )


# Sampling settings


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_log_probabilities_are_the_targets_own(temperature):
    drafters = [drafter("ngram", oracle(TARGET, 1)), drafter("draft", oracle(TARGET, 4))]
    options = {
        "sampling": {"temperature": temperature, "seed": 3, "top_k": 4},
        "stop": {"max_tokens": 40},
        "num_logprobs": 5,
    }
    async with serve(CODEC, verifier(), drafters) as o:
        off = await o.generate(**options, speculation=OFF)
        staged = await o.generate(**options)
    assert staged.logprobs == off.logprobs
    assert len(staged.logprobs) == 40
    for token_id, entry in zip(staged.token_ids, staged.logprobs, strict=True):
        assert entry.log_prob < 0
        assert len(entry.top_token_ids) == len(entry.top_log_probs) == 5
        if token_id in entry.top_token_ids:
            at = list(entry.top_token_ids).index(token_id)
            assert entry.top_log_probs[at] == entry.log_prob


async def test_no_log_probabilities_unless_asked_for():
    async with serve(CODEC, verifier()) as o:
        assert (await o.generate(stop={"max_tokens": 5})).logprobs == []
        zero = await o.generate(stop={"max_tokens": 5}, num_logprobs=0)
        assert [len(entry.top_token_ids) for entry in zero.logprobs] == [0] * 5
        assert all(entry.log_prob < 0 for entry in zero.logprobs)


FOND = scripted_target(SIZE, 3, [6])
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bias": (FOND, {"logit_bias": {6: -100.0}}),
    "min_p": (TARGET, {"min_p": 0.2}),
    "frequency penalty": (FOND, {"frequency_penalty": 2.0}),
    "repetition penalty": (TARGET, {"repetition_penalty": 1.3}),
    "negative presence penalty": (TARGET, {"presence_penalty": -2.0}),
    "everything": (
        TARGET,
        {
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.4,
            "logit_bias": {3: 2.0, 4: -5.0},
        },
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", SETTINGS)
async def test_sampling_settings_act_on_the_target_alone(case, temperature):
    target, settings = SETTINGS[case]
    # One drafter always proposes the favourite that settings hold down, the other follows all settings.
    drafters = [drafter("fond", always(chain([6, 6, 6]))), drafter("oracle", oracle(target))]
    async with serve(CODEC, verifier(target), drafters) as o:
        for seed in range(3):
            sampling = {"temperature": temperature, "seed": seed, **settings}
            expected = plain(target, [1, 2, 3], 30, **sampling)
            for names in (["fond"], ["oracle"], ["fond", "oracle"]):
                generated = await o.generate(
                    sampling=sampling, stop={"max_tokens": 30}, speculation={"drafters": names}
                )
                assert generated.token_ids == expected
    if case == "bias":
        assert 6 not in expected
    if case == "frequency penalty":
        assert len(set(expected)) > 1


async def test_ties_go_to_the_lowest_id():
    async with serve(
        CODEC, verifier(lambda context: [1.0] * SIZE), [drafter("d", always(chain([5, 5])))]
    ) as o:
        generated = await o.generate(sampling={"temperature": 0.0}, stop={"max_tokens": 5})
        assert generated.token_ids == [0] * 5


# Context


async def test_a_drafter_with_a_short_context_is_skipped_and_says_so():
    short = drafter("draft", oracle(TARGET), max_context_length=32)
    other = drafter("ngram", oracle(TARGET, 1))
    async with serve(CODEC, verifier(max_context_length=100), [other, short]) as o:
        for prompt in ([1] * 40, [1] * 28):
            generated = await o.generate(prompt, stop={"max_tokens": 20}, sampling={"seed": 5})
            assert generated.token_ids == plain(TARGET, prompt, 20, temperature=1.0, seed=5)
            ngram, draft = generated.end.speculation.drafters
            assert ngram.num_skipped_steps == 0
            assert ngram.num_accepted > 0
            assert draft.skip_reason == "context length 32"
            assert draft.num_skipped_steps > 0
            assert (draft.num_accepted > 0) == (len(prompt) < 32)
        longest = max(d.base_length + len(d.token_ids) for d in short.deltas)
        assert longest < 32
        for request in short.requests:
            length = request.context.base_length + len(request.context.token_ids)
            assert request.budget.max_nodes <= 32 - length


async def test_limits_of_every_stage_are_kept():
    wide = drafter("wide", oracle(TARGET), max_nodes=5)
    narrow = drafter("narrow", keep_hint, max_nodes=3)
    async with serve(CODEC, verifier(max_nodes=4), [wide, narrow]) as o:
        generated = await o.generate(stop={"max_tokens": 20})
        assert generated.end.effective.speculation.max_nodes == 4
    assert {request.budget.max_nodes for request in wide.requests} == {4}
    assert max(len(request.hint.token_ids) for request in narrow.requests) == 3


async def test_prompt_and_output_fill_the_context_exactly():
    draft = drafter("draft", oracle(TARGET))
    async with serve(CODEC, verifier(max_context_length=64), [draft]) as o:
        job = asyncio.create_task(o.generate(sampling={"seed": 3}, stop={"max_tokens": 30}))
        generated = await o.generate([1] * 60, stop={"max_tokens": 10}, sampling={"seed": 4})
        assert generated.token_ids == plain(TARGET, [1] * 60, 4, temperature=1.0, seed=4)
        assert generated.end.finish_reason == FinishReason.FINISH_REASON_CONTEXT_LENGTH
        assert (await job).token_ids == plain(TARGET, [1, 2, 3], 30, temperature=1.0, seed=3)


async def test_stages_are_sent_each_token_once():
    drafters = [drafter("a", oracle(TARGET, 2)), drafter("b", oracle(TARGET, 5))]
    async with serve(CODEC, verifier(), drafters) as o:
        await o.generate([1] * 50, stop={"max_tokens": 40})
        for stage in (o.verifier, *drafters):
            assert len(stage.deltas[0].token_ids) == 50
            assert all(len(delta.token_ids) <= DEPTH for delta in stage.deltas[1:])
            sent = sum(len(delta.token_ids) for delta in stage.deltas)
            assert sent <= 50 + 40


# On, off, and the numbers


async def test_off_calls_no_drafter():
    drafters = [drafter("ngram", oracle(TARGET)), drafter("draft", oracle(TARGET))]
    async with serve(CODEC, verifier(), drafters) as o:
        on, off = await asyncio.gather(
            o.generate(stop={"max_tokens": 30}, sampling={"seed": 1}),
            o.generate(stop={"max_tokens": 30}, sampling={"seed": 1}, speculation=OFF),
        )
        calls = [each.num_requests for each in drafters]
        again = await o.generate(stop={"max_tokens": 30}, sampling={"seed": 1}, speculation=OFF)
        assert [each.num_requests for each in drafters] == calls
    assert on.token_ids == off.token_ids == again.token_ids
    assert off.end.speculation.num_steps == 30
    assert (off.end.speculation.num_drafted, off.end.speculation.num_rounds) == (0, 0)
    assert set(off.origins) == {"target"}


@pytest.mark.parametrize(
    ("script", "accepted"),
    [(always(chain([EOS, EOS])), "none"), (oracle(TARGET), "all"), (keep_hint, "nothing proposed")],
)
async def test_numbers_agree_with_each_other_and_with_the_totals(script, accepted):
    target = TARGET if accepted != "none" else scripted_target(SIZE, 3, [0])
    async with serve(CODEC, verifier(target), [drafter("draft", script)]) as o:
        before = o.server.pipeline.drafters[0].counters.to_proto()
        assert before.num_calls == 0
        generated = [await o.generate(stop={"max_tokens": 25}) for _ in range(3)]
        totals = o.server.pipeline.drafters[0].counters
        verified = o.server.pipeline.verifier.counters
    for each in generated:
        check_identities(each)
        stats = each.end.speculation
        if accepted == "none":
            assert stats.num_accepted == 0 < stats.num_drafted
        elif accepted == "all":
            assert stats.num_accepted == stats.num_drafted > 0
        else:
            assert stats.num_drafted == 0
        timings = each.end.timings
        assert timings.first_token.ToNanoseconds() <= timings.total.ToNanoseconds()
        parts = (
            timings.queue.ToNanoseconds()
            + timings.drafting.ToNanoseconds()
            + timings.verifying.ToNanoseconds()
        )
        assert parts <= timings.total.ToNanoseconds()
    [mine] = [[each.end.speculation.drafters[0] for each in generated]]
    assert totals.num_nodes == sum(stats.num_proposed for stats in mine) == verified.num_nodes
    assert totals.num_accepted == sum(stats.num_accepted for stats in mine) == verified.num_accepted
    assert totals.num_calls == sum(stats.num_calls for stats in mine)
    assert verified.num_calls == sum(each.end.speculation.num_steps for each in generated)


CHAIN = {"max_children": 1, "fixed_size": True, "max_nodes": 4, "max_depth": 4, "max_rounds": 4}


@pytest.mark.parametrize("names", [["draft"], ["wild"], ["wild", "draft"]])
async def test_one_child_a_node_makes_chains_of_drafters_that_know_no_such_limit(names):
    drafters = [drafter("wild", random_trees(SIZE)), drafter("draft", level_by_level(TARGET))]
    async with serve(CODEC, verifier(), drafters) as o:
        generated = await o.generate(
            sampling={"seed": 5}, stop={"max_tokens": 40}, speculation={"drafters": names, **CHAIN}
        )
        assert generated.token_ids == plain(TARGET, [1, 2, 3], 40, temperature=1.0, seed=5)
        check_identities(generated)
        for tree in o.verifier.trees:
            assert list(tree.parents) == list(range(-1, len(tree.token_ids) - 1))
            assert len(tree.token_ids) <= 4
    stats = generated.end.speculation
    assert {entry.rank for entry in stats.ranks} == {0}
    assert {request.budget.max_children for each in drafters for request in each.requests} == {1}
    if names == ["draft"]:
        # Always right: five tokens a step, and each round of the four asks for one more level.
        assert list(stats.accepted_histogram) == [0, 0, 0, 0, 8]
        assert (stats.num_rounds, stats.num_levels, stats.drafters[0].num_passes) == (32, 32, 32)
        assert [(entry.depth, entry.num_reached, entry.num_accepted) for entry in stats.ranks] == [
            (depth, 8, 8) for depth in range(4)
        ]


async def test_of_a_trees_children_the_likeliest_are_kept_and_ranks_tell_how_they_fared():
    wide = DraftTree(token_ids=[3, 0, 7, 1], parents=[-1] * 4, log_probs=[-3.0, -1.0, -4.0, -2.0])
    target = scripted_target(SIZE, 3, [0, 1, 7, 0])  # the likeliest, the second, one that was dropped
    async with serve(CODEC, verifier(target), [drafter("draft", always(wide))]) as o:
        generated = await o.generate(
            sampling={"temperature": 0.0},
            stop={"max_tokens": 6},
            speculation={"max_children": 2, "max_nodes": 3, "max_rounds": 1},
        )
        assert [list(tree.token_ids) for tree in o.verifier.trees][:2] == [[0, 1], [0, 1]]
    check_identities(generated)
    found = {(entry.rank, entry.num_reached, entry.num_accepted) for entry in generated.end.speculation.ranks}
    assert found == {(0, 3, 2), (1, 3, 0)}


async def test_work_is_what_the_stages_were_asked_for_after_the_first_step():
    draft = drafter("draft", level_by_level(TARGET))
    lengths: Counter[int] = Counter()

    async def note(request: Any) -> None:
        lengths[request.step_id] = request.context.base_length + len(request.context.token_ids)

    fake = verifier()
    fake.before_answer = note
    async with serve(CODEC, fake, [draft]) as o:
        generated = await o.generate([1] * 9, stop={"max_tokens": 20}, speculation=CHAIN)
    del lengths[1]
    work = generated.end.speculation.decode_work
    drafted, verified = work.stages
    asked = [request for request in draft.requests if request.step_id > 1]
    assert (drafted.num_passes, drafted.num_rows) == (len(asked), 3 * len(asked))
    assert drafted.num_cache_rows == sum(lengths[request.step_id] for request in asked)
    assert (verified.num_passes, verified.num_cache_rows) == (len(lengths), lengths.total())


# Text and chunks


SMILE = "😀".encode()


@pytest.mark.parametrize("granularity", ["STEP", "TOKEN"])
@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_chunks_join_to_the_text_without_broken_characters(granularity, depth):
    codec = codec_of((SMILE[:1], SMILE[1:3], SMILE[3:], b"a", b"\xff", "é".encode()), ("<eos>",))
    says = [3, 0, 1, 2, 5, 4, 3, 6, 3, 0, 1]
    target = scripted_target(7, 2, says)
    draft = ScriptedDrafter("draft", oracle(target, depth), codec.vocabulary)
    async with serve(codec, TableVerifier(target, codec.vocabulary), [draft]) as o:
        generated = await o.generate(
            [3, 3],
            sampling={"temperature": 0.0},
            stop={"max_tokens": len(says)},
            speculation={} if depth else OFF,
            chunk_granularity=ChunkGranularity.Value(f"CHUNK_GRANULARITY_{granularity}"),
        )
    assert generated.token_ids == says
    assert generated.text == "a😀é\ufffdaa\ufffd"
    for chunk in generated.chunks[:-1]:
        assert chunk.text in "a😀é\ufffdaa"
    if granularity == "TOKEN":
        assert [len(chunk.token_ids) for chunk in generated.chunks] == [1] * len(says)
        assert [chunk.text for chunk in generated.chunks[:4]] == ["a", "", "", "😀"]
    else:
        assert len(generated.chunks) == generated.end.speculation.num_steps


async def test_prompts_as_text_and_the_completions_other_fields():
    async with serve(CODEC, verifier(eos_token_ids=[EOS], model="toy")) as o:
        request = {"text": "BCD", "request_id": "my-request", "return_prompt_token_ids": True}
        call = o.generation.Generate(GenerateRequest(**request, sampling={"seed": 2}, stop={"max_tokens": 4}))
        responses = [response async for response in call]
        metadata = dict(await call.initial_metadata())
    assert metadata["x-request-id"] == "my-request"
    end = responses[-1].completion
    assert end.request_id == "my-request"
    assert list(end.prompt_token_ids) == [1, 2, 3]
    assert (end.usage.num_prompt_tokens, end.seed) == (3, 2)
    assert end.effective.stop == StopOptions(max_tokens=4, min_tokens=0)
    assert [t for r in responses[:-1] for t in r.chunk.token_ids] == plain(
        TARGET, [1, 2, 3], len(responses) - 1, temperature=1.0, seed=2
    )


async def test_a_request_without_an_id_gets_one():
    async with serve(CODEC, verifier()) as o:
        generations = [await o.generate(stop={"max_tokens": 1}) for _ in range(2)]
    ids = {generated.end.request_id for generated in generations}
    assert len(ids) == 2
    assert all(ids)


async def test_sessions_of_many_requests_are_all_freed():
    draft = drafter("draft", oracle(TARGET, 3))
    async with serve(CODEC, verifier(), [draft]) as o:
        for i in range(0, 40, 8):
            await asyncio.gather(
                *(o.generate([j % SIZE] * (1 + j), stop={"max_tokens": 6}) for j in range(i, i + 8))
            )
        sessions = {delta.session_id for delta in o.verifier.deltas}
        assert len(sessions) == 40


async def test_every_stage_is_told_the_tenant_and_none_is_the_default():
    fake, draft = verifier(), drafter("draft", oracle(TARGET, 2))
    told = []

    async def note(request: Any) -> None:
        told.append(request.tenant)

    fake.before_answer = note
    async with serve(CODEC, fake, [draft]) as o:
        await o.generate(tenant="alice", stop={"max_tokens": 4})
        assert (told[0], draft.requests[0].tenant) == ("alice", "alice")
        told.clear()
        draft.requests.clear()
        await o.generate(stop={"max_tokens": 4})
        assert (told[0], draft.requests[0].tenant) == ("", "")
