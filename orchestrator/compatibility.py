"""Whether a stage fits the pipeline: every test by name, with the values it compared.

It asks the stage and changes nothing.
"""

import time
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from stagespec.rpc import PROTOCOL_VERSION
from stagespec.v1.stage_pb2 import GetInfoRequest, GetInfoResponse, GetVocabularyRequest, StageInfo, StageKind
from stagespec.v1.stage_pb2_grpc import StageServiceStub
from stagespec.vocabulary import Vocabulary, first_difference


@dataclass(frozen=True, slots=True)
class Check:
    """One test, its result, and what was found."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a stage must be.

    Attributes:
        kind: The service it must serve.
        vocabulary: The vocabulary of prompts and answers.
        tokenizer_hash: Hash of that vocabulary.
        max_context_length: What the verifier takes; 0 if it is unlimited or not known yet.
    """

    kind: StageKind.ValueType
    vocabulary: Vocabulary
    tokenizer_hash: str
    max_context_length: int = 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the tests of one stage found.

    Attributes:
        checks: The tests in the order they ran. If the stage can't be reached, there are no others.
        info: What the stage says about itself; None if it did not answer.
    """

    checks: tuple[Check, ...]
    info: StageInfo | None

    @property
    def compatible(self) -> bool:
        """Whether every test passed."""
        return all(check.passed for check in self.checks)

    @property
    def objection(self) -> str:
        """What failed, in one line."""
        return "; ".join(f"{check.name}: {check.detail}" for check in self.checks if not check.passed)


async def inspect(
    channel: grpc.aio.Channel, required: Requirements, timeout_s: float, *, wait_for_ready: bool = False
) -> Inspection:
    """Runs every test against a stage.

    Args:
        channel: The connection to the stage.
        required: What it must be.
        timeout_s: Seconds for each of its answers.
        wait_for_ready: Whether the time may be spent on waiting for the stage to start listening.
    """
    started = time.monotonic()
    try:
        response: GetInfoResponse | None = await StageServiceStub(channel).GetInfo(
            GetInfoRequest(), timeout=timeout_s, wait_for_ready=wait_for_ready
        )
    except grpc.aio.AioRpcError as error:
        return _unreachable(f"no answer ({error.code().name})")
    except grpc.aio.BaseError:
        return _unreachable("no answer (the connection was closed)")
    if response is None:  # so gRPC tells that it could not be parsed
        return _unreachable("its answer is no message of this protocol")
    info = response.info
    milliseconds = (time.monotonic() - started) * 1000
    checks = [
        Check("reachable", True, f"answered in {milliseconds:.0f} ms: {info.name!r} ({info.implementation})"),
        Check(
            "protocol version",
            info.protocol_version == PROTOCOL_VERSION,
            f"it speaks {info.protocol_version}, this server {PROTOCOL_VERSION}",
        ),
        Check(
            "kind",
            info.kind == required.kind,
            f"it is a {_kind_name(info.kind)}, needed is a {_kind_name(required.kind)}",
        ),
        await _check_vocabulary(channel, info, required, timeout_s),
        Check(
            "rollback",
            info.can_rollback,
            f"its contexts {'can' if info.can_rollback else 'cannot'} be truncated without loss",
        ),
        _check_context_length(info, required),
    ]
    return Inspection(tuple(checks), info)


def _unreachable(detail: str) -> Inspection:
    return Inspection((Check("reachable", False, detail),), None)


async def _check_vocabulary(
    channel: grpc.aio.Channel, info: StageInfo, required: Requirements, timeout_s: float
) -> Check:
    name = "vocabulary"
    num_tokens = len(required.vocabulary.tokens)
    if not info.tokenizer_hash:
        # A drafter's tokens are checked one by one; the verifier's are final.
        if required.kind == StageKind.STAGE_KIND_VERIFIER and info.vocabulary_size > num_tokens:
            detail = f"it may draw {info.vocabulary_size} token ids, the tokenizer has {num_tokens}"
            return Check(name, False, detail)
        return Check(name, True, "works with any tokenizer")
    if info.tokenizer_hash == required.tokenizer_hash:
        return Check(name, True, f"same tokenizer, {num_tokens} token ids")
    # Different hashes may still mean the same tokens, when somebody hashed padding ids along.
    try:
        theirs = await _fetch_vocabulary(channel, timeout_s)
    except (grpc.aio.BaseError, DecodeError):
        return Check(name, False, "another tokenizer hash, and its vocabulary could not be fetched")
    if not theirs.tokens:
        return Check(name, False, "another tokenizer hash, and it sends no vocabulary to compare")
    difference = first_difference(_without_padding(required.vocabulary), _without_padding(theirs))
    if difference is not None:
        return Check(name, False, difference)
    return Check(name, True, f"another tokenizer hash, but all {num_tokens} ids agree")


async def _fetch_vocabulary(channel: grpc.aio.Channel, timeout_s: float) -> Vocabulary:
    tokens: list[bytes] = []
    special: set[int] = set()
    async for piece in StageServiceStub(channel).GetVocabulary(GetVocabularyRequest(), timeout=timeout_s):
        if piece is None:  # so gRPC tells that it could not be parsed
            raise DecodeError
        tokens.extend(piece.tokens)
        special.update(piece.special_token_ids)
    return Vocabulary(tuple(tokens), frozenset(special))


def _without_padding(vocabulary: Vocabulary) -> Vocabulary:
    size = len(vocabulary.tokens)
    while size > 0 and not vocabulary.tokens[size - 1]:
        size -= 1
    return Vocabulary(vocabulary.tokens[:size], vocabulary.special_ids)


def _check_context_length(info: StageInfo, required: Requirements) -> Check:
    theirs, ours = info.max_context_length, required.max_context_length
    detail = f"takes {theirs or 'any number of'} tokens"
    if ours and theirs and theirs < ours:
        detail += f"; the verifier takes {ours}, so it is skipped where contexts are longer"
    return Check("context length", True, detail)


def _kind_name(kind: StageKind.ValueType) -> str:
    if kind not in StageKind.values():
        return f"stage of unknown kind {kind}"
    return StageKind.Name(kind).removeprefix("STAGE_KIND_").lower()
