"""Builds the model of a workload, the published GPT or one by its config.json: whole, or as two ends and layers.

A whole model has `layers`, embed() for token ids and loss() for embedded tokens. The two ends have embed() and loss().
A layer maps (B, T, D) to (B, T, D). The whole model and its parts name their parameters alike, the ends' first.

`Without memory` means parameters on torch's meta device. Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import torch

from harness.core.gpt import DTYPES, GPT, Embedding, Ends, Head, Layer, initialize
from harness.core.hub_model import HubEmbedding, HubEnds, HubHead, HubModel, hub_layer
from harness.core.job import Workload

Model = GPT | HubModel


def whole(workload: Workload) -> Model:
    """The model in the workload's dtype, without memory."""
    with torch.device("meta"):
        model = GPT(workload) if workload.config is None else HubModel(workload)
    return model.to(DTYPES[workload.dtype])


def empty(workload: Workload, device: str) -> Model:
    """The model in the workload's dtype on a device, without starting values."""
    return whole(workload).to_empty(device=device)


def build(workload: Workload, device: str = "cpu") -> Model:
    """The seeded model in the workload's dtype on a device."""
    model = empty(workload, device)
    initialize(((name, parameter.data) for name, parameter in model.named_parameters()), workload)
    return model


def new_ends(workload: Workload) -> Ends | HubEnds:
    """The model before its first layer and after its last, without memory."""
    with torch.device("meta"):
        return Ends(workload) if workload.config is None else HubEnds(workload)


def new_end_parts(workload: Workload) -> list[torch.nn.Module]:
    """Both ends as one module if they share a tensor, else the embedding and the head, without memory."""
    return [new_ends(workload)] if workload.anatomy.is_tied else [*_embedding_and_head(workload)]


def new_chain(workload: Workload) -> list[torch.nn.Module]:
    """The model as modules that follow one another, without memory: embedding, layers, and the head with its loss."""
    embedding, head = _embedding_and_head(workload)
    return [embedding, *(new_layer(workload, index) for index in range(workload.num_layers)), head]


def _embedding_and_head(workload: Workload) -> tuple[torch.nn.Module, torch.nn.Module]:
    with torch.device("meta"):
        if workload.config is None:
            return Embedding(workload), Head(workload)
        return HubEmbedding(workload), HubHead(workload)


def new_layer(workload: Workload, index: int) -> torch.nn.Module:
    """One of the layers, without memory; the slot that the layer occupies lends it memory."""
    if workload.config is not None:
        return hub_layer(workload, index)
    with torch.device("meta"):
        return Layer(workload)
