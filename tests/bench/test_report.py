import msgspec
import pytest

from radixserve.bench.client import RequestRecord
from radixserve.bench.report import compute_figures, make_repeat, percentile, summarize


def record(**fields: object) -> RequestRecord:
    whole = {"session": 0, "turn": 0, "output_tokens": 4, "prompt_tokens": 10, "cached_tokens": 0, "has_usage": True}
    return RequestRecord(**{**whole, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 95, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([1.0, 2.0, 3.0], 50, 2.0),
        (list(range(101)), 95, 95.0),
        (list(range(1, 21)), 95, 19.05),
        ([5.0, 5.0, 5.0], 95, 5.0),
        ([1.0, 9.0], 0, 1.0),
        ([1.0, 9.0], 100, 9.0),
    ],
)
def test_a_percentile_is_linear_between_neighbours(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_latencies_are_pooled_over_requests_and_given_in_milliseconds() -> None:
    figures = compute_figures([record(ttft=0.1, gaps=[0.01, 0.03]), record(ttft=0.3, gaps=[0.02])], 2, 2.0)
    assert figures.ttft_p50_ms == pytest.approx(200)
    assert figures.ttft_p95_ms == pytest.approx(290)
    assert figures.itl_p50_ms == pytest.approx(20)
    assert figures.output_tokens_per_second == pytest.approx(4.0)


def test_time_per_output_token_is_of_tokens_and_not_of_chunks() -> None:
    one_chunk_a_token = record(gaps=[0.01, 0.01, 0.01])
    four_tokens_in_two_chunks = record(gaps=[0.06])
    one_token = record(gaps=[], output_tokens=1)
    figures = compute_figures([one_chunk_a_token, four_tokens_in_two_chunks, one_token], 3, 1.0)
    assert figures.tpot_p50_ms == pytest.approx((10 + 20) / 2)


def test_computed_tokens_are_prompt_less_cached() -> None:
    figures = compute_figures([record(cached_tokens=0), record(prompt_tokens=20, cached_tokens=8)], 2, 1.0)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.computed_tokens) == (30, 8, 22)


def test_a_count_that_one_request_lacks_is_not_summed() -> None:
    figures = compute_figures([record(), record(cached_tokens=None)], 2, 1.0)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.computed_tokens) == (20, None, None)


def test_a_failed_request_is_counted_and_in_no_other_figure() -> None:
    failed = record(error="gone", ttft=9.0, gaps=[9.0], output_tokens=9, prompt_tokens=None)
    figures = compute_figures([record(ttft=0.1), failed], 6, 1.0)
    assert (figures.num_completed, figures.num_failed, figures.num_not_sent) == (1, 1, 4)
    assert figures.ttft_p95_ms == pytest.approx(100)
    assert figures.itl_p50_ms is None
    assert figures.output_tokens == 4
    assert figures.prompt_tokens == 10


def test_the_summary_is_the_median_over_repeats_of_what_all_of_them_know() -> None:
    repeats = [make_repeat([record(ttft=ttft)], 1, wall) for ttft, wall in ((0.1, 1.0), (0.2, 3.0), (0.6, 2.0))]
    summary = summarize([repeat.figures for repeat in repeats])
    assert summary["ttft_p50_ms"]["median"] == pytest.approx(200)
    assert summary["wall_seconds"] == pytest.approx({"median": 2.0, "p10": 1.2, "p90": 2.8})
    assert "itl_p50_ms" not in summary


def test_a_repeat_survives_json() -> None:
    repeat = make_repeat([record(ttft=0.1, error=None)], 1, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(repeat), type=type(repeat)) == repeat
