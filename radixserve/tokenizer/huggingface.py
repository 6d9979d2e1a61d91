"""The tokenizer of a Hugging Face model directory."""

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from radixserve.errors import ModelLoadError
from radixserve.tokenizer.source import TokenizerSource, set_added_ends

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    _add_missing_tokens(backend, config, special_tokens)
    if isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        set_added_ends(
            backend,
            special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    eos_token_ids = set(_end_ids(directory))
    if (eos_token_id := _token_id(backend, special_tokens.get("eos_token"))) is not None:
        eos_token_ids.add(eos_token_id)
    return TokenizerSource(
        backend=backend,
        special_tokens=special_tokens,
        bos_token_id=_token_id(backend, special_tokens.get("bos_token")),
        eos_token_ids=frozenset(eos_token_ids),
        chat_templates=_chat_templates(directory, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{file} is no JSON object: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Add what only tokenizer_config.json lists, and treat the tokens with a role (bos, eos, ...) as special."""
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted((int(token_id), entry) for token_id, entry in listed.items()):
        if backend.token_to_id(entry["content"]) is None:
            flags = {name: value for name, value in entry.items() if isinstance(value, bool)}
            backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {entry['content']!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(entry['content'])}; the files belong to different models"
            )
    special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    for content in special_tokens.values():
        if backend.token_to_id(content) not in {None, *special_ids}:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _end_ids(directory: Path) -> list[int]:
    """End-of-sequence ids by generation_config.json, or by config.json where that names none."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        if isinstance(ids, int):
            return [ids]
        if isinstance(ids, list):
            return ids
    return []


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates = {"default": file.read_text(encoding="utf-8")}
        for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text(encoding="utf-8")
        return templates
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {}
