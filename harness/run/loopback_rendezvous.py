"""A rendezvous for an agent that is alone: its store listens on this machine's loopback address only.

torch's own rendezvous of one node listens on all addresses and unpickles what it finds there, so anybody who reaches
its port runs code. This one keeps its state in this process, and nobody unpickles the bytes in the ranks' store.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

ADDRESS = "127.0.0.1"
BACKEND = "loopback"


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of one node, complete as soon as that node is there."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=run_id, timeout=60)
        self._store = TCPStore(ADDRESS, port, 1, is_master=True, master_listen_fd=listener.detach())

    def get_backend(self) -> str:
        return BACKEND


def register() -> None:
    """Register the rendezvous by its name for torch's launcher."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LoopbackRendezvous(parameters.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
