"""How many tokens a sequence may have: what the model covers and what the pool holds."""

from radixserve.errors import ConfigError
from radixserve.model.config import LinearScaling, ModelConfig, YarnScaling


def trained_length(model: ModelConfig) -> int:
    """Return the number of positions that the rotary embedding covers, with its scaling.

    Linear scaling stretches max_position_embeddings, and YaRN the length before it; llama3 counts it in already.
    """
    match model.rope.scaling:
        case LinearScaling(factor=factor):
            return int(model.max_position_embeddings * factor)
        case YarnScaling(factor=factor, original_max_position_embeddings=original):
            return int(factor * original)
        case _:
            return model.max_position_embeddings


def choose_max_model_len(asked: int | None, model: ModelConfig, num_pool_tokens: int | None) -> tuple[int, list[str]]:
    """Return the most tokens of a sequence, and a notice for each limit that lowered it unasked.

    num_pool_tokens: what all K/V blocks hold together; None leaves that limit out. Raises ConfigError if more was
    asked for than a limit allows, or if the pool cannot hold a prompt of one token and its answer.
    """
    limit = trained_length(model)
    limits = [(limit, f"{model.architecture} has positions for {limit} tokens", "give at most that many")]
    if model.sliding_window is not None:
        window = f"the attention window of the model is {model.sliding_window} tokens, and no more are supported"
        limits.append((model.sliding_window, window, "give at most that many"))
    if num_pool_tokens is not None:
        pool = f"the K/V blocks hold {num_pool_tokens} tokens"
        limits.append((num_pool_tokens, pool, "lower it, or raise --num-kv-blocks or --kv-cache-memory"))
        if num_pool_tokens < 2:
            raise ConfigError(f"{pool}, but a prompt and its answer take at least 2; raise --num-kv-blocks")
    notices = []
    for length, reason, advice in limits:
        if asked is not None and asked > length:
            raise ConfigError(f"--max-model-len is {asked}, but {reason}; {advice}")
        if asked is None and length < limit:
            notices.append(f"max_model_len is lowered from {limit} to {length}: {reason}.")
            limit = length
    return limit if asked is None else asked, notices
