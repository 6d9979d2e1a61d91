"""How text is cut into words before byte-level BPE, by the names that GGUF files give to the ways.

Only families whose own tokenizer.json is known to cut this way are listed: a near miss gives wrong ids for some texts
without any sign of it.
"""

from dataclasses import dataclass

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from radixserve.errors import ModelLoadError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s",
)


@dataclass(frozen=True, slots=True)
class WordRules:
    """A way to cut text into words.

    splits: regular expressions whose matches become words of their own, one expression after the other; without any,
    GPT-2's words. single_digits: every digit is a word. is_nfc: text is brought to Unicode's composed form first.
    ignore_merges: a word that is in the vocabulary is taken as it is. adds_bos: a text begins with a bos token,
    unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    is_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def apply_to(self, backend: tokenizers.Tokenizer) -> None:
        """Make backend cut text this way, and read the words as bytes."""
        steps = [pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated") for split in self.splits]
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, *digits, byte_level])
        if self.is_nfc:
            backend.normalizer = normalizers.NFC()


def find_word_rules(name: object) -> WordRules:
    """Return the rules that `tokenizer.ggml.pre` names. Raises ModelLoadError for any other name."""
    rules = _RULES.get(name) if isinstance(name, str) else None
    if rules is None:
        raise ModelLoadError(
            f"the GGUF file cuts text by {name!r} (tokenizer.ggml.pre), which is not supported; use the model's "
            f"Hugging Face directory, or a file with one of {', '.join(_RULES)}"
        )
    return rules


_GPT2 = WordRules()
_SINGLE_DIGITS = WordRules(single_digits=True)
_CL100K_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_CL100K = WordRules(splits=(_CL100K_WORDS,))
_LLAMA3 = WordRules(splits=(_CL100K_WORDS,), ignore_merges=True, adds_bos=True)
_QWEN2 = WordRules(splits=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",), is_nfc=True)
_TEKKEN = WordRules(
    splits=("|".join([*(words % "" for words in _CASED_WORDS), r"\p{N}", _REST_WITH_SLASHES]),),
    ignore_merges=True,
    adds_bos=True,
)
_O200K = WordRules(
    splits=("|".join([*(words % f"{_CONTRACTIONS}?" for words in _CASED_WORDS), r"\p{N}{1,3}", _REST_WITH_SLASHES]),),
)
_DEEPSEEK_CODER = WordRules(
    splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), single_digits=True
)
_DEEPSEEK_V3 = WordRules(
    splits=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
)
_RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": WordRules(is_nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": WordRules(single_digits=True, is_nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
