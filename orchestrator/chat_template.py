"""Renders conversations with a model's own chat template, as the model's publishers do.

The template comes with the model and runs in jinja2's sandbox. Tokens are not known here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplateError(Exception):
    """A conversation that the template cannot render; the text is for the caller."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: The template.
        variables: Values besides the messages, such as `bos_token`.

    Raises:
        ValueError: The template has a syntax error.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the next message.

        Raises:
            ChatTemplateError: The template refuses the conversation or fails on it.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except _Refusal as error:
            raise ChatTemplateError(f"the model's chat template refuses it: {error}") from error
        except Exception as error:
            # A template is a program of its own and may fail in any way on what it did not expect.
            raise ChatTemplateError("the model's chat template cannot render it") from error


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model folder: `chat_template.jinja`, or the one in `tokenizer_config.json`.

    Raises:
        ValueError: The template has a syntax error.
    """
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (folder / TEMPLATE_FILE).exists():
        source = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    if source is None:
        return None
    variables = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(source, variables)


class _Refusal(jinja2.TemplateError):
    """Raised by a template itself, in words meant for the caller."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
