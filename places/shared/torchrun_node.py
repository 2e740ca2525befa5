"""Runs one node's ranks of a job that torchrun starts. On each node, torchrun starts one process with this module:

    torchrun ... --nproc-per-node 1 -m places.shared.torchrun_node ORDER

ORDER is a JSON file: the order that harness/run/place.py makes of the job. All paths in the order are relative to the
working folder. Each node has an agent (harness/run/ranks.py); the agents find one another by torchrun's environment
variables. Standard output carries one JSON object a line: the run's events; an event `text` for each piece of text that
a program writes to a log of the run; and at the end an event `record` with this node's record.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from harness.base.json_object import JsonObject
from harness.run.place import perform

RELAY_SECONDS = 0.5
# environment variable with the port of rank 0's agent; torchrun's own store listens at MASTER_PORT
PORT = "HARNESS_RANKS_PORT"
# Environment variables that describe torchrun's own processes. A job of one process must not see these variables.
OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PREFIXES_OF_TORCHRUN = ("ROLE_", "TORCHELASTIC_")


class EventPrinter:
    """Writes events to standard output as lines of JSON. Two threads may use one EventPrinter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, event: JsonObject) -> None:
        with self.lock:
            print(json.dumps(event), flush=True)


def relay(folder: Path, print_event: EventPrinter, is_over: threading.Event) -> None:
    """Until `is_over` is set, pass text that programs append to the logs in a folder to `tell`, in whole lines."""
    positions: dict[str, int] = {}
    is_last = False
    while not is_last:
        is_last = is_over.wait(RELAY_SECONDS)
        for path in sorted(folder.glob("*.txt")):
            with open(path, "rb") as log:
                log.seek(positions.get(path.name, 0))
                data = log.read()
            data = data if is_last else data[: data.rfind(b"\n") + 1]
            positions[path.name] = positions.get(path.name, 0) + len(data)
            if data:
                print_event({"event": "text", "name": path.name, "text": data.decode(errors="replace")})


def meet(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the variables by which this project's agents find the nodes, and without the
    variables that describe torchrun's own processes. Raises ValueError if torchrun started several processes on a
    node."""
    if environment["LOCAL_WORLD_SIZE"] != "1":
        raise ValueError(
            f"expected one process per node, got {environment['LOCAL_WORLD_SIZE']}; try"
            " --nproc-per-node 1, and --ranks for the number of ranks"
        )
    nodes = {
        "PET_NNODES": environment["WORLD_SIZE"],
        "PET_NODE_RANK": environment["RANK"],
        "PET_MASTER_ADDR": environment["MASTER_ADDR"],
        "PET_RDZV_ID": environment["TORCHELASTIC_RUN_ID"],
        "PET_MASTER_PORT": environment.get(PORT, str(int(environment["MASTER_PORT"]) + 1)),
    }
    remaining = {
        name: value for name, value in environment.items() if not name.startswith(PREFIXES_OF_TORCHRUN)
    }
    return {name: value for name, value in remaining.items() if name not in OF_TORCHRUN} | nodes


def main() -> None:
    """Run an order on this node. At SIGTERM the run may still finish its record. Exit code 1 makes torchrun end the job
    on the other nodes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order = json.loads(Path(sys.argv[1]).read_text())
    nodes = meet(dict(os.environ))
    os.environ.clear()
    os.environ.update(nodes)
    stem = Path(order["stem"]).absolute()
    stem.parent.mkdir(exist_ok=True)
    folders = [str(Path(folder).absolute()) for folder in order["folders"]]
    print_event, is_over = EventPrinter(), threading.Event()
    relay_thread = threading.Thread(target=relay, args=(stem.parent, print_event, is_over))
    relay_thread.start()
    code = 0
    try:
        perform({**order, "stem": str(stem), "folders": folders}, print_event)
    except KeyboardInterrupt:
        code = 130
    finally:
        is_over.set()
        relay_thread.join()
    record = json.loads(Path(f"{stem}.json").read_text())
    print_event({"event": "record", "record": record})
    sys.exit(code or int(record["status"] != "ok"))


if __name__ == "__main__":
    main()
