"""What a server of the demo model takes, while it loads too."""

import sys

import pytest

from benchmarks.startup import measure
from radixserve.model.linear import has_float16_linear


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not has_float16_linear(), reason="torch has no float16 projections on this CPU")
def test_both_processes_take_at_most_1300_megabytes_with_room_for_16384_tokens() -> None:
    taken = measure(["--num-kv-blocks", "1024"])
    assert taken["peak_mib"] * 2**20 < 1.3e9
    assert taken["ready_mib"] * 2**20 > 0.6e9  # or the engine was not counted
