"""The layers of docs/ARCHITECTURE.md, checked on every module's own import statements."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VALUES = {
    "errors",
    "config",
    "grammar",
    "sampling_params",
    "beam_search_params",
    "protocol",
    "model_path",
    "gguf_header",
    "version",
}
DEVICE = {"attention", "sampling", "model"}
# For each room, the rooms of radixserve that it may import from.
ALLOWED: dict[str, set[str]] = {
    "core": VALUES,
    "tiers": VALUES | {"core.block_store"},
    "kernels": set(),
    "attention": VALUES | {"kernels"},
    "sampling": VALUES | {"kernels", "core.batch"},
    "model": VALUES | {"kernels", "attention"},
    "runner": VALUES | DEVICE | {"kernels", "core.batch"},
    "tokenizer": VALUES,
    "events": VALUES | {"core"},
    "engine": VALUES | DEVICE | {"core", "events", "tiers", "runner", "tokenizer"},
    "diagnosis": VALUES | {"tokenizer"},
    "api": VALUES | {"core.namespace", "tokenizer", "engine", "diagnosis"},
    "llm": VALUES | {"tokenizer", "engine"},
    "bench": VALUES,
    "replay": VALUES | {"core", "tokenizer"},
    "__main__": {"cli"},
    "cli": VALUES | DEVICE | {"core", "runner", "tokenizer", "engine", "diagnosis", "api", "llm", "bench", "replay"},
}
WITHOUT_TORCH = VALUES | {"core", "events", "tiers", "tokenizer", "diagnosis", "api", "bench", "replay"}


def python_files(folder: Path) -> list[Path]:
    """All modules below a folder, those behind its symlinks too (which rglob does not enter)."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if entry.suffix == ".py"]
    return files + [file for entry in entries if entry.is_dir() for file in python_files(entry)]


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


MODULES = {
    ".".join(path.relative_to(ROOT / "radixserve").with_suffix("").parts): imported_names(path)
    for path in python_files(ROOT / "radixserve")
}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_a_module_imports_only_from_the_layers_below(module: str) -> None:
    room = module.split(".", maxsplit=1)[0]
    for name in MODULES[module]:
        if not is_below(name, "radixserve") or is_below(name, f"radixserve.{room}"):
            continue
        rooms = ALLOWED.get(room, VALUES)
        assert any(is_below(name, f"radixserve.{below}") for below in rooms), f"{module} imports {name}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.split(".")[0] in WITHOUT_TORCH])
def test_torch_stays_out_of_the_api_process_and_the_core(module: str) -> None:
    assert not any(is_below(name, library) for name in MODULES[module] for library in ("torch", "transformers"))


@pytest.mark.parametrize("folder", ["kernels", "api"])
def test_linked_folders_are_importable_under_radixserve_only(folder: str) -> None:
    assert (ROOT / "radixserve" / folder).is_symlink()
    # An __init__.py would make the bare name importable from a checkout, and `kernels` is another package's.
    assert not (ROOT / folder / "__init__.py").exists()
