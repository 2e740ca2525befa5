"""Messages between neighboring stages, over gloo: activations go to the stage above, gradients to the stage below. Each
tensor has a tag of its own.

Stages choose the order of passes while they run, so neighbors cannot agree on an order of messages beforehand. For each
direction a thread receives several messages at once, so that a stage can ask whether the next message has arrived.
Tensors go through the host's memory. All ranks know the shapes and dtypes of all messages before training.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.failures import naming_ranks

IN_FLIGHT = 4  # most messages under way in one direction, as in the original Varuna
TENSORS = 16  # most tensors of a message
ACTIVATION, GRADIENT = 0, 1
Spec = tuple[torch.Size, torch.dtype]  # shape and dtype of a tensor of a message


class LostPeer(RuntimeError):
    """Another rank did not come to the start, or did not send a message in time."""


def tag_of(kind: int, number: int, index: int) -> int:
    """Return the tag of one tensor of a message. No two tensors under way between two ranks have the same tag.
    `number`: the micro-batch's number. `index`: the tensor's place in the message."""
    return (number * TENSORS + index) * 2 + kind


class Inbox:
    """Receives messages of one kind (activations or gradients) from one rank, in the order of micro-batches."""

    def __init__(self, peer: int, kind: int, limit_seconds: float) -> None:
        self.peer, self.kind, self.limit_seconds = peer, kind, limit_seconds
        self.waited_seconds = 0.0
        self.expected: queue.SimpleQueue[list[tuple[int, list[Spec]]] | None] = queue.SimpleQueue()
        self.arrived: queue.Queue[list[Tensor] | Exception] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"inbox of rank {peer}")
        self.thread.start()

    def expect(self, messages: list[tuple[int, list[Spec]]]) -> None:
        """Let the thread receive these messages, in this order. A message is described by its micro-batch's number and
        the shapes and dtypes of its tensors."""
        self.expected.put(messages)

    def has_arrived(self) -> bool:
        return not self.arrived.empty()

    def take(self) -> list[Tensor]:
        """Wait for the next message, and return its tensors. Raises LostPeer after `limit_seconds`; raises the error of
        the thread, if the thread failed."""
        began = time.monotonic()
        try:
            message = self.arrived.get(timeout=self.limit_seconds)
        except queue.Empty:
            what = "gradient" if self.kind == GRADIENT else "activation"
            text = f"no {what} from rank {self.peer} in {self.limit_seconds:g} s: look at that rank's log"
            raise naming_ranks(LostPeer(text), [self.peer]) from None
        self.waited_seconds += time.monotonic() - began
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.expected.put(None)

    def _run(self) -> None:
        try:
            while (messages := self.expected.get()) is not None:
                self._receive_all(deque(messages))
        except Exception as error:  # take() raises it
            self.arrived.put(error)

    def _receive_all(self, messages: deque[tuple[int, list[Spec]]]) -> None:
        """Receive these messages, at most IN_FLIGHT at once, and put each one into `arrived`, in this order."""
        under_way: deque[list[tuple[Tensor, Any]]] = deque()
        while messages or under_way:
            while messages and len(under_way) < IN_FLIGHT:
                number, specs = messages.popleft()
                tensors = [empty_tensor(spec) for spec in specs]
                under_way.append(
                    [
                        (tensor, dist.irecv(tensor, self.peer, tag=tag_of(self.kind, number, index)))
                        for index, tensor in enumerate(tensors)
                    ]
                )
            message = under_way.popleft()
            for _, work in message:
                # A day is longer than any pause of a healthy peer; take() reports a lost peer long before.
                work.wait(timedelta(days=1))
            self.arrived.put([tensor for tensor, _ in message])


class Outbox:
    """Sends messages of one kind (activations or gradients) to one rank."""

    def __init__(self, peer: int, kind: int) -> None:
        self.peer, self.kind = peer, kind
        self.waited_seconds = 0.0
        self.under_way: deque[list[tuple[Tensor, Any]]] = deque()

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send the message of micro-batch `number`. First, if IN_FLIGHT messages are under way, wait for the
        earliest of these messages."""
        while len(self.under_way) >= IN_FLIGHT:
            self._wait()
        host_tensors = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
        self.under_way.append(
            [
                (tensor, dist.isend(tensor, self.peer, tag=tag_of(self.kind, number, index)))
                for index, tensor in enumerate(host_tensors)
            ]
        )

    def finish(self) -> None:
        while self.under_way:
            self._wait()

    def _wait(self) -> None:
        began = time.monotonic()
        for _, work in self.under_way.popleft():
            work.wait()
        self.waited_seconds += time.monotonic() - began


