"""From a GenerateRequest to a settled generation: every value checked, every default filled in.

All that is wrong with a request is said at once, each time with the field, the value and the limit. What is
done with a generation is not known here.
"""

import secrets
from dataclasses import dataclass

from orchestrator.chat_template import ChatTemplateError
from orchestrator.roles import DraftLimits
from orchestrator.settings import SpeculationSettings
from orchestrator.stopping import StopRules
from orchestrator.text import TextCodec
from orchestrator.violations import Violations
from stagespec.v1.generation_pb2 import (
    ChatPrompt,
    ChunkGranularity,
    EffectiveSettings,
    GenerateRequest,
    SamplingOptions,
    SpeculationOptions,
    StopOptions,
)
from stagespec.v1.sampling_pb2 import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is held against.

    Attributes:
        vocabulary_size: Token ids are below this.
        max_context_length: Prompt and output together; None for no limit.
        max_cache_tokens: What the contexts of all requests may have together; None for no limit.
        eos_token_ids: End-of-sequence tokens of the model.
        drafter_names: Drafters of the pipeline, in order.
        max_nodes: Most nodes in a draft.
        default_max_tokens: Tokens to generate when a request does not say.
        speculation: The server's own settings.
    """

    vocabulary_size: int
    max_context_length: int | None
    max_cache_tokens: int | None
    eos_token_ids: tuple[int, ...]
    drafter_names: tuple[str, ...]
    max_nodes: int
    default_max_tokens: int
    speculation: SpeculationSettings


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as it will be carried out.

    Attributes:
        request_id: Its name.
        tenant: Whose it is.
        prompt: Token ids to continue.
        sampling: How tokens are drawn, for the stages.
        rules: When it ends.
        limits: How far drafts may grow.
        drafters: Drafters to use by name, in order; None for those of the pipeline.
        num_logprobs: Alternatives to report; None for no log probabilities.
        chunk_per_token: Whether each token gets a chunk of its own.
        return_prompt: Whether the completion repeats the prompt's token ids.
        vocabulary_size: Token ids are below this.
        effective: All settings, for the caller.
    """

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    rules: StopRules
    limits: DraftLimits
    drafters: tuple[str, ...] | None
    num_logprobs: int | None
    chunk_per_token: bool
    return_prompt: bool
    vocabulary_size: int
    effective: EffectiveSettings

    @property
    def num_cache_tokens(self) -> int:
        """Most tokens that its context has at the verifier, drafted nodes included."""
        num_nodes = 0 if self.drafters == () else self.limits.max_nodes
        most = len(self.prompt) + self.rules.max_tokens + num_nodes
        limit = self.limits.max_context_length
        return most if limit is None else min(most, limit)


def settle(request: GenerateRequest, request_id: str, codec: TextCodec, model: ServedModel) -> Generation:
    """Checks a request and fills in its defaults. May take long for a long text.

    Raises:
        RpcError: INVALID_ARGUMENT naming every field at fault.
    """
    found = Violations()
    check_name("request_id", request.request_id, found)
    check_name("tenant", request.tenant, found)
    prompt = _read_prompt(request, codec, model, found)
    sampling = _settle_sampling(request.sampling, model, found)
    stop = _settle_stop(request.stop, model, found)
    speculation = _settle_speculation(request.speculation, model, found)
    if request.HasField("num_logprobs"):
        found.check_range("num_logprobs", request.num_logprobs, 0, 20)
    if request.chunk_granularity not in ChunkGranularity.values():
        found.add("chunk_granularity", f"{request.chunk_granularity} is no value of ChunkGranularity")
    _check_cache(prompt, stop.max_tokens, model, found)
    found.raise_any()

    limits_of_context = [limit for limit in (model.max_context_length, model.max_cache_tokens) if limit]
    num_context_left = None
    if model.max_context_length is not None:
        num_context_left = model.max_context_length - len(prompt)
    rules = StopRules(
        max_tokens=stop.max_tokens,
        num_context_left=num_context_left,
        min_tokens=stop.min_tokens,
        strings=tuple(stop.strings),
        token_ids=frozenset(stop.token_ids),
        eos_token_ids=frozenset() if stop.ignore_eos else frozenset(model.eos_token_ids),
        include_in_text=stop.include_in_text,
    )
    limits = DraftLimits(
        max_nodes=speculation.max_nodes,
        max_depth=speculation.max_depth,
        max_rounds=speculation.max_rounds,
        node_price=model.speculation.node_price,
        pass_price=model.speculation.pass_price,
        # Near the end of what there is, drafts get smaller.
        max_context_length=min(limits_of_context, default=None),
        # No node has more children than a draft has nodes.
        max_children=speculation.max_children if speculation.max_children < speculation.max_nodes else None,
        fixed_size=speculation.fixed_size,
    )
    drafters: tuple[str, ...] | None = None
    if not speculation.enabled:
        drafters = ()
    elif request.speculation.drafters:
        drafters = tuple(request.speculation.drafters)
    return Generation(
        request_id=request_id,
        tenant=request.tenant,
        prompt=tuple(prompt),
        sampling=_stage_sampling(sampling, len(prompt), rules, model.vocabulary_size),
        rules=rules,
        limits=limits,
        drafters=drafters,
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        chunk_per_token=request.chunk_granularity == ChunkGranularity.CHUNK_GRANULARITY_TOKEN,
        return_prompt=request.return_prompt_token_ids,
        vocabulary_size=model.vocabulary_size,
        effective=EffectiveSettings(sampling=sampling, stop=stop, speculation=speculation),
    )


