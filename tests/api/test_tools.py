"""Tools are checked before anything is computed."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from radixserve.api.answer_reader import AnswerReader
from radixserve.api.requests import ChatRequest
from radixserve.api.tools import ToolUse, check_tool_format, read_tool_use
from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.errors import InvalidRequest
from radixserve.sampling_params import MAX_STOP_STRINGS, SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, write_byte_tokenizer

F = {"type": "function", "function": {"name": "f"}}
G = {"type": "function", "function": {"name": "g"}}
CHOOSE_F = {"type": "function", "function": {"name": "f"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def use_of(**fields: Any) -> ToolUse | None:
    return read_tool_use(msgspec.convert({"messages": [], **fields}, ChatRequest))


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        use_of(**fields)
    return caught.value


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 65, "f\n", "<tool_call>"])
def test_a_name_that_no_function_may_have_is_refused(name: str) -> None:
    error = refusal(tools=[F, {"type": "function", "function": {"name": name}}])
    assert error.param == "tools"
    assert "tools[1].function.name" in error.message


@pytest.mark.parametrize(
    "wrong", [{"type": "custom", "custom": {"name": "f"}}, {"type": "function"}, {**F, "type": "f"}]
)
def test_other_types_of_tools_are_refused(wrong: dict[str, Any]) -> None:
    error = refusal(tools=[wrong])
    assert (error.param, "tools[0]" in error.message) == ("tools", True)


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["object"]}, {"properties": []}])
def test_parameters_must_be_the_schema_of_an_object(parameters: dict[str, Any]) -> None:
    error = refusal(tools=[tool(parameters=parameters)])
    assert (error.param, "parameters" in error.message) == ("tools", True)


def test_two_tools_of_one_name_are_refused() -> None:
    assert "'f'" in refusal(tools=[F, G, F]).message


@pytest.mark.parametrize("choice", ["required", CHOOSE_F, "sometimes", {"type": "function"}, {"type": "allowed_tools"}])
def test_tc_4_a_choice_without_tools_is_refused(choice: Any) -> None:
    assert refusal(tool_choice=choice).param == "tool_choice"
    assert refusal(tool_choice=choice, tools=[]).param == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "h"}}, {"type": "f"}, "f", ""])
def test_tc_4_a_choice_that_is_no_tool_is_refused(choice: Any) -> None:
    assert refusal(tool_choice=choice, tools=[F, G]).param == "tool_choice"


def test_no_tools_and_tools_that_may_not_be_called_are_the_same() -> None:
    assert use_of() is use_of(tools=[]) is use_of(tools=[], tool_choice="auto") is None
    assert use_of(tools=[F], tool_choice="none") is None
    assert refusal(tools=[F, F], tool_choice="none").param == "tools"


def params_of(tokenizer: Tokenizer, params: SamplingParams | None = None, **fields: Any) -> SamplingParams:
    tool_use = use_of(**fields)
    assert tool_use is not None
    return tool_use.apply_to(params or SamplingParams(), tokenizer, grammars_of(tokenizer))


@cache
def grammars_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.eos_token_ids)


def test_an_answer_that_need_not_call_is_not_constrained(tokenizer: Tokenizer) -> None:
    strict = tool(parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        assert params_of(tokenizer, tools=[strict], **fields) == SamplingParams()


def test_an_answer_of_one_call_at_most_stops_at_its_end(tokenizer: Tokenizer) -> None:
    one = params_of(tokenizer, SamplingParams(stop=("x",)), tools=[F], parallel_tool_calls=False)
    assert (one.stop, one.include_stop_str_in_output) == (("x", "</tool_call>"), False)
    one = params_of(tokenizer, tools=[F], parallel_tool_calls=False)
    assert (one.stop, one.include_stop_str_in_output) == (("</tool_call>",), True)
    assert params_of(tokenizer, tools=[F], parallel_tool_calls=False, tool_choice="required").stop == ()


@pytest.mark.parametrize("settings", [{"stop_token_ids": (END,)}, {"skip_special_tokens": False}, {"stop": ("x",)}])
def test_a_limit_to_one_call_does_not_show_what_else_stops_an_answer(
    tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    params = params_of(tokenizer, SamplingParams(**settings), tools=[F], parallel_tool_calls=False)
    assert not params.include_stop_str_in_output


def test_an_answer_of_one_call_may_have_as_many_stop_strings_as_any(tokenizer: Tokenizer) -> None:
    stops = tuple(map(str, range(MAX_STOP_STRINGS)))
    assert params_of(tokenizer, SamplingParams(stop=stops), tools=[F], parallel_tool_calls=False).stop == stops


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": {}, "uniqueItems": True}),
        ("not", {"not": {"type": "string"}}),
        ("format", {"type": "string", "format": "colour"}),
    ],
)
@pytest.mark.parametrize("choice", ["required", CHOOSE_F])
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(
    tokenizer: Tokenizer, keyword: str, schema: dict[str, Any], choice: Any
) -> None:
    tools = [tool(parameters={"type": "object", "properties": {"a": schema}})]
    with pytest.raises(InvalidRequest, match=keyword) as caught:
        params_of(tokenizer, tools=tools, tool_choice=choice)
    assert caught.value.param == "tools"
    assert "f" in caught.value.message


def test_the_tool_that_is_not_named_need_not_be_enforced(tokenizer: Tokenizer) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "propertyNames": {}}}}
    assert params_of(tokenizer, tools=[F, other], tool_choice=CHOOSE_F).grammar is not None


def test_auto_needs_a_template_that_asks_for_a_known_format(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"--chat-template.*--tool-call-parser hermes") as caught:
        check_tool_format("auto", tokenizer)
    assert caught.value.param == "tools"
    check_tool_format("hermes", tokenizer)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/word"}},
    "required": ["a"],
    "$defs": {"word": {"type": "string", "maxLength": 3}},
}


def accepts(tokenizer: Tokenizer, params: SamplingParams, text: str) -> bool:
    """Whether the grammar lets the model write this text and end there."""
    assert params.grammar is not None
    constraint = grammars_of(tokenizer).compile(params.grammar)
    for token_id in [*text.encode(), END]:
        allowed = constraint.allowed_tokens()
        if not allowed[token_id // 8] >> token_id % 8 & 1:
            return False
        if token_id != END:
            constraint.accept(token_id)
    return True


def load_tagged_tokenizer(directory: Path) -> Tokenizer:
    """The byte tokenizer, with a special token for each tag of a call."""
    file = write_byte_tokenizer(directory) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(file))
    return Tokenizer.load(directory)


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ('{"a": 1}', True),
        ('{"a": -20, "b": "xyz"}', True),
        ("{}", False),
        ('{"a": "1"}', False),
        ('{"a": 1, "b": "wxyz"}', False),
        ('{"a": 1, "c": 2}', False),
        ('{"a":1}', False),
        ('{"a": 1,"b": "x"}', False),
        ('{ "a": 1}', False),
    ],
)
def test_a_call_that_must_be_made_has_the_arguments_of_its_schema_in_the_models_own_spacing(
    tokenizer: Tokenizer, arguments: str, is_right: bool
) -> None:
    params = params_of(tokenizer, tools=[tool(parameters=SCHEMA), G], tool_choice="required")
    assert accepts(tokenizer, params, call(arguments)) is is_right


def test_a_required_call_is_of_any_tool_and_may_be_followed_by_others(tokenizer: Tokenizer) -> None:
    params = params_of(tokenizer, tools=[F, G], tool_choice="required", parallel_tool_calls=True)
    assert accepts(tokenizer, params, call("{}", "g"))
    assert accepts(tokenizer, params, call("{}") + "\n" + call("{}", "g"))
    assert not accepts(tokenizer, params, call("{}", "h"))
    assert not accepts(tokenizer, params, "")
    assert not accepts(tokenizer, params, "I think so. " + call("{}"))
    assert not accepts(tokenizer, params, "\n".join([call("{}")] * 9))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": CHOOSE_F, "parallel_tool_calls": True},
    ],
)
def test_tc_3_an_answer_of_one_call_has_no_second(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    params = params_of(tokenizer, tools=[F], **fields)
    assert accepts(tokenizer, params, call("{}"))
    assert not accepts(tokenizer, params, call("{}") + "\n" + call("{}"))


def test_a_named_tool_is_the_only_one(tokenizer: Tokenizer) -> None:
    params = params_of(tokenizer, tools=[F, G], tool_choice=CHOOSE_F)
    assert accepts(tokenizer, params, call("{}"))
    assert not accepts(tokenizer, params, call("{}", "g"))


def test_a_free_object_and_one_with_other_properties_stay_so(tokenizer: Tokenizer) -> None:
    free = params_of(tokenizer, tools=[tool(parameters={"type": "object"})], tool_choice="required")
    assert accepts(tokenizer, free, call('{"x": [1, {}]}'))
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    open_object = params_of(tokenizer, tools=[tool(parameters=schema)], tool_choice="required")
    assert accepts(tokenizer, open_object, call('{"a": 1, "x": null}'))
    assert not accepts(tokenizer, open_object, call('{"a": 1, "x": 2}'))


def test_tags_that_are_special_tokens_are_so_in_the_grammar_and_in_the_answers_text(tmp_path: Path) -> None:
    tokenizer = load_tagged_tokenizer(tmp_path)
    begin, end = (tokenizer.encode(tag)[0] for tag in ("<tool_call>", "</tool_call>"))
    auto = params_of(tokenizer, tools=[F])
    assert (auto.skip_special_tokens, auto.grammar) == (False, None)
    named = params_of(tokenizer, tools=[F], tool_choice=CHOOSE_F)
    assert named.grammar is not None
    constraint = grammars_of(tokenizer).compile(named.grammar)
    body = b'\n{"name": "f", "arguments": {}}\n'
    for token_id in [begin, *body, end]:
        assert constraint.allowed_tokens()[token_id // 8] >> token_id % 8 & 1
        constraint.accept(token_id)
    assert constraint.is_complete


@pytest.mark.parametrize("skips", [None, True, False])
def test_other_special_tokens_stay_hidden_unless_they_are_asked_for(tmp_path: Path, skips: bool | None) -> None:
    reader = AnswerReader(use_of(tools=[F], skip_special_tokens=skips), load_tagged_tokenizer(tmp_path))
    parsed = reader.read("a<|pad|>b" + call("{}"), "stop")
    assert parsed.content == ("a<|pad|>b" if skips is False else "ab")
    assert [delta.arguments for delta in parsed.calls] == ["{}"]
