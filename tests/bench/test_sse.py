import pytest

from radixserve.bench.sse import EventDecoder


def test_events_come_out_the_same_however_the_bytes_are_cut() -> None:
    stream = b'data: {"a": 1}\r\n\r\n: comment\n\nevent: x\ndata: b\n\ndata:c\ndata:  d\n\ndata: [DONE]\n\n'
    whole = EventDecoder().feed(stream)
    assert whole == [b'{"a": 1}', b"b", b"c\n d", b"[DONE]"]
    for size in (1, 2, 3, 7):
        decoder = EventDecoder()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [event for piece in cut for event in decoder.feed(piece)] == whole


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_last_event_without_its_blank_line_is_not_lost(ending: bytes) -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n\ndata: b" + ending) == [b"a"]
    assert decoder.close() == [b"b"]
    assert decoder.close() == []