def check_name(field: str, name: str, found: Violations) -> None:
    """Notes a name that could not be sent on in metadata."""
    if len(name.encode()) > 128 or not (name.isascii() and name.isprintable()):
        found.add(field, "it must be printable ASCII of at most 128 bytes")


def check_chat(chat: ChatPrompt, found: Violations) -> None:
    """Notes what no template could render."""
    if not chat.messages:
        found.add("chat.messages", "it is empty; at least one message is needed")
    for i, message in enumerate(chat.messages):
        if not message.role:
            found.add(f"chat.messages[{i}].role", "it is empty")


def encode_chat(chat: ChatPrompt, codec: TextCodec, found: Violations) -> list[int]:
    """Token ids of a conversation; notes it if the template cannot render it."""
    try:
        return codec.encode_chat([{"role": m.role, "content": m.content} for m in chat.messages])
    except ChatTemplateError as error:
        found.add("chat", str(error))
        return []


def _read_prompt(
    request: GenerateRequest, codec: TextCodec, model: ServedModel, found: Violations
) -> list[int]:
    kind = request.WhichOneof("prompt")
    prompt: list[int] = []
    if kind == "text":
        prompt = codec.encode(request.text)
        if not prompt:
            found.add("text", "it has no tokens, and this model's tokenizer adds none; send at least one")
    elif kind == "token_ids":
        prompt = list(request.token_ids.token_ids)
        if not prompt:
            found.add("token_ids.token_ids", "it is empty; at least one token is needed")
        found.check_token_ids("token_ids.token_ids", prompt, model.vocabulary_size)
    elif kind == "chat":
        check_chat(request.chat, found)
        if request.chat.messages:
            prompt = encode_chat(request.chat, codec, found)
    else:
        found.add("prompt", "it is not set; send text, token_ids or chat")
    if kind is not None and model.max_context_length is not None and len(prompt) >= model.max_context_length:
        found.add(
            kind,
            f"the prompt has {len(prompt)} tokens, the model's context takes {model.max_context_length},"
            " and at least one must be left to generate",
        )
    return prompt


def _check_cache(prompt: list[int], max_tokens: int, model: ServedModel, found: Violations) -> None:
    """Notes a request that no wait would give room to."""
    limit, needed = model.max_cache_tokens, len(prompt) + max_tokens
    if model.max_context_length is not None:
        needed = min(needed, model.max_context_length)
    if limit is not None and needed > limit and max_tokens > 0:
        found.add(
            "stop.max_tokens",
            f"{max_tokens} after a prompt of {len(prompt)} tokens may take {needed} tokens of the target's"
            f" cache, which has room for {limit}; ask for fewer, or shorten the prompt",
        )


