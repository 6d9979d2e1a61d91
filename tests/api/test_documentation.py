"""docs/API.md says of each field what the server does with it."""

import json
from pathlib import Path

from radixserve.api.app import ROUTES
from radixserve.api.fields import NO_OP_FIELDS, UNSUPPORTED_FIELDS

TEXT = (Path(__file__).parents[2] / "docs" / "API.md").read_text(encoding="utf-8")


def test_the_table_of_refused_fields_is_complete() -> None:
    rows = [
        f"| `{name}` | {field.meaning} | {', '.join(f'`{json.dumps(value)}`' for value in field.neutral)} |"
        for name, field in UNSUPPORTED_FIELDS.items()
    ]
    assert "\n".join(rows) in TEXT


def test_the_table_of_fields_that_change_nothing_is_complete() -> None:
    assert "\n".join(f"| `{name}` | {reason} |" for name, reason in NO_OP_FIELDS.items()) in TEXT


def test_every_route_is_named() -> None:
    for route in ROUTES:
        assert route.path.replace("{model_id:path}", "{id}") in TEXT
