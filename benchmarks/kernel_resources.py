"""What does each Triton kernel need of a GPU? Compiles every configuration ahead of time, without a GPU.

    python -m benchmarks.kernel_resources            # prints the table, a row a configuration and target
    python -m benchmarks.kernel_resources --write    # and puts it into docs/KERNELS.md

Exits with 1 if a configuration spills registers or needs more shared memory than its target has.
"""

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixserve.kernels.tiles import CompileCase, TargetFamily

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "KERNELS.md"
BEGIN, END = "<!-- kernel_resources: begin -->", "<!-- kernel_resources: end -->"
_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(slots=True, frozen=True)
class Target:
    """A GPU to compile for. max_shared: bytes of shared memory (LDS) that one program may have.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability; AMD CDNA 3 ISA, section 2.2.
    """

    name: str
    family: TargetFamily
    gpu: GPUTarget
    max_shared: int


TARGETS = (
    Target("sm_80", "cuda", GPUTarget("cuda", 80, 32), 163 * 1024),
    Target("sm_90", "cuda", GPUTarget("cuda", 90, 32), 227 * 1024),
    Target("gfx942", "hip", GPUTarget("hip", "gfx942", 64), 64 * 1024),
)


@dataclass(slots=True, frozen=True)
class Resources:
    """What a compiled kernel takes. registers: of a thread, vector ones on AMD. shared: bytes of a program.

    spilled_bytes: memory that each thread has for registers that did not fit.
    scalar_spills: scalar registers, on AMD, that are kept in lanes of vector registers; they cost no memory.
    """

    registers: int
    spilled_bytes: int
    scalar_spills: int
    shared: int


def kernel_cases() -> list[CompileCase]:
    """Return the configurations of every kernel, those of each module of radixserve.kernels that lists some."""
    cases: list[CompileCase] = []
    for module_info in pkgutil.iter_modules([str(ROOT / "kernels")]):
        module = importlib.import_module(f"radixserve.kernels.{module_info.name}")
        if hasattr(module, "compile_cases"):
            cases += module.compile_cases()
    return cases


def compilations() -> list[tuple[CompileCase, Target]]:
    """Return every configuration with every target that it is for."""
    return [(case, target) for case in kernel_cases() for target in TARGETS if target.family == case.family]


def compile_case(case: CompileCase, target: Target) -> Resources:
    """Compile a configuration for a target, or find it in Triton's cache. Raises what Triton raises."""
    places = {name: (case.fn.arg_names.index(name),) for name in case.divisible_by_16}
    source = ASTSource(
        fn=case.fn,
        signature=dict(case.signature),
        constexprs=dict(case.constexprs),
        attrs={place: [["tt.divisibility", 16]] for place in places.values()},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled: Any = triton.compile(source, target=target.gpu, options=options)
    shared: int = compiled.metadata.shared
    if target.family == "cuda":
        return _cuda_resources(compiled.asm["cubin"], shared)
    return _amd_resources(compiled.asm["amdgcn"], shared)


def problems(resources: Resources, target: Target) -> list[str]:
    """Return what keeps a compiled kernel from running well, or at all, on its target."""
    found = []
    if resources.spilled_bytes:
        found.append(f"spills {resources.spilled_bytes} bytes of registers a thread")
    if resources.shared > target.max_shared:
        found.append(f"takes {resources.shared} bytes of shared memory of {target.max_shared}")
    return found


def table_rows(document: str) -> dict[tuple[str, str], str]:
    """Return the lines of the table in a document, by the names of their configuration and target."""
    table = document.partition(BEGIN)[2].partition(END)[0]
    rows = {}
    for line in table.strip().splitlines()[2:]:
        name, target, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name, target] = line
    return rows


def _cuda_resources(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return Resources(
        registers=_number(r"\bREG:(\d+)", usage),
        spilled_bytes=_number(r"\bSTACK:(\d+)", usage),
        scalar_spills=0,
        shared=shared,
    )


def _amd_resources(assembly: str, shared: int) -> Resources:
    # Scratch memory may be of arrays, and not show every spill: both are asked for.
    spilled_registers = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    scratch = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return Resources(
        registers=_number(r"\.vgpr_count:\s*(\d+)", assembly),
        spilled_bytes=max(scratch, 4 * spilled_registers),
        scalar_spills=_number(r"\.sgpr_spill_count:\s*(\d+)", assembly),
        shared=shared,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's report has nothing like {pattern}: {text[-500:]}")
    return int(found[1])


def _table(compiled: Sequence[tuple[CompileCase, Target, Resources]]) -> Iterator[str]:
    yield "| configuration | target | warps | stages | registers | spilled bytes | scalar spills | shared bytes |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, target, resources in compiled:
        cells = (
            case.name,
            target.name,
            case.num_warps,
            case.num_stages,
            resources.registers,
            resources.spilled_bytes,
            resources.scalar_spills,
            resources.shared,
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/KERNELS.md")
    arguments = parser.parse_args()
    compiled = []
    has_problem = False
    for case, target in compilations():
        resources = compile_case(case, target)
        for problem in problems(resources, target):
            print(f"{case.name} on {target.name} {problem}", file=sys.stderr)
            has_problem = True
        compiled.append((case, target, resources))
    table = "\n".join(_table(compiled))
    print(table)
    if arguments.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 1 if has_problem else 0


if __name__ == "__main__":
    sys.exit(main())
