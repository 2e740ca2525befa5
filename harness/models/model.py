"""Builds the model of a workload, whole or in parts (two ends and layers). The model is the published GPT or, if the
workload has a config.json, the model that the config.json describes.

A whole model has `layers`, embed() for token ids and loss() for embedded tokens. The two ends have embed() and loss().
A layer maps (B, T, D) to (B, T, D). A parameter has the same name in the whole model and in its parts; the parameters
of the ends come first.

`Without memory` means that the parameters are on torch's meta device. Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import torch

from harness.core.job import Workload
from harness.models.adapted import adapted, frozen
from harness.models.gpt import DTYPES, GPT, Embedding, Ends, Head, Layer, initialize
from harness.models.hub_model import HubEmbedding, HubEnds, HubHead, HubModel, hub_layer

Model = GPT | HubModel


def whole(workload: Workload) -> Model:
    """Return the whole model in the workload's dtype, without memory."""
    with torch.device("meta"):
        model = GPT(workload) if workload.config is None else HubModel(workload)
    model = frozen(model.to(DTYPES[workload.dtype]), workload)
    for layer in model.layers:
        adapted(layer, workload)
    return model


def empty(workload: Workload, device: str) -> Model:
    """Return the whole model in the workload's dtype on a device. The values of its parameters are not yet set."""
    return whole(workload).to_empty(device=device)


def build(workload: Workload, device: str = "cpu") -> Model:
    """Return the whole model in the workload's dtype on a device, with its starting values."""
    model = empty(workload, device)
    initialize(((name, parameter.data) for name, parameter in model.named_parameters()), workload)
    return model


def new_ends(workload: Workload) -> Ends | HubEnds:
    """Return one module with both ends of the model (before the first layer, after the last layer), without memory."""
    with torch.device("meta"):
        return frozen(Ends(workload) if workload.config is None else HubEnds(workload), workload)


def new_end_parts(workload: Workload) -> list[torch.nn.Module]:
    """Return both ends of the model without memory: as one module if they share a tensor; if not, as two modules, the
    embedding and the head."""
    return [new_ends(workload)] if workload.anatomy.is_tied else [*_embedding_and_head(workload)]


def new_chain(workload: Workload) -> list[torch.nn.Module]:
    """Return the model as a list of modules, in the order in which they run, without memory: the embedding, the layers,
    and the head with its loss."""
    embedding, head = _embedding_and_head(workload)
    return [embedding, *(new_layer(workload, index) for index in range(workload.num_layers)), head]


def _embedding_and_head(workload: Workload) -> tuple[torch.nn.Module, torch.nn.Module]:
    with torch.device("meta"):
        if workload.config is None:
            return Embedding(workload), Head(workload)
        return HubEmbedding(workload), HubHead(workload)


def new_layer(workload: Workload, index: int) -> torch.nn.Module:
    """Return layer `index` without memory. A method later gives the layer's parameters memory, such as the memory of
    a slot."""
    if workload.config is not None:
        return adapted(hub_layer(workload, index), workload)
    with torch.device("meta"):
        return adapted(Layer(workload), workload)
