"""Stages that are slow, obvious and real servers: a verifier that draws from a function, scripted drafters.

The verifier is the oracle of the tests: what it commits without drafters is what everything is compared with.
"""

import asyncio
import functools
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from stagespec.guard import GuardInterceptor
from stagespec.rpc import PROTOCOL_VERSION, STAGE_MESSAGE_BYTES, server_options
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.draft_pb2 import DraftTree
from stagespec.v1.drafter_pb2 import ProposeRequest, ProposeResponse
from stagespec.v1.drafter_pb2_grpc import DrafterServiceServicer, add_DrafterServiceServicer_to_server
from stagespec.v1.stage_pb2 import GetInfoResponse, GetVocabularyResponse, StageInfo, StageKind
from stagespec.v1.stage_pb2_grpc import StageServiceServicer, add_StageServiceServicer_to_server
from stagespec.v1.verifier_pb2 import TokenLogprobs, Verdict, VerifyRequest, VerifyResponse
from stagespec.v1.verifier_pb2_grpc import VerifierServiceServicer, add_VerifierServiceServicer_to_server
from stagespec.vocabulary import Vocabulary
from tests.oracle import oracle_draw

Target = Callable[[tuple[int, ...]], list[float]]
"""Context -> logits over the vocabulary."""

Script = Callable[[tuple[int, ...], ProposeRequest], Awaitable[DraftTree | ProposeResponse]]
"""Context and request -> a draft, or a whole response if it is about more than the draft."""


# Text


def write_model(
    folder: Path,
    tokens: Sequence[bytes],
    special: Sequence[str] = (),
    *,
    chat_template: str | None = None,
    bos: str | None = None,
) -> Path:
    """A model folder with a byte-level tokenizer: ids in the order of `tokens`, then the special ones."""
    vocab = {_in_alphabet(token): token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": bos}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LETTERS = [bytes([65 + i]) for i in range(16)]
"""Sixteen tokens, A to P: the vocabulary of most tests."""


def _in_alphabet(token: bytes) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in token)


# Targets


def random_target(vocabulary_size: int, seed: int = 0, spread: float = 2.0) -> Target:
    """Logits that depend on the last three tokens."""

    @functools.cache
    def logits(end: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((seed, end)))
        return [rng.gauss(0, spread) for _ in range(vocabulary_size)]

    return lambda context: logits(context[-3:])


def scripted_target(vocabulary_size: int, prompt_length: int, script: Sequence[int]) -> Target:
    """Says `script` after the prompt, and repeats its last token from then on."""

    def logits(context: tuple[int, ...]) -> list[float]:
        said = script[min(len(context) - prompt_length, len(script) - 1)]
        return [20.0 if token_id == said else 0.0 for token_id in range(vocabulary_size)]

    return logits


# Stages


