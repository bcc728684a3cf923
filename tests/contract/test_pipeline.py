"""Looking at, testing and changing the pipeline, over real gRPC, while generations run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from orchestrator.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from orchestrator.stage import StageAddress
from stagespec.rpc import RpcError, describe
from stagespec.v1.pipeline_pb2 import (
    AddDrafterRequest,
    CheckDrafterRequest,
    DrafterAddress,
    GetPipelineRequest,
    RemoveDrafterRequest,
    StageState,
    SwapDrafterRequest,
)
from stagespec.v1.stage_pb2 import StageKind
from stagespec.vocabulary import Vocabulary
from tests.fakes import FakeStage, ScriptedDrafter, TableVerifier, oracle, random_target
from tests.serving import PATIENT, codec_of, make_request, no_sessions, serve

CODEC = codec_of()
SIZE = len(CODEC.vocabulary.tokens)
TARGET = random_target(SIZE)
NOWHERE = "127.0.0.1:1"


def verifier(**info: Any) -> TableVerifier:
    return TableVerifier(TARGET, CODEC.vocabulary, **info)


def drafter(
    name: str, depth: int = 2, vocabulary: Vocabulary = CODEC.vocabulary, **info: Any
) -> ScriptedDrafter:
    return ScriptedDrafter(name, oracle(TARGET, depth), vocabulary, **info)


def exchanged(a: int, b: int) -> Vocabulary:
    tokens = list(CODEC.vocabulary.tokens)
    tokens[a], tokens[b] = tokens[b], tokens[a]
    return Vocabulary(tuple(tokens), CODEC.vocabulary.special_ids)


def padded(num_more: int) -> Vocabulary:
    return Vocabulary(CODEC.vocabulary.tokens + (b"",) * num_more, CODEC.vocabulary.special_ids)


@asynccontextmanager
async def running(*stages: FakeStage) -> AsyncIterator[None]:
    for stage in stages:
        await stage.start()
    try:
        yield
        await no_sessions(*stages)
    finally:
        for stage in stages:
            await stage.stop()


def change(stage: ScriptedDrafter, **info: Any) -> ScriptedDrafter:
    for name, value in info.items():
        setattr(stage.info, name, value)
    return stage


async def error_of(call: Any) -> RpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return describe(refused.value)


MISFITS = {
    "vocabulary": (drafter("d", vocabulary=exchanged(5, 6)), "token id 5 is 'F' here and 'G' there"),
    "no vocabulary to compare": (
        change(drafter("d", vocabulary=Vocabulary((), frozenset())), tokenizer_hash="0" * 64),
        "vocabulary: another tokenizer hash",
    ),
    "shorter vocabulary": (
        drafter("d", vocabulary=Vocabulary(CODEC.vocabulary.tokens[:9], frozenset())),
        "token id 9 is 'J' here and missing there",
    ),
    "protocol": (change(drafter("d"), protocol_version=2), "protocol version: it speaks 2, this server 1"),
    "kind": (
        change(drafter("d"), kind=StageKind.STAGE_KIND_VERIFIER),
        "kind: it is a verifier, needed is a drafter",
    ),
    "rollback": (change(drafter("d"), can_rollback=False), "rollback: its contexts cannot be truncated"),
}

FITS = {
    "same tokenizer": drafter("d"),
    "any tokenizer": change(drafter("d"), tokenizer_hash="", vocabulary_size=0),
    "padded": drafter("d", vocabulary=padded(4)),
    "short context": drafter("d", max_context_length=8),
}


@pytest.mark.parametrize("case", MISFITS)
async def test_a_misfit_is_refused_at_start_and_at_a_change_and_says_why(case):
    misfit, why = MISFITS[case]
    fake, old = verifier(), drafter("old")
    async with running(misfit, fake):
        server = OrchestratorServer(
            OrchestratorSettings(timeouts=PATIENT),
            CODEC,
            StageAddress("target", fake.address),
            [StageAddress("mine", misfit.address)],
        )
        with pytest.raises(RpcError, match="stage 'mine'") as refused:
            await server.start("127.0.0.1:0")
        assert why in refused.value.message

    async with serve(CODEC, verifier(), [old]) as o, running(misfit):
        address = DrafterAddress(name="new", address=misfit.address)
        for call in (
            o.pipeline.SwapDrafter(SwapDrafterRequest(name="old", successor=address)),
            o.pipeline.AddDrafter(AddDrafterRequest(drafter=address)),
        ):
            error = await error_of(call)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INCOMPATIBLE_STAGE")
            assert why in error.message
        checked = await o.pipeline.CheckDrafter(CheckDrafterRequest(drafter=address))
        assert not checked.compatible
        [failed] = [check for check in checked.checks if not check.passed]
        assert failed.detail in why or why in f"{failed.name}: {failed.detail}"
        assert [stage.name for stage in o.server.pipeline.drafters] == ["old"]
        await o.generate(stop={"max_tokens": 10})
        assert old.num_requests > 0


@pytest.mark.parametrize("case", FITS)
async def test_what_fits_passes_every_test_and_works(case):
    fitting = FITS[case]
    async with serve(CODEC, verifier(max_context_length=100)) as o, running(fitting):
        address = DrafterAddress(name="d", address=fitting.address)
        checked = await o.pipeline.CheckDrafter(CheckDrafterRequest(drafter=address))
        assert checked.compatible
        assert [check.name for check in checked.checks] == [
            "reachable",
            "protocol version",
            "kind",
            "vocabulary",
            "rollback",
            "context length",
        ]
        assert all(check.detail for check in checked.checks)
        if case == "short context":
            assert "takes 8 tokens; the verifier takes 100" in checked.checks[-1].detail
        await o.pipeline.AddDrafter(AddDrafterRequest(drafter=address))
        generated = await o.generate(stop={"max_tokens": 20})
        assert generated.end.speculation.drafters[0].num_accepted > 0
        await o.pipeline.RemoveDrafter(RemoveDrafterRequest(name="d"))


async def test_model_sizes_may_differ_in_padding_either_way():
    for ours, theirs in ((padded(0), padded(4)), (padded(4), padded(0))):
        fake = TableVerifier(TARGET, ours)
        # A padded target still draws real tokens only; the padding is the model's own affair.
        fake.info.vocabulary_size = SIZE
        draft = drafter("draft", vocabulary=theirs)
        async with serve(CODEC, fake, [draft]) as o:
            generated = await o.generate(stop={"max_tokens": 20})
            assert generated.end.speculation.drafters[0].num_accepted > 0


async def test_a_verifier_with_another_vocabulary_stops_the_start():
    fake = TableVerifier(TARGET, exchanged(5, 6))
    async with running(fake):
        server = OrchestratorServer(
            OrchestratorSettings(timeouts=PATIENT), CODEC, StageAddress("target", fake.address), []
        )
        with pytest.raises(RpcError, match=r"stage 'target' .* token id 5 is 'F' here and 'G' there"):
            await server.start("127.0.0.1:0")


async def test_a_stage_that_cannot_be_reached_is_named():
    brief = replace(PATIENT, connect_s=0.3, check_s=0.3)
    server = OrchestratorServer(
        OrchestratorSettings(timeouts=brief), CODEC, StageAddress("target", NOWHERE), []
    )
    with pytest.raises(RpcError, match=f"stage 'target' at {NOWHERE} .* no answer"):
        await server.start("127.0.0.1:0")

    async with serve(CODEC, verifier(), timeouts=brief) as o:
        checked = await o.pipeline.CheckDrafter(CheckDrafterRequest(drafter=DrafterAddress(address=NOWHERE)))
        assert [(check.name, check.passed) for check in checked.checks] == [("reachable", False)]
        assert not checked.HasField("info")
        address = DrafterAddress(name="d", address=NOWHERE)
        error = await error_of(o.pipeline.AddDrafter(AddDrafterRequest(drafter=address)))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_names_and_places_are_checked():
    old, new = drafter("old"), drafter("new")
    async with serve(CODEC, verifier(), [old]) as o, running(new):

        def address(name: str) -> DrafterAddress:
            return DrafterAddress(name=name, address=new.address)

        api, code = o.pipeline, grpc.StatusCode
        for call, expected in [
            (api.AddDrafter(AddDrafterRequest(drafter=address("old"))), code.ALREADY_EXISTS),
            (api.AddDrafter(AddDrafterRequest(drafter=address("target"))), code.ALREADY_EXISTS),
            (api.AddDrafter(AddDrafterRequest(drafter=address(""))), code.INVALID_ARGUMENT),
            (api.AddDrafter(AddDrafterRequest(drafter=address("x" * 65))), code.INVALID_ARGUMENT),
            (api.AddDrafter(AddDrafterRequest(drafter=DrafterAddress(name="d"))), code.INVALID_ARGUMENT),
            (api.AddDrafter(AddDrafterRequest(drafter=address("d"), index=2)), code.INVALID_ARGUMENT),
            (api.AddDrafter(AddDrafterRequest(drafter=address("d"), index=-1)), code.INVALID_ARGUMENT),
            (api.SwapDrafter(SwapDrafterRequest(name="nope", successor=address("d"))), code.NOT_FOUND),
            (
                api.SwapDrafter(SwapDrafterRequest(name="old", successor=address("target"))),
                code.ALREADY_EXISTS,
            ),
            (api.RemoveDrafter(RemoveDrafterRequest(name="nope")), code.NOT_FOUND),
            (api.CheckDrafter(CheckDrafterRequest()), code.INVALID_ARGUMENT),
        ]:
            assert (await error_of(call)).code is expected
        added = await api.AddDrafter(AddDrafterRequest(drafter=address("new"), index=0))
        assert list(added.drafters) == ["new", "old"]
        removed = await api.RemoveDrafter(RemoveDrafterRequest(name="old"))
        assert list(removed.drafters) == ["new"]
        same_name = await api.SwapDrafter(SwapDrafterRequest(name="new", successor=address("new")))
        assert list(same_name.drafters) == ["new"]


async def test_drafters_change_under_running_generations_without_a_trace_in_the_tokens():
    fake = verifier()
    ngram, draft = drafter("ngram", 1), drafter("draft", 3)
    stages: dict[int, Any] = {}

    async def act(request: Any) -> None:
        # Both generations must have taken the step before the next change.
        if action := stages.pop(request.step_id, None):
            await action()

    fake.before_answer = act
    async with serve(CODEC, fake, [ngram]) as o, running(draft):
        address = DrafterAddress(name="draft", address=draft.address)
        again = DrafterAddress(name="again", address=ngram.address)

        async def swap() -> None:
            await o.pipeline.SwapDrafter(SwapDrafterRequest(name="ngram", successor=address))

        async def add() -> None:
            assert ngram.live_sessions <= 1, "a swapped drafter keeps a session for more than a step"
            await o.pipeline.AddDrafter(AddDrafterRequest(drafter=again, index=0))

        async def remove_all() -> None:
            for name in ("again", "draft"):
                await o.pipeline.RemoveDrafter(RemoveDrafterRequest(name=name))

        stages |= {4: swap, 8: add, 14: remove_all}
        options = {"stop": {"max_tokens": 80}}
        changed = await asyncio.gather(
            *(o.generate([seed, 1], sampling={"seed": seed}, **options) for seed in (1, 2))
        )
        await no_sessions(ngram, draft)
        assert not stages
        for seed, generated in zip((1, 2), changed, strict=True):
            plain = await o.generate([seed, 1], sampling={"seed": seed}, **options)
            assert generated.token_ids == plain.token_ids
            stats = {each.name: each for each in generated.end.speculation.drafters}
            assert list(stats) == ["ngram", "draft", "again"]
            assert all(each.num_proposed == each.num_accepted > 0 for each in stats.values())
            assert set(generated.origins) == {"ngram", "draft", "again", "target"}
            assert generated.origins[-1] == "target"


async def test_a_drafter_named_by_a_request_may_leave():
    fake = verifier()
    a, b = drafter("a"), drafter("b")

    async def leave(request: Any) -> None:
        if request.step_id == 3 and len(o.server.pipeline.drafters) == 2:
            await o.pipeline.RemoveDrafter(RemoveDrafterRequest(name="b"))

    fake.before_answer = leave
    async with serve(CODEC, fake, [a, b]) as o:
        generated = await o.generate(stop={"max_tokens": 30}, speculation={"drafters": ["b"]})
        assert a.num_requests == 0
        assert generated.end.speculation.drafters[0].num_accepted == 6
        error = await o.refusal(make_request(speculation={"drafters": ["b"]}))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_pipeline_is_shown_with_its_numbers():
    draft = drafter("draft", 3)
    async with serve(CODEC, verifier(model="toy"), [draft]) as o:
        generated = await o.generate(stop={"max_tokens": 20})
        shown = await o.pipeline.GetPipeline(GetPipelineRequest())
        assert (shown.verifier.name, shown.verifier.state) == ("target", StageState.STAGE_STATE_READY)
        assert shown.verifier.info.model == "toy"
        assert shown.verifier.totals.num_calls == generated.end.speculation.num_steps
        [stage] = shown.drafters
        assert (stage.name, stage.address, stage.idle_reason) == ("draft", draft.address, "")
        assert stage.totals.num_accepted == generated.end.speculation.num_accepted
        assert stage.totals.time.ToNanoseconds() > 0
        assert (shown.num_running_requests, shown.num_waiting_requests) == (0, 0)


async def test_relocation_is_checked_too():
    draft, misfit = drafter("draft"), drafter("draft", vocabulary=exchanged(5, 6))
    async with serve(CODEC, verifier(), [draft]) as o, running(misfit):
        with pytest.raises(RpcError, match="token id 5"):
            await o.server.pipeline.relocate("draft", draft.address, misfit.address)
        assert not await o.server.pipeline.relocate("nope", draft.address, misfit.address)
        await o.generate(stop={"max_tokens": 10})
        assert draft.num_requests > 0


async def test_the_restart_of_a_drafter_that_was_replaced_leaves_its_successor_alone():
    old, successor, restarted = drafter("draft"), drafter("draft"), drafter("draft")
    async with serve(CODEC, verifier(), [old]) as o, running(successor, restarted):
        address = DrafterAddress(name="draft", address=successor.address)
        await o.pipeline.SwapDrafter(SwapDrafterRequest(name="draft", successor=address))
        assert not await o.server.pipeline.relocate("draft", old.address, restarted.address)
        await o.generate(stop={"max_tokens": 10})
        assert (successor.num_requests > 0, restarted.num_requests) == (True, 0)


async def test_a_verifier_with_ids_that_the_tokenizer_lacks_stops_the_start():
    fake = verifier()
    fake.info.tokenizer_hash, fake.info.vocabulary_size = "", SIZE + 3
    async with running(fake):
        server = OrchestratorServer(
            OrchestratorSettings(timeouts=PATIENT), CODEC, StageAddress("target", fake.address), []
        )
        with pytest.raises(RpcError, match=f"may draw {SIZE + 3} token ids, the tokenizer has {SIZE}"):
            await server.start("127.0.0.1:0")


async def test_a_stage_that_answers_garbage_is_down_and_the_others_are_shown():
    async def garbage(request: bytes, context: Any) -> bytes:
        return b"\xff\xff\xff"

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(garbage)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("stagespec.v1.StageService", {"GetInfo": handler})]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with serve(CODEC, verifier(), [drafter("bad"), drafter("good")]) as o:
        checked = await o.pipeline.CheckDrafter(CheckDrafterRequest(drafter=DrafterAddress(address=address)))
        assert [(check.name, check.passed) for check in checked.checks] == [("reachable", False)]
        assert "no message of this protocol" in checked.checks[0].detail
        bad = o.server.pipeline.drafters[0]
        await bad.move(address, grpc.aio.insecure_channel(address), bad.info)
        shown = await o.pipeline.GetPipeline(GetPipelineRequest())
        assert [stage.state for stage in (*shown.drafters, shown.verifier)] == [
            StageState.STAGE_STATE_DOWN,
            StageState.STAGE_STATE_READY,
            StageState.STAGE_STATE_READY,
        ]
    await server.stop(None)
