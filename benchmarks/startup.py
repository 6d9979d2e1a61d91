"""How soon is a server ready, and how much memory do its two processes take, while loading too?

    python benchmarks/startup.py --repeat 5 -- --num-kv-blocks 1024

What follows -- goes to `radixserve serve`. Prints one JSON line: seconds from the start of the command to the first 200
of /ready, and MiB of the API process and the engine together (the sum of PSS, which counts a page that several
processes share once), at its highest and once ready. Linux only.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from radixserve.bench.measured_server import descendants

INTERVAL_S = 0.02


def proportional_mib(pid: int) -> float:
    """Return the sum of PSS of a process and all below it."""
    total = 0
    for process in descendants(pid):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def measure(arguments: list[str]) -> dict[str, float]:
    """Start a server, watch it until it is ready, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixserve", "serve", "--port", str(port), *arguments]
    began = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        peak = 0.0
        while not is_ready(port):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}")
            peak = max(peak, proportional_mib(server.pid))
            time.sleep(INTERVAL_S)
        seconds = time.perf_counter() - began
        ready = proportional_mib(server.pid)
        return {"ready_s": seconds, "peak_mib": max(peak, ready), "ready_mib": ready}
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("serve", nargs="*", metavar="-- FLAGS", help="flags and model of radixserve serve")
    arguments = parser.parse_args()
    measure(arguments.serve)  # brings the files into the page cache
    runs = [measure(arguments.serve) for _ in range(arguments.repeat)]
    document: dict[str, Any] = {"serve": arguments.serve, "runs": len(runs), "load_average": os.getloadavg()}
    for name in runs[0]:
        values = [run[name] for run in runs]
        document[name] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    print(msgspec.json.encode(document).decode())


if __name__ == "__main__":
    main()
