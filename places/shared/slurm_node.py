"""Runs one node's ranks of a job under Slurm, after this node has met the job's other nodes, if there are any.

Each node has an agent (harness/run/ranks.py) and a record. The first node's record becomes the job's record. The
records of the other nodes stay in a folder that the submitting call has made, until that call has read them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness.base.json_object import JsonObject
from harness.core.record import Record
from harness.devices import machine
from harness.run.place import perform


def perform_on_node(order: JsonObject) -> JsonObject:
    """Run perform() on this node; return the stem of the node's record. At Slurm's SIGTERM the worker may still finish
    its record.

    If the job has several nodes and failed on this node, raises RuntimeError, so that srun ends the job on all nodes.
    """
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
    """Return the stem of the record of node `index`, which is not the first node. `folder`: the folder that the
    submitting call has made."""
    return folder / f"{stem.name}-node{index}"


def _meet(order: JsonObject) -> Path:
    """Set torchrun's environment variables, by which the agents of all nodes meet. Return the stem of this node's
    record."""
    from submitit.helpers import TorchDistributedEnvironment

    nodes = TorchDistributedEnvironment()  # a node has one task, so the task's rank is the node's number
    # srun runs on the first node. This variable holds the address at which the other nodes reach the first node.
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or nodes.master_addr
    os.environ |= {
        "PET_NNODES": str(nodes.world_size),
        "PET_NODE_RANK": str(nodes.rank),
        "PET_RDZV_ID": os.environ["SLURM_JOB_ID"],
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(nodes.master_port),
    }
    return (
        node_stem(Path(order["folder"]), Path(order["stem"]), nodes.rank)
        if nodes.rank
        else Path(order["stem"])
    )
