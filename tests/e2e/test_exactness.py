"""Every pipeline of real stages gives the tokens of plain decoding, and those the tokens of transformers.

Tiny random models in float32, over real gRPC: two of them drafts that often agree with the target.
"""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from orchestrator.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings, SpeculationSettings
from orchestrator.stage import StageAddress
from orchestrator.text import TextCodec
from services.causal_lm.rows import Rows
from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from services.host import StageServer
from services.ngram.engine import NgramEngine
from services.ngram.settings import NgramSettings
from services.target.engine import TargetEngine
from services.target.settings import TargetSettings
from stagespec.rpc import channel_options
from stagespec.v1.generation_pb2 import SamplingOptions, SpeculationOptions, StopOptions
from stagespec.v1.generation_pb2_grpc import GenerationServiceStub
from stagespec.v1.stage_pb2 import GetStatsRequest
from stagespec.v1.stage_pb2_grpc import StageServiceStub
from tests.fakes import write_model
from tests.models import VOCABULARY_SIZE, noisy_copy, save, tiny_model
from tests.serving import Generated, make_request, read_all

FAMILIES = ["llama", "gpt2"]
MODES: dict[str, list[str]] = {
    "off": [],
    "ngram": ["ngram"],
    "draft": ["draft-a"],
    "staged": ["ngram", "draft-a"],
    "four stages": ["ngram", "draft-b", "draft-a"],
    "reversed": ["draft-a", "ngram"],
}
GREEDY = SamplingOptions(temperature=0.0)
SAMPLED = {
    "nucleus": SamplingOptions(temperature=0.8, top_p=0.95, seed=11),
    "top-k": SamplingOptions(temperature=1.0, top_k=50, seed=2**63 + 5),
    "penalties": SamplingOptions(
        temperature=0.7,
        min_p=0.02,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        logit_bias={3: -100.0, 5: 2.0},
        seed=3,
    ),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7] * 20, [1, 2, 3, 1, 2, 3, 1, 2], [100]]
NUM_TOKENS = 48


@dataclass(frozen=True)
class Family:
    """A family's target as transformers runs it, and the engines of all stages."""

    plain: Any
    folder: str
    engines: dict[str, Any]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Family]:
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        target = tiny_model(name)
        models = {
            "target": target,
            "draft-a": noisy_copy(target, 0.08),
            "draft-b": noisy_copy(target, 0.3, 2),
        }
        for stage, model in models.items():
            save(model, folder / stage)
            write_model(folder / stage, [bytes([i]) for i in range(VOCABULARY_SIZE)])
        found[name] = Family(
            target,
            str(folder / "target"),
            {
                "target": TargetEngine(TargetSettings(str(folder / "target"), prefill_chunk=8)),
                "draft-a": DraftEngine(DraftSettings(str(folder / "draft-a"), prefill_chunk=8)),
                "draft-b": DraftEngine(DraftSettings(str(folder / "draft-b"))),
                "ngram": NgramEngine(NgramSettings()),
            },
        )
    return found


@dataclass(frozen=True)
class Running:
    """A running pipeline."""

    stub: Any
    stages: dict[str, grpc.aio.Channel]

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingOptions, mode: str, **limits: int
    ) -> Generated:
        drafters = MODES[mode]
        request = make_request(
            prompt,
            sampling=sampling,
            stop=StopOptions(max_tokens=NUM_TOKENS),
            speculation=SpeculationOptions(enabled=bool(drafters), drafters=drafters, **limits),
            num_logprobs=3,
        )
        return await read_all(self.stub.Generate(request))

    async def live_sessions(self) -> dict[str, int]:
        stats = {
            name: await StageServiceStub(channel).GetStats(GetStatsRequest())
            for name, channel in self.stages.items()
        }
        return {name: answer.counters["sessions_live"] for name, answer in stats.items()}


@asynccontextmanager
async def running(family: Family) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        addresses, channels = {}, {}
        for name, engine in family.engines.items():
            server = StageServer(name, engine, max_sessions=16)
            addresses[name] = StageAddress(name, await server.start("127.0.0.1:0"))
            stack.push_async_callback(server.stop, 5.0)
            channel = grpc.aio.insecure_channel(addresses[name].address)
            channels[name] = await stack.enter_async_context(channel)
        settings = OrchestratorSettings(SpeculationSettings(max_nodes=64, pass_price=0.05, node_price=0.005))
        drafters = [addresses[name] for name in ("ngram", "draft-a", "draft-b")]
        codec = TextCodec.load(Path(family.folder))
        server = OrchestratorServer(settings, codec, addresses["target"], drafters)
        address = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, 5.0)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=channel_options())
        )
        yield Running(GenerationServiceStub(channel), channels)


