"""The tools of a request, checked: what the prompt says of them, and how the model may call them."""

from dataclasses import dataclass

import msgspec

from radixserve.api.requests import GenerationRequest, NamedToolChoice
from radixserve.api.tool_grammar import check_tool_grammar, tool_grammar
from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.errors import InvalidRequest
from radixserve.sampling_params import MAX_STOP_STRINGS, SamplingParams
from radixserve.tokenizer.hermes import CALL_BEGIN, CALL_END
from radixserve.tokenizer.tokenizer import Tokenizer
from radixserve.tokenizer.tools import Tool, ToolFunction, check_functions


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call, at least one.

    is_required: the answer has to call one. only: the one that it has to call, by name. max_calls: None for any number.
    skips_special_tokens: whether special tokens are left out of the answer.
    """

    functions: list[ToolFunction]
    is_required: bool
    only: str | None
    max_calls: int | None
    skips_special_tokens: bool = True

    @property
    def stops_after_call(self) -> bool:
        """Whether the text that ends a call ends the answer; a grammar does so itself."""
        return self.max_calls is not None and not self.is_required

    def apply_to(self, params: SamplingParams, tokenizer: Tokenizer, grammars: GrammarCompiler) -> SamplingParams:
        """Return the settings of an answer that may, or has to, call tools. Raises InvalidRequest."""
        if self.is_required:
            offered = [function for function in self.functions if self.only in (None, function.name)]
            grammar = tool_grammar(offered, max_calls=self.max_calls, special_texts=tokenizer.special_texts)
            check_tool_grammar(grammar, offered, grammars)
            params = msgspec.structs.replace(params, grammar=grammar)
        # Beside as many stop strings as there may be the answer goes on, and what follows the call is dropped.
        if self.stops_after_call and CALL_END not in params.stop and len(params.stop) < MAX_STOP_STRINGS:
            # The end of the call belongs to it; where something else may stop the answer and be shown, it is left out.
            may_show_others = bool(params.stop or params.stop_token_ids) or not params.skip_special_tokens
            includes_stop = params.include_stop_str_in_output or not may_show_others
            params = msgspec.structs.replace(
                params, stop=(*params.stop, CALL_END), include_stop_str_in_output=includes_stop
            )
        if CALL_BEGIN in tokenizer.special_texts:
            # Whoever reads the answer has to see the tags, and leaves out the other special tokens.
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return params


def read_tool_use(request: GenerationRequest) -> ToolUse | None:
    """Return the tools that the model may call; None if there are none, or tool_choice is "none".

    Raises InvalidRequest with the field as param.
    """
    functions = check_tools(request.tools, request.tool_choice)
    if not functions:
        return None
    for name in ("response_format", "structured_outputs"):
        if getattr(request, name) not in (None, {"type": "text"}):
            raise InvalidRequest(f"{name} is not supported together with tools; leave one of them out", param=name)
    only = _named_tool(request.tool_choice)
    is_required = only is not None or request.tool_choice == "required"
    # Where nothing but calls is allowed, a weak model repeats one until it is cut off, so several have to be asked for.
    is_parallel = not is_required if request.parallel_tool_calls is None else request.parallel_tool_calls
    return ToolUse(
        functions,
        is_required=is_required,
        only=only,
        max_calls=None if is_parallel and only is None else 1,
        skips_special_tokens=request.skip_special_tokens is not False,
    )


def check_tools(tools: list[Tool] | None, choice: str | NamedToolChoice | None) -> list[ToolFunction]:
    """Return the functions that a prompt tells of: all that are given, or none if tool_choice is "none".

    Raises InvalidRequest with the field as param.
    """
    functions = check_functions(tools or [])
    names = [function.name for function in functions]
    only = _named_tool(choice)
    if only is None and choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required or a named function", param="tool_choice")
    if not functions and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a tool, but there are no tools", param="tool_choice")
    if only is not None and only not in names:
        raise InvalidRequest(f"tool_choice names {only!r:.100}; the tools are {', '.join(names)}", param="tool_choice")
    return [] if choice == "none" else functions


def check_tool_format(tool_call_parser: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest if the format of the model's calls is not known. tool_call_parser: the server's setting."""
    if tool_call_parser == "auto" and tokenizer.has_chat_template and not tokenizer.asks_for_hermes_calls:
        raise InvalidRequest(
            "tools: the model's chat template does not ask for calls in a format that is supported; start the server "
            "with --chat-template FILE, a template that writes tools and <tool_call> tags, or with "
            "--tool-call-parser hermes",
            param="tools",
        )


def _named_tool(choice: str | NamedToolChoice | None) -> str | None:
    if not isinstance(choice, NamedToolChoice):
        return None
    if choice.type != "function" or choice.function is None:
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return choice.function.name
