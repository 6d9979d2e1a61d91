"""Keys name tenants, and nothing but a right key opens the door."""

import pytest

from radixserve.api.auth import ApiKeys
from radixserve.errors import InvalidApiKey

KEYS = ApiKeys(["plain", "acme=first", "acme=second", "other=third", "ключ", "voilà"])


@pytest.mark.parametrize(
    ("key", "tenant"), [("plain", None), ("first", "acme"), ("second", "acme"), ("third", "other")]
)
def test_a_key_names_its_tenant(key: str, tenant: str | None) -> None:
    assert KEYS.find_tenant(f"Bearer {key}") == tenant


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_api_14_the_scheme_is_case_insensitive(scheme: str) -> None:
    assert KEYS.find_tenant(f"{scheme} plain") is None


@pytest.mark.parametrize("key", ["ключ", "voilà"])
def test_a_key_may_hold_any_characters(key: str) -> None:
    assert KEYS.find_tenant("Bearer " + key.encode().decode("latin-1")) is None


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic plain", "plain", "Bearer acme=first", "Bearer plainx"],
)
def test_api_14_anything_else_is_refused(header: str | None) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        KEYS.find_tenant(header)
    assert caught.value.status == 401
    assert "plain" not in caught.value.message


def test_without_keys_everyone_is_one_tenant() -> None:
    assert ApiKeys([]).find_tenant(None) is None
    assert ApiKeys([]).find_tenant("Bearer whatever") is None
