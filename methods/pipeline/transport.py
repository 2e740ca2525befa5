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
from methods.pipeline.config.partition import MOST_MESSAGES_IN_FLIGHT

MOST_TENSORS = 16  # most tensors of a message
ACTIVATION_KIND, GRADIENT_KIND = 0, 1
TensorSpec = tuple[torch.Size, torch.dtype]  # shape and dtype of a tensor of a message


class LostPeer(RuntimeError):
    """Another rank did not come to the start, or did not send a message in time."""


def tag_of(message_kind: int, micro_batch: int, index: int) -> int:
    """Return the tag of one tensor of a message. No two tensors under way between two ranks have the same tag.
    `micro_batch`: the micro-batch's number. `index`: the tensor's place in the message."""
    return (micro_batch * MOST_TENSORS + index) * 2 + message_kind


class Inbox:
    """Receives messages of one kind (activations or gradients) from one rank, in the order of micro-batches."""

    def __init__(self, peer_rank: int, message_kind: int, limit_seconds: float) -> None:
        self.peer_rank, self.message_kind, self.limit_seconds = peer_rank, message_kind, limit_seconds
        self.waited_seconds = 0.0
        self.expected_messages: queue.SimpleQueue[list[tuple[int, list[TensorSpec]]] | None] = (
            queue.SimpleQueue()
        )
        self.arrived_messages: queue.Queue[list[Tensor] | Exception] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"inbox of rank {peer_rank}")
        self.thread.start()

    def expect(self, messages: list[tuple[int, list[TensorSpec]]]) -> None:
        """Let the thread receive these messages, in this order. A message is described by its micro-batch's number and
        the shapes and dtypes of its tensors."""
        self.expected_messages.put(messages)

    def has_arrived(self) -> bool:
        return not self.arrived_messages.empty()

    def take(self) -> list[Tensor]:
        """Wait for the next message, and return its tensors. Raises LostPeer after `limit_seconds`; raises the error of
        the thread, if the thread failed."""
        began_at = time.monotonic()
        try:
            message = self.arrived_messages.get(timeout=self.limit_seconds)
        except queue.Empty:
            message_name = "gradient" if self.message_kind == GRADIENT_KIND else "activation"
            text = f"no {message_name} from rank {self.peer_rank} in {self.limit_seconds:g} s: look at that rank's log"
            raise naming_ranks(LostPeer(text), [self.peer_rank]) from None
        self.waited_seconds += time.monotonic() - began_at
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.expected_messages.put(None)

    def _run(self) -> None:
        try:
            while (messages := self.expected_messages.get()) is not None:
                self._receive_all(deque(messages))
        except Exception as error:  # take() raises it
            self.arrived_messages.put(error)

    def _receive_all(self, messages: deque[tuple[int, list[TensorSpec]]]) -> None:
        """Receive these messages, at most MOST_MESSAGES_IN_FLIGHT at once, and put each one into `arrived_messages`, in
        this order."""
        messages_under_way: deque[list[tuple[Tensor, Any]]] = deque()
        while messages or messages_under_way:
            while messages and len(messages_under_way) < MOST_MESSAGES_IN_FLIGHT:
                micro_batch, specs = messages.popleft()
                tensors_and_works = []
                for index, spec in enumerate(specs):
                    tensor, tag = empty_tensor(spec), tag_of(self.message_kind, micro_batch, index)
                    tensors_and_works.append((tensor, dist.irecv(tensor, self.peer_rank, tag=tag)))
                messages_under_way.append(tensors_and_works)
            message = messages_under_way.popleft()
            for _, work in message:
                # A day is longer than any pause of a healthy peer; take() reports a lost peer long before.
                work.wait(timedelta(days=1))
            self.arrived_messages.put([tensor for tensor, _ in message])


