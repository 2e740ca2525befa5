"""Runs jobs over several nodes. On each node, torchrun runs this same call as one process.

    torchrun --nnodes N --node-rank K --master-addr ADDRESS --master-port PORT --nproc-per-node 1 \\
        -m harness -m METHOD --ranks R --on torchrun

The first node plans, judges and keeps the results. The other nodes connect to the first node. If a job has several
ranks, each node runs some of the ranks. Nodes send one another lines of JSON. If a job fails on one node, or a node is
gone, the job ends on all nodes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness.base.child_process import interrupt_here
from harness.base.json_object import JsonObject
from harness.core import failures, method
from harness.core.job import Job
from harness.core.method import Unavailable
from harness.core.record import Record, new_stem
from harness.run.place import ORDERED, KeyedJobs, OrderedJob, Place, PlaceCall, Report, perform, place_record
from harness.run.ranks import merge_nodes
from places.shared.cluster import killed, num_nodes, unavailable
from places.shared.torchrun_node import meet

WAIT_SECONDS = 600.0  # seconds within which all nodes must connect
HELLO_SECONDS = 10.0  # seconds within which a process that connects must send its node's number
RETRY_SECONDS = 0.2
NO_TORCHRUN = (
    "no torchrun runs this call: try torchrun --nproc-per-node 1 ... -m harness, or leave --on torchrun out"
)


class Torchrun(Place):
    """The place --on torchrun: the nodes on which torchrun started this call."""

    @classmethod
    def of(cls, options: object, call: PlaceCall) -> Torchrun:
        """On the first node, return the place. On any other node, follow the first node's orders until the first node's
        process ends, then exit.

        Raises Unavailable if torchrun did not start this call, or if a node does not connect.
        """
        if not {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():
            raise Unavailable(NO_TORCHRUN)
        nodes = meet(dict(os.environ))
        os.environ.clear()
        os.environ.update(nodes)
        count, node = int(nodes["PET_NNODES"]), int(nodes["PET_NODE_RANK"])
        store = nodes["PET_MASTER_ADDR"], int(nodes["PET_MASTER_PORT"]) + 1
        if node:
            follow_first_node(connected(*store), node, call.folders)
            sys.exit(0)
        return cls(accepted(*store, count - 1))

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers

    def context(self) -> dict[str, str]:
        return {"torchrun_nodes": str(1 + len(self.peers))}

    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        results = results.resolve()
        ordered = (OrderedJob(job, key, new_stem(results, job)) for job, key in jobs)
        return [self._launch(job, folders, report) for job in ordered]

    def _launch(self, ordered: OrderedJob, folders: tuple[Path, ...], report: Report) -> Path:
        """Run the job; return the path of its record.

        At a KeyboardInterrupt the job ends on all nodes, which finish their records. Then KeyboardInterrupt is raised
        again.
        """
        job = ordered.job
        peers = self.peers[: num_nodes(job.world_size, 1 + len(self.peers), "--nnodes") - 1]
        order = ordered.order(folders)
        os.environ["PET_NNODES"] = str(1 + len(peers))
        if refusal := self._begin_together(order, peers, method.source_hash(job.method, folders)):
            return ordered.write_end(unavailable(refusal, "node"))
        peer_messages, is_interrupted = perform_beside(order, peers, report)
        path = ordered.record
        first_record = Record.read(path)
        records = [Record.from_dict(message["record"]) for message in peer_messages if message]
        gone_nodes = [
            f"{node} ({peer.host})" for node, peer in enumerate(peers, start=1) if not peer_messages[node - 1]
        ]
        merge_nodes([first_record, *(record for record in records if record.key == ordered.key)]).write(path)
        end = killed(first_record.phase, f"node {gone_nodes[0]} is gone") if gone_nodes else None
        hosts = ",".join([socket.gethostname(), *(peer.host for peer in peers)])
        place_record(path, {"on": "torchrun", "nodes": hosts}, {}, end)
        if is_interrupted:
            raise KeyboardInterrupt
        return path

    def _begin_together(self, order: JsonObject, peers: list[Peer], source: str) -> str:
        """Send the order to the other nodes. If no node refuses the order, let all nodes begin. Return the reasons of
        the nodes that refuse; empty if no node refuses."""
        for peer in peers:
            peer.tell({"order": order, "num_nodes": 1 + len(peers), "source": source})
        answers = [peer.hear().get("refused", "it is gone") for peer in peers]
        refusal = "; ".join(
            f"node {node}: {reason}" for node, reason in enumerate(answers, start=1) if reason
        )
        for peer in peers:
            peer.tell({"begin": not refusal})
        return refusal


class Peer:
    """The connection to another node. If the connection is lost, tell() does nothing and hear() returns {}."""

    def __init__(self, connection: socket.socket, host: str = "") -> None:
        self.host = host
        self.read, self.write = connection.makefile("r"), connection.makefile("w")

    def tell(self, message: JsonObject) -> None:
        try:
            self.write.write(json.dumps(message) + "\n")
            self.write.flush()
        except OSError:
            pass

    def hear(self) -> JsonObject:
        try:
            return dict(json.loads(self.read.readline() or "{}"))
        except (OSError, ValueError):
            return {}


def accepted(address: str, port: int, count: int) -> list[Peer]:
    """Wait until `count` other nodes have connected; return the connections in the order of the nodes' numbers. Raises
    Unavailable if a node has not connected after WAIT_SECONDS."""
    if not count:
        return []
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    peers: dict[int, Peer] = {}
    deadline = time.monotonic() + WAIT_SECONDS
    with socket.create_server((address, port), family=family) as listener:
        while len(peers) < count:
            listener.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                connection = listener.accept()[0]
            except OSError as error:
                raise Unavailable(
                    f"expected {count} other nodes to connect within {WAIT_SECONDS:g} s, got {len(peers)}"
                ) from error
            connection.settimeout(HELLO_SECONDS)
            peer = Peer(connection)
            hello = peer.hear()
            connection.settimeout(None)
            if hello.get("node") in range(1, count + 1):
                peer.host = str(hello.get("host"))
                peers[hello["node"]] = peer
    return [peers[node] for node in sorted(peers)]


def connected(address: str, port: int) -> Peer:
    """Connect to the first node. Raises Unavailable if the first node does not listen within WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return Peer(socket.create_connection((address, port)), address)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"the first node does not listen at {address}:{port}: {error}") from error
            time.sleep(RETRY_SECONDS)


