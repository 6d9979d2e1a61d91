"""Text to token ids and back, for one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.tokenizer.answer_turns import AnswerLookup
from radixserve.tokenizer.backend import TokenizerSource, encode_texts
from radixserve.tokenizer.chat_encoder import ChatEncoder, ChatOptions
from radixserve.tokenizer.chat_template import ChatTemplate, read_template
from radixserve.tokenizer.digit_marks import TextEnd
from radixserve.tokenizer.encoded_chat import EncodedChat
from radixserve.tokenizer.gguf_tokenizer import read_gguf_tokenizer
from radixserve.tokenizer.huggingface import read_huggingface_tokenizer
from radixserve.tokenizer.token_text import DecodeStream, TokenText


class Tokenizer:
    """Encodes text and conversations, decodes tokens. Safe to use from several threads.

    vocab_size: ids below it decode. eos_token_ids: every id that ends an answer. special_token_ids: those that are no
    part of a text.
    """

    def __init__(self, source: TokenizerSource, templates: dict[str, ChatTemplate]) -> None:
        self._backend = source.backend
        self._text = TokenText(source.backend)
        self._chat_encoder = ChatEncoder(source.backend, templates, source.special_tokens) if templates else None
        self.vocab_size = 1 + max(source.backend.get_vocab().values(), default=-1)
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        self.special_token_ids = self._text.special_ids

    @classmethod
    def load(cls, path: Path, *, chat_template: Path | None = None) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face directory or a .gguf file.

        chat_template: a Jinja file to use instead of the model's own. Raises ModelLoadError if the files are not
        there or not supported, ConfigError if a template cannot be read or is not valid Jinja.
        """
        source = read_huggingface_tokenizer(path) if path.is_dir() else read_gguf_tokenizer(path)
        if chat_template is not None:
            return cls(source, {"default": ChatTemplate(read_template(chat_template), origin=str(chat_template))})
        templates = {
            name: ChatTemplate(text, origin=f"{path} ({name})") for name, text in source.chat_templates.items()
        }
        return cls(source, templates if "default" in templates else {})

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""
        return self._chat_encoder is not None

    @property
    def control_token_ids(self) -> frozenset[int]:
        """The tokens that only the chat template writes; none without a template."""
        return frozenset() if self._chat_encoder is None else self._chat_encoder.control_token_ids

    @property
    def asks_for_hermes_calls(self) -> bool:
        """Whether prompts with tools, as encode_chat writes them, ask for calls in the hermes format."""
        return self._chat_encoder is not None and self._chat_encoder.asks_for_hermes_calls

    @property
    def special_texts(self) -> frozenset[str]:
        """What the special tokens spell out as, if they are not skipped."""
        return self._text.special_texts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of text. The GIL is released meanwhile, so a worker thread can run it."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text. Strings of special tokens in it become these tokens.

        add_special_tokens: put around it what the model expects around any text, such as a bos token.
        """
        return encode_texts(self._backend, texts, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        answers: AnswerLookup | None = None,
    ) -> list[int]:
        """Return the ids of a conversation as the chat template writes it.

        Control tokens come from the template only: their strings in messages and tools stay text. Tools and calls that
        the template does not write are put into the messages, in the hermes format.
        continue_final_message: leave the last message, the assistant's, open.
        answers: finds the ids to use for an assistant's turn that is exactly an earlier answer; they must hold no
        control token. Releases the GIL while encoding.
        Raises InvalidRequest if there is no template, or it refuses these messages.
        """
        options = ChatOptions(tools, add_generation_prompt, continue_final_message, template_kwargs or {})
        return self.encode_chat_with_ends(messages, options, (), answers).token_ids

    def encode_chat_with_ends(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions,
        ends: Sequence[TextEnd],
        answers: AnswerLookup | None = None,
    ) -> EncodedChat:
        """Return the ids of a conversation, as encode_chat does, and where places in its messages have come to stand.

        ends: in the order of the conversation. With any, it is rendered twice.
        Raises InvalidRequest for an end that the template does not show, too.
        """
        if self._chat_encoder is None:
            raise InvalidRequest(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                param="messages",
            )
        return self._chat_encoder.encode(messages, options, answers, ends)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token_ids, U+FFFD for bytes that are no UTF-8. Ids that name no token add nothing."""
        return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a decoder for the tokens that follow prompt_token_ids, as they arrive."""
        return self._text.stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token on its own, which may be part of a character; a special token's name."""
        return self._text.token_bytes(token_id)
