from pathlib import Path

import pytest

from tests.diagnosis.talks import TEMPLATES, Model, load


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """A model for each of TEMPLATES."""
    directory: Path = tmp_path_factory.mktemp("templates")
    return {template: Model(load(template, directory)) for template in TEMPLATES}