def assert_same_logprobs(found: Generated, expected: Generated) -> None:
    assert len(found.logprobs) == len(found.token_ids)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
        assert ours.log_prob < 0
        assert list(ours.top_token_ids) == list(theirs.top_token_ids)
        assert list(ours.top_log_probs) == pytest.approx(list(theirs.top_log_probs), abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
async def test_greedy_modes_equal_each_other_and_transformers(families, name):
    family = families[name]
    async with running(family) as pipeline:
        plain = Generated()
        for prompt in PROMPTS:
            expected = family.plain.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for mode in MODES:
                found = await pipeline.generate(prompt, GREEDY, mode)
                assert found.token_ids == expected, (mode, prompt)
                plain = plain if mode != "off" else found
                assert_same_logprobs(found, plain)


@pytest.mark.parametrize("name", FAMILIES)
async def test_sampled_modes_and_node_limits_agree(families, name):
    async with running(families[name]) as pipeline:
        for sampling, prompt in itertools.product(SAMPLED.values(), PROMPTS[:2]):
            plain = await pipeline.generate(prompt, sampling, "off")
            for mode, max_nodes in [*((mode, 64) for mode in MODES), ("staged", 1), ("staged", 8)]:
                found = await pipeline.generate(prompt, sampling, mode, max_nodes=max_nodes)
                assert found.token_ids == plain.token_ids, (mode, max_nodes)
                assert_same_logprobs(found, plain)


async def test_sessions_that_share_passes_do_not_change_each_other(families):
    """Four modes and all prompts at once: each equals its run alone, and nothing stays behind."""
    async with running(families["llama"]) as pipeline:
        jobs = [
            (prompt, sampling, mode)
            for prompt in PROMPTS
            for sampling, mode in zip(
                [GREEDY, *SAMPLED.values()], ["staged", "draft", "ngram", "off"], strict=True
            )
        ]
        alone = [await pipeline.generate(prompt, sampling, "off") for prompt, sampling, _ in jobs]
        together = await asyncio.gather(*(pipeline.generate(*job) for job in jobs))
        assert [g.token_ids for g in together] == [g.token_ids for g in alone]
        for _ in range(100):
            if not any((await pipeline.live_sessions()).values()):
                break
            await asyncio.sleep(0.02)
        assert not any((await pipeline.live_sessions()).values())


async def test_a_draft_with_the_targets_weights_is_accepted_whole_at_every_temperature(families):
    """Draft and target share the noise, so the likeliest guess of each round is what the target draws."""
    family = families["llama"]
    twin = DraftEngine(DraftSettings(family.folder))
    async with running(Family(family.plain, family.folder, family.engines | {"draft-a": twin})) as pipeline:
        for sampling in (GREEDY, SAMPLED["top-k"], SamplingOptions(temperature=1.0, seed=1)):
            found = await pipeline.generate(PROMPTS[0], sampling, "draft", max_rounds=3)
            assert found.end.speculation.num_steps == NUM_TOKENS / 4, (
                "three drafts and the bonus token a step"
            )


async def test_memory_is_given_back(families):
    """As many rows are held after many requests as before them: none."""
    family = families["llama"]
    async with running(family) as pipeline:
        for index in range(30):
            await pipeline.generate([1 + index, 2, 3], GREEDY, "staged", max_nodes=4)
        for _ in range(100):
            if not any((await pipeline.live_sessions()).values()):
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # the workers end their last turn
        gc.collect()
        assert not [found for found in gc.get_objects() if type(found) is Rows]


async def test_every_stage_of_a_chain_has_a_part_and_passes_stay_below_the_depth(families):
    async with running(families["llama"]) as pipeline:
        found = await pipeline.generate(PROMPTS[2], GREEDY, "four stages")
        stats = found.end.speculation
        by_name = {drafter.name: drafter for drafter in stats.drafters}
        assert by_name.keys() == {"ngram", "draft-b", "draft-a"}
        assert by_name["draft-a"].num_proposed > 0
        assert by_name["ngram"].num_passes == 0
        assert sum(drafter.num_accepted for drafter in by_name.values()) == stats.num_accepted
        assert sum(drafter.num_proposed for drafter in by_name.values()) == stats.num_drafted
        assert stats.num_steps + stats.num_accepted == NUM_TOKENS
        assert stats.num_steps < NUM_TOKENS / 2
        assert {"target", "draft-a"} <= set(found.origins) <= {"target", "ngram", "draft-a", "draft-b"}
        # Level by level, a tree as deep as what was accepted would have cost a pass a level.
        assert by_name["draft-a"].num_passes <= stats.num_rounds
