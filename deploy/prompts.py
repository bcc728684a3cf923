"""Prompts for benchmarks: from a JSON lines file, or HumanEval as `stagespec fetch` prepared it."""

import json
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import SetupError
from services.cache import cache_folder
from stagespec.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerateRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text, or a conversation.

    Attributes:
        text: What to continue; None for a conversation.
        messages: Role and content of each turn; empty for plain text.
    """

    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def plain_text(self) -> str:
        """All of its text, roles and template left out."""
        return self.text if self.text is not None else "\n".join(content for _, content in self.messages)

    def request(self) -> GenerateRequest:
        """A request for its continuation, with every option unset."""
        if self.text is not None:
            return GenerateRequest(text=self.text)
        turns = [ChatMessage(role=role, content=content) for role, content in self.messages]
        return GenerateRequest(chat=ChatPrompt(messages=turns))


def read_prompts(path: Path | None, limit: int | None) -> list[Prompt]:
    """Reads prompts.

    Args:
        path: A file with one JSON object a line, each with `prompt` or `messages`; None for HumanEval.
        limit: How many to read from the start; None for all.

    Raises:
        SetupError: The file cannot be read, or a line of it is no prompt.
    """
    if path is None:
        path = cache_folder() / "humaneval.jsonl"
        if not path.exists():
            raise SetupError(f"{path} is missing: run `stagespec fetch`, or name a file with --prompts")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read as UTF-8 text: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    prompts = [_parse(path, number, line) for number, line in filled[:limit]]
    if not prompts:
        raise SetupError(f"{path} has no prompts")
    return prompts


def _parse(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise SetupError(f"{where} is not JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return Prompt(text=entry["prompt"])
    try:
        turns = tuple((str(turn["role"]), str(turn["content"])) for turn in entry["messages"])
    except (KeyError, TypeError):
        raise SetupError(f"{where} has neither `prompt` nor `messages` with role and content") from None
    return Prompt(messages=turns)
