"""A node's part of a job under Slurm: where it meets the other nodes, if there are any, and what it hands back.

Of several nodes each has an agent (harness/run/ranks.py) and a record: the first one's is the job's, those of the
others lie in the folder of the call until the submitter has read them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from harness.core.record import Record
from harness.devices import machine
from harness.places.place import perform

MEETING_SECONDS = 600.0  # for the first node to say where it is
POLL_SECONDS = 0.5


def perform_on_node(order: dict[str, Any]) -> dict[str, Any]:
    """On each node: as perform(); Slurm's SIGTERM lets the worker finish its record. Raises RuntimeError where one of
    several nodes failed: srun ends the others."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine.facts.cache_clear()
    if order["num_nodes"] > 1:
        order = {**order, "stem": str(_meet(order))}
    perform(order)
    status = Record.read(Path(f"{order['stem']}.json")).status
    if order["num_nodes"] > 1 and status != "ok":
        raise RuntimeError(f"this node's ranks ended as {status}")
    return {"stem": order["stem"]}


def node_stem(folder: Path, stem: Path, index: int) -> Path:
    """Of the record of a job's node beyond the first, whose record is the job's."""
    return folder / f"{stem.name}-node{index}"


def _meet(order: dict[str, Any]) -> Path:
    """Tell this node's agent, by torchrun's own variables, where it meets the others: the first node writes an address
    into the call's folder. Returns the stem of this node's record."""
    number, index = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_NODEID"])
    folder, stem = Path(order["folder"]), Path(order["stem"])
    place = folder / f"{number}.address"
    if index == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        # srun runs on the first node, and says by which address the others reach it.
        address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
        place.with_suffix(".unfinished").write_text(f"{address} {port}")
        place.with_suffix(".unfinished").rename(place)
    deadline = time.time() + MEETING_SECONDS
    while not place.exists():
        if time.time() > deadline:
            raise RuntimeError(f"the first node of job {number} did not say where it is")
        time.sleep(POLL_SECONDS)
    address, port_text = place.read_text().split()
    os.environ |= {
        "PET_NNODES": str(order["num_nodes"]), "PET_NODE_RANK": str(index), "PET_RDZV_ID": number,
        "PET_MASTER_ADDR": address, "PET_MASTER_PORT": port_text,
    }  # fmt: skip
    return node_stem(folder, stem, index) if index else stem
