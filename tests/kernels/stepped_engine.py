"""An engine on a tiny model and a named attention backend, for tests that compare backends."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.engine.answer import GenerationResult
from radixserve.engine.start import start_engine
from radixserve.protocol import AddRequest
from radixserve.sampling_params import SamplingParams


class Engine:
    """An engine in this process, stepped until it is idle."""

    def __init__(self, model: Path, backend: str, **settings: Any) -> None:
        # float32, so that backends can be compared.
        defaults = {"device": "cpu", "dtype": "float32"}
        defaults |= {"num_kv_blocks": 40, "max_num_batched_tokens": 48, "max_num_seqs": 8}
        config = EngineConfig.from_settings(defaults | {"model": str(model), "attention_backend": backend} | settings)
        started = start_engine(config, show_progress=False)
        assert started.ready.attention_backend == backend
        self.core = started.core

    def ask(self, *requests: tuple[Sequence[int], SamplingParams | BeamSearchParams]) -> list[GenerationResult]:
        """Answer requests that run side by side."""
        results = {}
        for index, (prompt, params) in enumerate(requests):
            num_answers = params.num_returned if isinstance(params, BeamSearchParams) else params.n
            results[str(index)] = GenerationResult.empty(list(prompt), num_answers)
            self.core.add(AddRequest(str(index), array("i", prompt).tobytes(), params, b""))
        while self.core.has_work:
            for delta in self.core.step().deltas:
                assert delta.failure is None
                results[delta.request_id].add(delta)
        return list(results.values())


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * i * i) % 250 for i in range(length)]


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [answer.token_ids for result in results for answer in result.answers]


def greedy(max_tokens: int = 5, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)
