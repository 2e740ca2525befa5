"""Jobs over the nodes of a torchrun that runs the call itself: who meets whom, what is refused, and a real training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.core.record import Record, read_all
from harness.run.place import OrderedJob
from places import torchrun
from places.torchrun import Peer, Torchrun, accepted, connected, follow_first_node
from tests.support import cli, tiny
from tests.support.ports import free_ports, own_ports
from tests.support.tiny import TINY

pytestmark = pytest.mark.timeout(600)
SPREAD = Job("fsdp2-offload", TINY, {"world_size": 2})


def three_ports() -> int:
    """The first of three that follow one another and are free: torchrun's, the agents', the nodes'."""
    for port in own_ports()[:-2]:
        try:
            for following in (port, port + 1, port + 2):
                socket.create_server(("127.0.0.1", following)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no three free ports in a row")


def test_without_torchrun_one_line_says_how(tmp_path: Path) -> None:
    done = cli.run(*tiny.WORDS, "--on", "torchrun", "--results", tmp_path)
    assert done.returncode == 7 and "no torchrun runs this call: try torchrun" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nodes_meet_in_their_order_and_a_stranger_is_none() -> None:
    port, accepted_peers = free_ports(1)[0], list[Peer]()
    meeting = threading.Thread(target=lambda: accepted_peers.extend(accepted("127.0.0.1", port, 2)))
    meeting.start()
    peers = [connected("127.0.0.1", port) for _ in range(3)]
    for peer, node in zip(peers, (7, 2, 1), strict=True):
        peer.tell({"node": node, "host": f"host-{node}"})
    meeting.join()
    assert [peer.host for peer in accepted_peers] == ["host-1", "host-2"]
    assert peers[0].hear() == {}  # its connection was closed


def test_a_node_with_other_sources_refuses_the_order() -> None:
    first, other = map(Peer, socket.socketpair())
    node = threading.Thread(target=follow_first_node, args=(other, 1, ()))
    node.start()
    assert first.hear()["node"] == 1
    order = OrderedJob(SPREAD, "key", Path("log")).order(())
    first.tell({"order": order, "num_nodes": 2, "source": "other"})
    assert "its sources differ" in first.hear()["refused"]
    first.tell({"begin": False})
    first.tell({})
    node.join()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Torchrun, socket.socket]]:
    """The first node, whose ranks train until SIGINT, and the connection to it that the other node holds."""

    def train(order: dict[str, Any], report: Any) -> None:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(torchrun, "perform", train)
    monkeypatch.setenv("PET_NNODES", "2")  # a launch sets it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    first, other = socket.socketpair()
    with other:
        yield Torchrun([Peer(first, "other")]), other
    signal.signal(signal.SIGINT, before)


def launched(place: Torchrun, results: Path) -> Record:
    (path,) = place.launch([(SPREAD, "key")], results, (), lambda event: None)
    return Record.read(path)


def test_a_rank_that_dies_on_another_node_ends_the_job_and_is_named(
    pair: tuple[Torchrun, socket.socket], tmp_path: Path
) -> None:
    place, other = pair
    peer, lost = (
        Peer(other),
        Record(SPREAD, "key", "killed", reason="rank 1 of 2: killed by SIGKILL at step 3"),
    )
    peer.tell({"refused": ""})
    peer.tell({"status": lost.status, "record": lost.to_dict()})
    record = launched(place, tmp_path)
    assert (record.status, record.reason) == (lost.status, lost.reason)
    assert record.machine["nodes"].endswith(",other")
    assert (
        "order" in peer.hear() and peer.hear() == {"begin": True} and peer.hear()["status"] == "interrupted"
    )


def test_a_node_that_is_gone_ends_the_job_and_is_named(
    pair: tuple[Torchrun, socket.socket], tmp_path: Path
) -> None:
    place, other = pair
    Peer(other).tell({"refused": ""})
    other.shutdown(socket.SHUT_WR)
    record = launched(place, tmp_path)
    assert record.status == "killed" and record.reason.endswith("node 1 (other) is gone")


def test_an_interrupt_at_the_first_node_ends_the_job_on_the_others(
    pair: tuple[Torchrun, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(order: dict[str, Any], report: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torchrun, "perform", interrupted)
    place, other = pair
    peer, messages = Peer(other), list[dict[str, Any]]()

    def run() -> None:
        messages.append(peer.hear())
        peer.tell({"refused": ""})
        messages.append(peer.hear())
        messages.append(peer.hear())
        peer.tell(messages[2])

    node = threading.Thread(target=run, daemon=True)
    node.start()
    with pytest.raises(KeyboardInterrupt):
        launched(place, tmp_path)
    node.join()
    assert messages[1] == {"begin": True} and messages[2]["status"] == "interrupted"
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "interrupted" and record.machine["on"] == "torchrun"


@pytest.mark.heavy
def test_the_example_for_skypilot_trains_as_the_reference_does(tmp_path: Path) -> None:
    """Its two machines are folders of this one, and each has SkyPilot's variables."""
    script = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())["run"]
    sizes = " ".join(tiny.WORDS[2:])
    script = script.replace(
        "-l 4 -h 256 -b 2", f"{sizes} --steps 6 --no-probe --results {tmp_path / 'results'}"
    )
    script = script.replace("29400", str(three_ports()))
    running = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        folders = {name: str(tmp_path / str(node)) for name in ("TMPDIR", "HARNESS_LOCKS")}
        sky = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        }
        command = ["bash", "-c", script]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **folders, **sky}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams))
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "gate passed (tolerance)" in outputs[0], outputs
    # torchrun itself may tell that the first node's store is gone
    assert "fsdp2-offload" not in outputs[1], outputs
    records = read_all(tmp_path / "results")[0].values()
    (record,) = (record for record in records if record.job.method == "fsdp2-offload")
    assert record.machine["on"] == "torchrun" and [rank["node"] for rank in record.machine["ranks"]] == [0, 1]