def follow_first_node(first_node: Peer, node: int, folders: tuple[Path, ...]) -> None:
    """Run this node's part of each order from the first node, until the first node ends. The code comes from this
    checkout and from `folders` of methods. Refuse an order if the first node's code differs."""
    first_node.tell({"node": node, "host": socket.gethostname()})
    with tempfile.TemporaryDirectory() as results:
        while "order" in (message := first_node.hear()):
            order = message["order"]
            is_same = message["source"] == method.source_hash(order["job"]["method"], folders)
            differs = "its sources differ from the first node's; try the same checkout"
            first_node.tell({"refused": "" if is_same else differs})
            if not first_node.hear().get("begin"):
                continue
            os.environ["PET_NNODES"] = str(message["num_nodes"])
            stem = Path(results) / Path(order["stem"]).name
            perform_beside({**order, "stem": str(stem), "folders": list(map(str, folders))}, [first_node])


def perform_beside(
    order: JsonObject, peers: list[Peer], report: Report = lambda event: None
) -> tuple[list[JsonObject], bool]:
    """Run this node's part of an order, and exchange records with the peers, which run the other parts.

    If a peer fails or is gone, this node's part is interrupted. Return the peers' messages ({} for a peer that is gone)
    and a flag: True if the user interrupted the run.
    """
    peer_messages: list[JsonObject] = [{} for _ in peers]
    lock, is_running, is_stopped, is_interrupted = threading.Lock(), True, False, False

    def listen(index: int, peer: Peer) -> None:
        nonlocal is_stopped
        peer_messages[index] = peer.hear()
        with lock:
            if is_running and not is_stopped and peer_messages[index].get("status") != "ok":
                is_stopped = True
                interrupt_here()

    threads = [threading.Thread(target=listen, args=pair, daemon=True) for pair in enumerate(peers)]
    try:
        for thread in threads:
            thread.start()
        perform(order, report)
        with lock:
            is_running = False
    except KeyboardInterrupt:
        is_running = False
        is_interrupted = not is_stopped
    ordered = OrderedJob(Job.from_dict(order["job"]), order["key"], Path(order["stem"]))
    # The run was interrupted before it began, for example because a node was lost while another node compiled.
    if not ordered.record.exists():
        ordered.write_end(failures.of_stop(failures.End(ORDERED, stopped="interrupt")))
    record = json.loads(ordered.record.read_text())
    for peer in peers:
        peer.tell({"status": record["status"], "record": record})
    for thread in threads:
        thread.join()
    return peer_messages, is_interrupted