class FakeStage(StageServiceServicer):
    """A stage in this process.

    Attributes:
        info: What it says about itself; tests change it before it is asked.
        live_sessions: Streams that are open.
        num_requests: Requests on all streams.
        deltas: Every context delta it got.
        address: Where it listens.
    """

    def __init__(self, info: StageInfo, vocabulary: Vocabulary) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.live_sessions = 0
        self.num_requests = 0
        self.deltas: list[ContextDelta] = []
        self.epochs: list[int] = []
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> "FakeStage":
        server = grpc.aio.server(
            interceptors=[GuardInterceptor()], options=server_options(STAGE_MESSAGE_BYTES)
        )
        add_StageServiceServicer_to_server(self, server)
        if isinstance(self, DrafterServiceServicer):
            add_DrafterServiceServicer_to_server(self, server)
        if isinstance(self, VerifierServiceServicer):
            add_VerifierServiceServicer_to_server(self, server)
        port = server.add_insecure_port(address)
        await server.start()
        self._server, self.address = server, f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        """As if it had been killed: every stream breaks at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def GetInfo(self, request: Any, context: Any) -> GetInfoResponse:
        return GetInfoResponse(info=self.info)

    async def GetVocabulary(self, request: Any, context: Any) -> AsyncIterator[GetVocabularyResponse]:
        middle = len(self.vocabulary.tokens) // 2
        for first, last in ((0, middle), (middle, len(self.vocabulary.tokens))):
            yield GetVocabularyResponse(
                first_token_id=first,
                tokens=self.vocabulary.tokens[first:last],
                special_token_ids=[i for i in self.vocabulary.special_ids if first <= i < last],
            )

    def _apply(self, delta: ContextDelta, context: list[int]) -> int | None:
        """Applies a delta; returns where to send from if it cannot be."""
        self.num_requests += 1
        self.deltas.append(delta)
        if delta.base_length > len(context):
            return len(context)
        del context[delta.base_length :]
        context.extend(delta.token_ids)
        return None


def stage_info(kind: StageKind.ValueType, name: str, vocabulary: Vocabulary, **more: Any) -> StageInfo:
    return StageInfo(
        kind=kind,
        name=name,
        implementation="fake",
        protocol_version=PROTOCOL_VERSION,
        tokenizer_hash=vocabulary.hash,
        vocabulary_size=len(vocabulary.tokens),
        can_rollback=True,
        **more,
    )


class TableVerifier(FakeStage, VerifierServiceServicer):
    """Draws from a function, by the rules of the contract, one node after the other.

    Attributes:
        complaints: What was wrong with drafts it got; a test's end finds it empty.
        trees: Every draft it got.
        before_answer: Awaited with the request before each answer; may sleep or raise.
        tamper: Changes an answer before it leaves.
    """

    def __init__(self, target: Target, vocabulary: Vocabulary, **info: Any) -> None:
        kind = StageKind.STAGE_KIND_VERIFIER
        super().__init__(stage_info(kind, "target", vocabulary, **info), vocabulary)
        self.target = target
        self.complaints: list[str] = []
        self.trees: list[DraftTree] = []
        self.before_answer: Callable[[VerifyRequest], Awaitable[None]] | None = None
        self.tamper: Callable[[VerifyRequest, VerifyResponse], list[VerifyResponse]] | None = None
        self.forget_at_step = 0

    async def Verify(
        self, requests: AsyncIterator[VerifyRequest], context: Any
    ) -> AsyncIterator[VerifyResponse]:
        self.live_sessions += 1
        token_ids: list[int] = []
        try:
            async for request in requests:
                self.epochs.append(request.epoch)
                if self.forget_at_step == request.step_id:
                    self.forget_at_step = 0
                    del token_ids[len(token_ids) // 2 :]
                resync_from = self._apply(request.context, token_ids)
                response = VerifyResponse(
                    step_id=request.step_id, epoch=request.epoch, resync_from=resync_from
                )
                if resync_from is None:
                    if self.before_answer is not None:
                        await self.before_answer(request)
                    response.verdict.CopyFrom(self.decide(token_ids, request))
                for message in [response] if self.tamper is None else self.tamper(request, response):
                    yield message
        finally:
            self.live_sessions -= 1

    def decide(self, context: Sequence[int], request: VerifyRequest) -> Verdict:
        draft, sampling = request.draft, request.sampling
        self.trees.append(draft)
        self._look_for_faults(len(context), draft)
        path = list(context)
        verdict, node = Verdict(num_nodes=len(draft.token_ids)), -1
        while True:
            logits = self.target(tuple(path))
            token_id = oracle_draw(logits, sampling, path, len(path))
            verdict.token_ids.append(token_id)
            if request.HasField("num_logprobs"):
                verdict.logprobs.append(log_probs(logits, token_id, request.num_logprobs))
            path.append(token_id)
            children = [
                child
                for child in range(node + 1, len(draft.token_ids))
                if draft.parents[child] == node and draft.token_ids[child] == token_id
            ]
            if not children:
                verdict.bonus_token_id = token_id
                return verdict
            node = children[0]
            verdict.accepted_nodes.append(node)

    def _look_for_faults(self, context_length: int, draft: DraftTree) -> None:
        size = len(draft.token_ids)
        siblings = list(zip(draft.parents, draft.token_ids, strict=True))
        rules = {
            "lists of different lengths": len(draft.parents) == len(draft.log_probs) == size,
            "a parent after its child": all(-1 <= p < i for i, p in enumerate(draft.parents)),
            "equal siblings": len(set(siblings)) == size,
            "a token outside the vocabulary": all(
                0 <= t < len(self.vocabulary.tokens) for t in draft.token_ids
            ),
            "log probabilities above 0": all(math.isfinite(p) and p <= 0 for p in draft.log_probs),
            "too many nodes": not self.info.max_nodes or size <= self.info.max_nodes,
            "context too long": not self.info.max_context_length
            or context_length + size <= self.info.max_context_length,
        }
        self.complaints += [fault for fault, kept in rules.items() if not kept]


def log_probs(logits: list[float], token_id: int, num_alternatives: int) -> TokenLogprobs:
    log_total = math.log(sum(math.exp(logit) for logit in logits))
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_alternatives]
    return TokenLogprobs(
        log_prob=logits[token_id] - log_total,
        top_token_ids=ranked,
        top_log_probs=[logits[i] - log_total for i in ranked],
    )


class ScriptedDrafter(FakeStage, DrafterServiceServicer):
    """Answers what its script says.

    Attributes:
        requests: Every request it got.
    """

    def __init__(self, name: str, script: Script, vocabulary: Vocabulary, **info: Any) -> None:
        kind = StageKind.STAGE_KIND_DRAFTER
        super().__init__(stage_info(kind, name, vocabulary, **info), vocabulary)
        self.script = script
        self.requests: list[ProposeRequest] = []

    async def Propose(
        self, requests: AsyncIterator[ProposeRequest], context: Any
    ) -> AsyncIterator[ProposeResponse]:
        self.live_sessions += 1
        token_ids: list[int] = []
        try:
            async for request in requests:
                self.requests.append(request)
                self.epochs.append(request.epoch)
                response = ProposeResponse(
                    step_id=request.step_id, epoch=request.epoch, round=request.round, num_passes=1
                )
                resync_from = self._apply(request.context, token_ids)
                if resync_from is not None:
                    response.resync_from = resync_from
                else:
                    answer = await self.script(tuple(token_ids), request)
                    if isinstance(answer, ProposeResponse):
                        response.MergeFrom(answer)
                    else:
                        response.draft.CopyFrom(answer)
                yield response
        finally:
            self.live_sessions -= 1


# Scripts


def chain(token_ids: Sequence[int]) -> DraftTree:
    return DraftTree(token_ids=token_ids, parents=range(-1, len(token_ids) - 1))


def oracle(target: Target, depth: int | None = None) -> Script:
    """Guesses right, as deep as it may or as `depth` says; keeps what the hint already has."""

    async def script(context: tuple[int, ...], request: ProposeRequest) -> DraftTree:
        path = list(context)
        levels = min(request.budget.max_depth, request.budget.max_nodes)
        for _ in range(levels if depth is None else min(levels, depth)):
            path.append(oracle_draw(target(tuple(path)), request.sampling, path, len(path)))
        return chain(path[len(context) :])

    return script


def level_by_level(target: Target, num_wrong: int = 2) -> Script:
    """Adds to the hint's deepest path, a round at a time, the right token and some that are less likely.

    As a draft model would, but it knows no limit on children.
    """

    async def script(context: tuple[int, ...], request: ProposeRequest) -> ProposeResponse:
        draft, path, node = request.hint, list(context), -1
        depth = 0
        while children := [child for child, parent in enumerate(draft.parents) if parent == node]:
            node, depth = children[0], depth + 1
            path.append(draft.token_ids[node])
        if depth < request.budget.max_depth and len(draft.token_ids) < request.budget.max_nodes:
            logits = target(tuple(path))
            right = oracle_draw(logits, request.sampling, path, len(path))
            wrong = [token_id for token_id in range(len(logits)) if token_id != right]
            for token_id in (right, *wrong[:num_wrong]):
                draft.token_ids.append(token_id)
                draft.parents.append(node)
                draft.log_probs.append(-0.1 if token_id == right else -3.0)
                draft.drafter_indices.append(request.drafter_index)
        return ProposeResponse(draft=draft, num_rows=3)

    return script


def always(answer: DraftTree | ProposeResponse) -> Script:
    async def script(context: tuple[int, ...], request: ProposeRequest) -> DraftTree | ProposeResponse:
        return answer

    return script


async def keep_hint(context: tuple[int, ...], request: ProposeRequest) -> DraftTree:
    return request.hint


async def hang(context: tuple[int, ...], request: ProposeRequest) -> DraftTree:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def fail(context: tuple[int, ...], request: ProposeRequest) -> DraftTree:
    raise RuntimeError("a secret of the drafter")


def random_trees(vocabulary_size: int) -> Script:
    rng = random.Random(0)

    async def script(context: tuple[int, ...], request: ProposeRequest) -> DraftTree:
        size = rng.randint(0, 12)
        return DraftTree(
            token_ids=[rng.randrange(vocabulary_size) for _ in range(size)],
            parents=[rng.randint(-1, i - 1) for i in range(size)],
            log_probs=[-rng.random() for _ in range(size)],
        )

    return script


def stale(target: Target) -> Script:
    """Continues the context as it was three tokens ago."""
    right = oracle(target)

    async def script(context: tuple[int, ...], request: ProposeRequest) -> DraftTree | ProposeResponse:
        return await right(context[:-3] or context[:1], request)

    return script


def wrong_step(offset: int) -> Script:
    """Answers a step that was not asked about."""

    async def script(context: tuple[int, ...], request: ProposeRequest) -> ProposeResponse:
        return ProposeResponse(step_id=request.step_id + offset, draft=chain([1, 2, 3]))

    return script


def hostile_scripts(target: Target, vocabulary_size: int) -> dict[str, Script]:
    """Drafters that cannot be trusted but do answer, by what is wrong with them."""
    nan, infinite = math.nan, math.inf
    greedy_gain = ProposeResponse(draft=chain([0]), next_round_gain=infinite, num_passes=-5)
    return {
        "empty": always(DraftTree()),
        "constant": always(chain([0, 0, 0, 0])),
        "random": random_trees(vocabulary_size),
        "duplicate siblings": always(DraftTree(token_ids=[1, 1, 2, 2, 1], parents=[-1, -1, 0, 1, -1])),
        "outside the vocabulary": always(
            DraftTree(token_ids=[vocabulary_size, -3, 2**31 - 1, 1], parents=[-1, 0, -1, 2])
        ),
        "too deep": always(chain([3] * 300)),
        "too wide": always(
            DraftTree(token_ids=[*range(vocabulary_size)] * 20, parents=[-1] * vocabulary_size * 20)
        ),
        "cycle": always(DraftTree(token_ids=[1, 2, 3], parents=[2, 0, 1])),
        "parents out of range": always(DraftTree(token_ids=[1, 2, 3], parents=[-2, 7, -9])),
        "lists of different lengths": always(
            DraftTree(token_ids=[1, 2, 3], parents=[-1], log_probs=[-1, -1])
        ),
        "stale": stale(target),
        "log_probs not numbers": always(
            DraftTree(token_ids=[1, 2, 3], parents=[-1, -1, -1], log_probs=[nan, infinite, -infinite])
        ),
        "log_probs above 0": always(DraftTree(token_ids=[1], parents=[-1], log_probs=[0.5])),
        "forged owners": always(DraftTree(token_ids=[1, 2], parents=[-1, 0], drafter_indices=[77, -5])),
        "endless gain": always(greedy_gain),
    }
