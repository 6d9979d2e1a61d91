import pytest

from agents_demo.local_tools import call_tool


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculate", {"expression": "384400 / 42.195"}, "9110.084133"),
        ("calculate", {"expression": "-(2 + 3) * 4 ** 2 % 7"}, "4"),
        ("look_up", {"topic": "Mount Everest"}, "Mount Everest is 8849 metres high."),
        ("convert", {"value": 8849, "source": "metre", "target": "foot"}, "29032.2 foot"),
    ],
)
def test_a_tool_answers(name: str, arguments: dict[str, object], result: str) -> None:
    assert call_tool(name, arguments) == result


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate", {"expression": "1 / 0"}),
        ("calculate", {"expression": "2 +"}),
        ("calculate", {"expression": "9 ** 9 ** 9"}),
        ("calculate", {"expression": "(-2) ** 0.5"}),
        ("calculate", {"expression": "__import__('os')"}),
        ("calculate", {"expression": "(" * 150}),
        ("calculate", {"expression": "1" * 1000}),
        ("calculate", {"topic": "moon"}),
        ("convert", {"value": 1, "source": "metre", "target": "pound"}),
        ("convert", {"value": 1, "source": "parsec", "target": "mile"}),
        ("erase", {}),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(name: str, arguments: dict[str, object]) -> None:
    assert call_tool(name, arguments).startswith("error: ")