class Transport:
    """All messages of a stage. `below`, `above`: ranks of the neighboring stages; None: there is no such stage.
    `received`: for each micro-batch, shapes and dtypes of the tensors from the stage below. `gradients`: shapes and
    dtypes of the gradients from the stage above."""

    def __init__(
        self,
        below: int | None,
        above: int | None,
        limit_seconds: float,
        received: Sequence[list[Spec]],
        gradients: Sequence[list[Spec]],
    ) -> None:
        self.received, self.gradients = received, gradients
        self.activations_in = None if below is None else Inbox(below, ACTIVATION, limit_seconds)
        self.gradients_out = None if below is None else Outbox(below, GRADIENT)
        self.gradients_in = None if above is None else Inbox(above, GRADIENT, limit_seconds)
        self.activations_out = None if above is None else Outbox(above, ACTIVATION)

    @property
    def waited_seconds(self) -> float:
        """Return the seconds for which this stage has waited for messages so far."""
        boxes = (self.activations_in, self.gradients_out, self.gradients_in, self.activations_out)
        return sum(box.waited_seconds for box in boxes if box)

    def expect(self, *, gradients: bool = True) -> None:
        """Begin to receive the messages of a step. `gradients`: False: forward passes alone."""
        if self.activations_in:
            self.activations_in.expect([*enumerate(self.received)])
        if gradients and self.gradients_in:
            self.gradients_in.expect([*enumerate(self.gradients)])

    def finish(self) -> None:
        """Wait until all sent messages have been received."""
        for box in (self.gradients_out, self.activations_out):
            if box:
                box.finish()

    def close(self) -> None:
        for box in (self.activations_in, self.gradients_in):
            if box:
                box.close()


def join(
    timeout_seconds: float,
    message: bytes = b"",
    backend_of: Callable[[list[bytes]], str] = lambda messages: "gloo",
) -> list[bytes]:
    """Make the process group with the other ranks that torchrun's environment variables name. Return the message of
    each rank, in the ranks' order. `backend_of`: returns the group's backend for these messages, the same in all ranks.
    Raises LostPeer, which names the missing ranks, if some ranks do not come within `timeout_seconds`."""
    limit, began = timedelta(seconds=timeout_seconds), time.monotonic()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, limit)
    store.set(f"here/{rank}", message)
    missing: list[int] = []
    for other in range(world_size):
        remaining_seconds = max(0.01, timeout_seconds - (time.monotonic() - began))
        try:
            store.wait([f"here/{other}"], timedelta(seconds=remaining_seconds))
        except dist.DistStoreError:
            missing.append(other)
    if missing:
        names = ", ".join(map(str, missing))
        text = f"rank {names} of {world_size} did not come within {timeout_seconds:g} s: look at its log"
        raise naming_ranks(LostPeer(text), missing)
    messages = [store.get(f"here/{other}") for other in range(world_size)]
    backend = backend_of(messages)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return messages


def leave() -> None:
    """Leave the process group, if there is one. A process that ends without this call may abort in torch's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(rank: int, limit: timedelta) -> Any:
    """Return the store by which the ranks find one another: the store of torchrun's agent or, without such a store, one
    that rank 0 opens. Raises LostPeer if the store does not answer within `limit`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not is_agents
    try:
        store = dist.TCPStore(host, port, None, is_host, limit, wait_for_workers=False)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if is_host:
            raise
        other_side = "the agent" if is_agents else "rank 0"
        raise LostPeer(
            f"{other_side} did not answer at {host}:{port} within {limit.total_seconds():g} s"
        ) from error
    return dist.PrefixStore(f"pipeline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def gathered(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the message of each rank of the group, in the ranks' order. Without a group return only this process's
    message. Objects are not gathered, because torch would unpickle them, which can run code."""
    if group is None:
        return [message]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    buffers = [torch.zeros(max(1, *map(int, sizes)), dtype=torch.uint8) for _ in sizes]
    padded = torch.frombuffer(bytearray(message.ljust(len(buffers[0]), b"\0")), dtype=torch.uint8)
    dist.all_gather(buffers, padded, group=group)
    return [buffer.numpy().tobytes()[: int(size)] for buffer, size in zip(buffers, sizes, strict=True)]


def spec_of(tensor: Tensor) -> Spec:
    return tensor.shape, tensor.dtype


def empty_tensor(spec: Spec) -> Any:
    return torch.empty(spec[0], dtype=spec[1])
