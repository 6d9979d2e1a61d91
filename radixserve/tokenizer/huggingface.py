"""The tokenizer of a Hugging Face model directory."""

from pathlib import Path
from typing import TypeVar

import msgspec
import tokenizers

from radixserve.errors import ModelLoadError
from radixserve.tokenizer.backend import TokenizerSource, set_added_ends
from radixserve.tokenizer.chat_template import read_template

_File = TypeVar("_File", bound=msgspec.Struct)


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _SpecialTokens(msgspec.Struct, frozen=True):
    """special_tokens_map.json, and the part of tokenizer_config.json that came in its place."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    cls_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None

    def contents(self) -> dict[str, str]:
        """Return the strings of those that are set, by name."""
        tokens = {name: getattr(self, name) for name in _SpecialTokens.__struct_fields__}
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in tokens.items()
            if token is not None
        }


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(_SpecialTokens, frozen=True):
    """tokenizer_config.json. add_bos_token, add_eos_token: None leaves it to tokenizer.json."""

    chat_template: str | list[_NamedTemplate] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


class _ModelConfig(msgspec.Struct, frozen=True):
    """generation_config.json, or config.json."""

    eos_token_id: int | list[int] | None = None


def read_huggingface_tokenizer(directory: Path) -> TokenizerSource:
    """Read tokenizer.json and the files beside it. Raises ModelLoadError if it is missing or unreadable."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{directory} holds no tokenizer.json; save one there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the only type that the library raises
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json", _TokenizerConfig)
    special_tokens = _read_json(directory / "special_tokens_map.json", _SpecialTokens).contents() | config.contents()
    _add_missing_tokens(backend, config, special_tokens)
    bos_token, eos_token = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if config.add_bos_token is not None or config.add_eos_token is not None:
        set_added_ends(
            backend, bos_token if config.add_bos_token else None, eos_token if config.add_eos_token else None
        )
    end_ids = {*_end_ids(directory), _token_id(backend, eos_token)}
    return TokenizerSource(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=_token_id(backend, bos_token),
        eos_token_ids=frozenset(token_id for token_id in end_ids if token_id is not None),
        chat_templates=_chat_templates(directory, config),
    )


def _read_json(file: Path, kind: type[_File]) -> _File:
    """Read a file of which every field may be left out, and so may the file."""
    if not file.is_file():
        return kind()
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: _TokenizerConfig, special_tokens: dict[str, str]
) -> None:
    """Add what only tokenizer_config.json lists, and treat the tokens with a role (bos, eos, ...) as special."""
    for token_id, token in sorted(config.added_tokens_decoder.items()):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token))])
        if backend.token_to_id(token.content) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(token.content)}; the files belong to different models"
            )
    special_ids = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    for content in special_tokens.values():
        if backend.token_to_id(content) not in {None, *special_ids}:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _end_ids(directory: Path) -> list[int]:
    """End-of-sequence ids by generation_config.json, or by config.json where that names none."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name, _ModelConfig).eos_token_id
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def _chat_templates(directory: Path, config: _TokenizerConfig) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    if file.is_file():
        others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        return {"default": read_template(file)} | {other.stem: read_template(other) for other in others}
    match config.chat_template:
        case None:
            return {}
        case str(template):
            return {"default": template}
        case named:
            return {entry.name: entry.template for entry in named}
