"""Every configuration of every kernel is compiled for every target, without a GPU."""

import dataclasses
import re
from itertools import combinations

import pytest

from benchmarks.kernel_resources import (
    DOCUMENT,
    TARGETS,
    Resources,
    Target,
    compilations,
    compile_case,
    kernel_cases,
    problems,
    table_rows,
)
from radixserve.kernels.rms_norm import MAX_ROW
from radixserve.kernels.tiles import CompileCase

NUM_PLAIN_COMPILES = 12
COMPILATIONS = compilations()
NAMES = [f"{case.name} {target.name}" for case, target in COMPILATIONS]


def pairwise(limit: int) -> set[str]:
    """Return names of compilations that, taken greedily, cover most pairs of kernel, target, dtype and head size."""

    def pairs(case: CompileCase, target: Target) -> set[tuple[object, object]]:
        dtype = next(iter(case.signature.values()))
        return set(combinations((case.fn.__name__, target.name, dtype, case.constexprs.get("HEAD_DIM")), 2))

    left = dict(zip(NAMES, [pairs(*compilation) for compilation in COMPILATIONS], strict=True))
    covered: set[tuple[object, object]] = set()
    chosen = set()
    for _ in range(limit):
        best = max(left, key=lambda name: len(left[name] - covered))
        covered |= left.pop(best)
        chosen.add(best)
    return chosen


PLAIN = pairwise(NUM_PLAIN_COMPILES)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(*compilation, id=name, marks=() if name in PLAIN else pytest.mark.slow)
        for name, compilation in zip(NAMES, COMPILATIONS, strict=True)
    ],
)
def test_a_configuration_neither_spills_nor_asks_for_too_much_shared_memory(case: CompileCase, target: Target) -> None:
    assert problems(compile_case(case, target), target) == []


def test_configurations_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_document_lists_every_configuration_on_every_target() -> None:
    assert set(table_rows(DOCUMENT.read_text())) == {(case.name, target.name) for case, target in COMPILATIONS}


def test_the_document_explains_every_kernel() -> None:
    document = DOCUMENT.read_text()
    for name in {case.fn.__module__.rpartition(".")[2] for case in kernel_cases()}:
        assert f"`{name}`" in document


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_configuration_that_asks_for_too_much_is_seen(target: Target) -> None:
    largest = f"add_rms_norm fp32 {MAX_ROW}"
    case = next(case for case in kernel_cases() if case.name == largest and case.family == target.family)
    (spill,) = problems(compile_case(dataclasses.replace(case, num_warps=1), target), target)
    assert re.fullmatch(r"spills \d+ bytes of registers a thread", spill)
    resources = Resources(registers=1, spilled_bytes=0, scalar_spills=0, shared=target.max_shared + 1)
    assert len(problems(resources, target)) == 1