def _settle_sampling(options: SamplingOptions, model: ServedModel, found: Violations) -> SamplingOptions:
    settled = SamplingOptions(
        temperature=options.temperature if options.HasField("temperature") else 1.0,
        top_k=options.top_k if options.HasField("top_k") else model.vocabulary_size,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p if options.HasField("min_p") else 0.0,
        repetition_penalty=options.repetition_penalty if options.HasField("repetition_penalty") else 1.0,
        frequency_penalty=options.frequency_penalty if options.HasField("frequency_penalty") else 0.0,
        presence_penalty=options.presence_penalty if options.HasField("presence_penalty") else 0.0,
        logit_bias=options.logit_bias,
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
    )
    found.check_range("sampling.temperature", settled.temperature, 0, 100)
    found.check_range("sampling.top_k", settled.top_k, 1, model.vocabulary_size)
    found.check_range("sampling.top_p", settled.top_p, 0, 1, above_low=True)
    found.check_range("sampling.min_p", settled.min_p, 0, 1)
    found.check_range("sampling.repetition_penalty", settled.repetition_penalty, 0.01, 100)
    found.check_range("sampling.frequency_penalty", settled.frequency_penalty, -100, 100)
    found.check_range("sampling.presence_penalty", settled.presence_penalty, -100, 100)
    found.check_count("sampling.logit_bias", len(settled.logit_bias), 1024)
    for token_id, bias in sorted(settled.logit_bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < model.vocabulary_size:
            found.add(field, f"token id {token_id} is not from 0 to {model.vocabulary_size - 1}")
        found.check_range(field, bias, -1000, 1000)
    return settled


def _settle_stop(options: StopOptions, model: ServedModel, found: Violations) -> StopOptions:
    settled = StopOptions()
    settled.CopyFrom(options)
    if not options.HasField("max_tokens"):
        settled.max_tokens = model.default_max_tokens
    settled.min_tokens = options.min_tokens
    found.check_minimum("stop.max_tokens", settled.max_tokens, 1)
    found.check_minimum("stop.min_tokens", settled.min_tokens, 0)
    if settled.min_tokens > settled.max_tokens:
        found.add("stop.min_tokens", f"{settled.min_tokens} is above max_tokens, {settled.max_tokens}")
    found.check_count("stop.strings", len(settled.strings), 16)
    for i, string in enumerate(settled.strings):
        if not 1 <= len(string.encode()) <= 256:
            found.add(f"stop.strings[{i}]", f"it has {len(string.encode())} bytes; 1 to 256 are allowed")
    found.check_count("stop.token_ids", len(settled.token_ids), 64)
    found.check_token_ids("stop.token_ids", settled.token_ids, model.vocabulary_size)
    return settled


def _settle_speculation(
    options: SpeculationOptions, model: ServedModel, found: Violations
) -> SpeculationOptions:
    defaults = model.speculation
    enabled = options.enabled if options.HasField("enabled") else True
    settled = SpeculationOptions(
        enabled=enabled,
        drafters=(options.drafters or model.drafter_names) if enabled else [],
        max_nodes=options.max_nodes
        if options.HasField("max_nodes")
        else min(defaults.max_nodes, model.max_nodes),
        max_depth=options.max_depth if options.HasField("max_depth") else defaults.max_depth,
        max_rounds=options.max_rounds if options.HasField("max_rounds") else defaults.max_rounds,
        fixed_size=options.fixed_size,
    )
    if options.HasField("max_children"):
        settled.max_children = options.max_children
    else:
        settled.max_children = max(1, settled.max_nodes)
    found.check_range("speculation.max_nodes", settled.max_nodes, 1, model.max_nodes)
    found.check_minimum("speculation.max_depth", settled.max_depth, 1)
    found.check_minimum("speculation.max_rounds", settled.max_rounds, 1)
    found.check_minimum("speculation.max_children", settled.max_children, 1)
    known = ", ".join(model.drafter_names) or "none"
    for i, name in enumerate(options.drafters):
        field = f"speculation.drafters[{i}]"
        if name not in model.drafter_names:
            found.add(field, f"there is no drafter {name!r}; the pipeline has: {known}")
        elif name in options.drafters[:i]:
            found.add(field, f"{name!r} is named twice")
    return settled


def _stage_sampling(
    settled: SamplingOptions, prompt_length: int, rules: StopRules, vocabulary_size: int
) -> SamplingParams:
    # What has no effect stays unset, which spares every stage the work.
    def unless(neutral: float, value: float) -> float | None:
        return None if value == neutral else value

    return SamplingParams(
        temperature=settled.temperature,
        top_k=None if settled.top_k == vocabulary_size else settled.top_k,
        top_p=unless(1.0, settled.top_p),
        min_p=unless(0.0, settled.min_p),
        repetition_penalty=unless(1.0, settled.repetition_penalty),
        frequency_penalty=unless(0.0, settled.frequency_penalty),
        presence_penalty=unless(0.0, settled.presence_penalty),
        logit_bias=settled.logit_bias,
        seed=settled.seed,
        prompt_length=prompt_length,
        min_tokens=rules.min_tokens,
        end_token_ids=rules.end_token_ids if rules.min_tokens > 0 else [],
    )
