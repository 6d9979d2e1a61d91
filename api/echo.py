"""What `echo` puts before a completion: its prompt."""

from dataclasses import dataclass

from radixserve.api.prompts import Prompt
from radixserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its completions begin with it. text_offsets: the characters before each of its tokens."""

    token_ids: list[int]
    text: str
    text_offsets: list[int]


def echo_of(prompt: Prompt, token_ids: list[int], tokenizer: Tokenizer, *, is_continued: bool) -> Echo:
    """Return a prompt, given as text or token ids, as its tokens read.

    Special tokens are shown, as a text may spell them out, but not the one that the tokenizer puts before every text.
    is_continued: an answer follows, which shows the character that the prompt ends in the middle of.
    """
    num_hidden = 0
    if isinstance(prompt, str) and token_ids[0] == tokenizer.bos_token_id:
        num_hidden = int(not prompt.encode().startswith(tokenizer.token_bytes(token_ids[0])))
    stream = tokenizer.decode_stream(skip_special_tokens=False)
    pieces: list[str] = []
    offsets = [0] * num_hidden
    num_characters = 0
    for token_id in token_ids[num_hidden:]:
        offsets.append(num_characters)
        pieces.append(stream.push((token_id,)))
        num_characters += len(pieces[-1])
    if not is_continued:
        pieces.append(stream.flush())
    return Echo(token_ids, "".join(pieces), offsets)
