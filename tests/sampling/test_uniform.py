import numpy as np

from radixserve.sampling.uniform import uniforms

MASK = 2**64 - 1


def expected(seed: int, choice_index: int, position: int) -> float:
    """The documented function, in Python's integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
        return word ^ (word >> 31)

    state = 0
    for word in (seed, choice_index, position):
        state = mix(((state ^ (word & MASK)) + 0x9E3779B97F4A7C15) & MASK)
    return (mix((state + 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def test_a_number_is_a_function_of_seed_choice_and_position_alone() -> None:
    words = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 3, 7), (2**63 - 1, 127, 2**20), (-(2**63), 0, 0)]
    together = uniforms(*zip(*words, strict=True))
    assert together.tolist() == [expected(*word) for word in words]
    assert [uniforms([a], [b], [c]).item() for a, b, c in reversed(words)] == together[::-1].tolist()
    assert len(set(together.tolist())) == len(words)


def test_the_numbers_never_change_between_releases() -> None:
    # A seed that a user wrote down must repeat; these were computed once.
    assert uniforms([0, 42, -7], [0, 0, 1], [0, 5, 2]).tolist() == [
        0.1296456182997474,
        0.06603386379997422,
        0.4828871303884249,
    ]


def test_no_draws_give_no_numbers() -> None:
    assert uniforms([], [], []).shape == (0,)


def test_numbers_are_uniform_and_uncorrelated_along_each_word() -> None:
    count = 20_000
    run, same = range(count), [11] * count
    for words in ((run, same, same), (same, run, same), (same, same, run)):
        numbers = uniforms(*words)
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        bins = np.bincount((numbers * 100).astype(int), minlength=100)
        chi_square = float(((bins - count / 100) ** 2 / (count / 100)).sum())
        assert 60 < chi_square < 150  # 99 degrees of freedom: outside with a chance of 0.1 %
        for lag in (1, 2, 16):
            assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / count**0.5


def test_low_bits_are_as_even_as_high_ones() -> None:
    count = 4096
    words = (uniforms([5] * count, [0] * count, range(count)) * 2**53).astype(np.uint64)
    for bit in range(53):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - count / 2) < 4.5 * (count / 4) ** 0.5
