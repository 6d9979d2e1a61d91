"""Keys of the cache's roots: no field can pass for another."""

from hypothesis import given
from hypothesis import strategies as st

from radixserve.core.namespace import encode_namespace, is_public, public_namespace_of, tenant_of

# Letters that fields begin with, and what a length may look like.
texts = st.none() | st.text(st.sampled_from("tbas\0\1é"), max_size=8)
fields = st.fixed_dictionaries(dict.fromkeys(("tenant", "build", "adapter", "salt"), texts))


@given(left=fields, right=fields)
def test_pc_7_namespaces_are_equal_only_if_every_field_is(
    left: dict[str, str | None], right: dict[str, str | None]
) -> None:
    assert (encode_namespace(**left) == encode_namespace(**right)) == (left == right)


def test_pc_7_a_salt_is_no_adapter_and_no_tenant_of_that_name() -> None:
    namespaces = {encode_namespace(**{kind: "S"}) for kind in ("tenant", "build", "adapter", "salt")}
    assert len(namespaces | {encode_namespace()}) == 5


@given(fields)
def test_a_namespace_tells_its_tenant(given_fields: dict[str, str | None]) -> None:
    assert tenant_of(encode_namespace(**given_fields)) == given_fields["tenant"]


@given(texts)
def test_a_salt_names_no_tenant(salt: str | None) -> None:
    assert tenant_of(encode_namespace(salt=salt)) is None


@given(left=fields, right=fields)
def test_pc_7_public_prefixes_are_found_in_common_by_all_that_differ_in_their_tenant_alone(
    left: dict[str, str | None], right: dict[str, str | None]
) -> None:
    found = [public_namespace_of(encode_namespace(**values)) for values in (left, right)]
    for values, public in zip((left, right), found, strict=True):
        assert (public is None) == (values["salt"] is not None)
        assert public is None or (is_public(public) and not is_public(encode_namespace(**values)))
    if None not in found:
        assert (found[0] == found[1]) == (left | {"tenant": None} == right | {"tenant": None})