class Outbox:
    """Sends messages of one kind (activations or gradients) to one rank."""

    def __init__(self, peer_rank: int, message_kind: int) -> None:
        self.peer_rank, self.message_kind = peer_rank, message_kind
        self.waited_seconds = 0.0
        self.messages_under_way: deque[list[tuple[Tensor, Any]]] = deque()

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send the message of micro-batch `micro_batch`. First, if MOST_MESSAGES_IN_FLIGHT messages are under
        way, wait for the earliest of these messages."""
        while len(self.messages_under_way) >= MOST_MESSAGES_IN_FLIGHT:
            self._wait()
        host_tensors = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
        tensors_and_works = []
        for index, tensor in enumerate(host_tensors):
            tag = tag_of(self.message_kind, micro_batch, index)
            tensors_and_works.append((tensor, dist.isend(tensor, self.peer_rank, tag=tag)))
        self.messages_under_way.append(tensors_and_works)

    def finish(self) -> None:
        while self.messages_under_way:
            self._wait()

    def _wait(self) -> None:
        began_at = time.monotonic()
        for _, work in self.messages_under_way.popleft():
            work.wait()
        self.waited_seconds += time.monotonic() - began_at


class Transport:
    """All messages of a stage. `rank_below`, `rank_above`: ranks of the neighboring stages; None: there is no such
    stage. `received_specs`: for each micro-batch, shapes and dtypes of the tensors from the stage below.
    `gradient_specs`: shapes and dtypes of the gradients from the stage above."""

    def __init__(
        self,
        rank_below: int | None,
        rank_above: int | None,
        limit_seconds: float,
        received_specs: Sequence[list[TensorSpec]],
        gradient_specs: Sequence[list[TensorSpec]],
    ) -> None:
        self.received_specs, self.gradient_specs = received_specs, gradient_specs
        self.activations_in = (
            None if rank_below is None else Inbox(rank_below, ACTIVATION_KIND, limit_seconds)
        )
        self.gradients_out = None if rank_below is None else Outbox(rank_below, GRADIENT_KIND)
        self.gradients_in = None if rank_above is None else Inbox(rank_above, GRADIENT_KIND, limit_seconds)
        self.activations_out = None if rank_above is None else Outbox(rank_above, ACTIVATION_KIND)

    @property
    def waited_seconds(self) -> float:
        """Return the seconds for which this stage has waited for messages so far."""
        boxes = (self.activations_in, self.gradients_out, self.gradients_in, self.activations_out)
        return sum(box.waited_seconds for box in boxes if box)

    def expect(self, *, expects_gradients: bool = True) -> None:
        """Begin to receive the messages of a step. `expects_gradients`: False: forward passes alone."""
        if self.activations_in:
            self.activations_in.expect([*enumerate(self.received_specs)])
        if expects_gradients and self.gradients_in:
            self.gradients_in.expect([*enumerate(self.gradient_specs)])

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
    time_limit, began_at = timedelta(seconds=timeout_seconds), time.monotonic()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_store(rank, time_limit)
    store.set(f"here/{rank}", message)
    missing_ranks: list[int] = []
    for other_rank in range(world_size):
        remaining_seconds = max(0.01, timeout_seconds - (time.monotonic() - began_at))
        try:
            store.wait([f"here/{other_rank}"], timedelta(seconds=remaining_seconds))
        except dist.DistStoreError:
            missing_ranks.append(other_rank)
    if missing_ranks:
        ranks_text = ", ".join(map(str, missing_ranks))
        text = f"rank {ranks_text} of {world_size} did not come within {timeout_seconds:g} s: look at its log"
        raise naming_ranks(LostPeer(text), missing_ranks)
    messages = [store.get(f"here/{other_rank}") for other_rank in range(world_size)]
    backend = backend_of(messages)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=time_limit)
    return messages


def leave() -> None:
    """Leave the process group, if there is one. A process that ends without this call may abort in torch's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _open_store(rank: int, time_limit: timedelta) -> Any:
    """Return the store by which the ranks find one another: the store of torchrun's agent or, without such a store, one
    that rank 0 opens. Raises LostPeer if the store does not answer within `time_limit`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens_store = rank == 0 and not is_agent_store
    try:
        store = dist.TCPStore(host, port, None, opens_store, time_limit, wait_for_workers=False)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if opens_store:
            raise
        store_owner = "the agent" if is_agent_store else "rank 0"
        text = f"{store_owner} did not answer at {host}:{port} within {time_limit.total_seconds():g} s"
        raise naming_ranks(LostPeer(text), [] if is_agent_store else [0]) from error
    return dist.PrefixStore(f"pipeline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def gather_messages(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the message of each rank of the group, in the ranks' order. Without a group return only this process's
    message. Objects are not gathered, because torch would unpickle them, which can run code."""
    if group is None:
        return [message]
    message_sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(message_sizes, torch.tensor([len(message)]), group=group)
    buffers = [torch.zeros(max(1, *map(int, message_sizes)), dtype=torch.uint8) for _ in message_sizes]
    padded_message = torch.frombuffer(bytearray(message.ljust(len(buffers[0]), b"\0")), dtype=torch.uint8)
    dist.all_gather(buffers, padded_message, group=group)
    return [
        buffer.numpy().tobytes()[: int(message_size)]
        for buffer, message_size in zip(buffers, message_sizes, strict=True)
    ]


def spec_of(tensor: Tensor) -> TensorSpec:
    return tensor.shape, tensor.dtype


def empty_tensor(spec: TensorSpec) -> Any:
    return torch.empty(spec[0], dtype=spec[1])
