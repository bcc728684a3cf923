"""Between text and token ids: the tokenizer and the chat template of a model folder.

It reads files only; no model library is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from orchestrator.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from orchestrator.detokenizer import Detokenizer
from stagespec.vocabulary import Vocabulary, read_vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class TextCodec:
    """The text side of one model.

    Attributes:
        vocabulary: Bytes behind every token id.
        tokenizer_hash: What other stages' tokenizers are compared with.
        chat_template: None if the model has none.
    """

    vocabulary: Vocabulary
    tokenizer_hash: str
    chat_template: ChatTemplate | None
    _tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Reads `tokenizer.json` and the chat template, if there is one.

        Raises:
            ValueError: The folder has no tokenizer, or a file in it cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json, which every model with a fast tokenizer has")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        # Both are left behind by training and would change prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = read_vocabulary(tokenizer)
        return cls(vocabulary, vocabulary.hash, read_chat_template(folder), tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever the tokenizer adds around a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, each message with `role` and `content`.

        Raises:
            ChatTemplateError: There is no template, or it cannot render the conversation.
        """
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template; send text or token_ids")
        # The template writes the special tokens itself.
        text = self.chat_template.render(messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """A whole text, special tokens included, as the tokenizer itself decodes it."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def detokenizer(self) -> Detokenizer:
        """For the tokens of one generation."""
        return Detokenizer(self.vocabulary)
