"""Adds adapters to a model, by the library peft, and freezes all other parameters (--lora).

peft replaces each chosen linear layer by a module that holds the layer, as `base_layer`, and its adapter. In half
precision peft keeps adapters in fp32 beside a base in bf16 or fp16, and so does this file."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from harness.core import adapters
from harness.core.job import Workload

HALF = torch.bfloat16, torch.float16
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def linear_sizes(layer: nn.Module) -> adapters.Shapes:
    """Return the numbers of inputs and outputs of the layer's linear modules, by name."""
    sizes = adapters.Shapes()
    for name, child in layer.named_modules():
        if isinstance(child, nn.Linear):
            sizes[name] = (child.in_features, child.out_features)
        elif _is_transposed(child):
            num_inputs, num_outputs = child.weight.shape
            sizes[name] = (num_inputs, num_outputs)
    return sizes


def add_adapters(layer: nn.Module, workload: Workload) -> None:
    """Add the workload's adapters to a layer whose tensors have no memory, and freeze its other parameters. A layer
    without a target has no adapters."""
    from peft import LoraConfig, inject_adapter_in_model

    terms = workload.adapters
    assert terms is not None
    targets = adapters.chosen(linear_sizes(layer), terms.targets)
    if not targets:
        layer.requires_grad_(False)
        return
    config = LoraConfig(
        r=terms.rank,
        lora_alpha=terms.alpha,
        target_modules=targets,
        fan_in_fan_out=any(_is_transposed(layer.get_submodule(name)) for name in targets),
    )
    with unset_fake_temporarily(), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tensors without memory
        inject_adapter_in_model(config, layer)
    for name, parameter in list(layer.named_parameters()):
        if parameter.requires_grad and parameter.dtype in HALF:
            owner, _, leaf = name.rpartition(".")
            setattr(
                layer.get_submodule(owner),
                leaf,
                nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)),
            )


def adapted(layer: nn.Module, workload: Workload) -> nn.Module:
    """Return the layer, with the workload's adapters if it has any."""
    if workload.lora is not None:
        add_adapters(layer, workload)
    return layer


def frozen(module: AnyModule, workload: Workload) -> AnyModule:
    """Return the module, whose parameters are frozen if the workload trains adapters alone."""
    return module.requires_grad_(False) if workload.lora is not None else module


def _is_transposed(module: Any) -> bool:
    """True for the linear module of GPT-2 in transformers, whose matrix is stored with its inputs as rows."""
    return type(module).__name__ == "Conv1D"
