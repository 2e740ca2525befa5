"""The floating-point operations and the bytes of a workload's step, as Workload has them: from its sizes and from the
parts of its model. Plans, forecasts and the gate read these numbers."""

from __future__ import annotations

import math

from harness.core.anatomy import MOST_LOGITS, Anatomy, LayerKind


class WorkloadCosts:
    """The base of Workload. It has no values of its own; the annotations name what Workload has."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_len: int
    batch_size: int
    micro_batches: int
    vocab_size: int
    lora: str | None

    @property
    def anatomy(self) -> Anatomy:
        raise NotImplementedError

    @property
    def kind_counts(self) -> list[tuple[LayerKind, int]]:
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        raise NotImplementedError

    @property
    def flops_per_step(self) -> float:
        """Floating-point operations of one step: forward pass, full recompute of every layer, backward pass. Causal
        attention counts as half of full attention; eager attention counts as full, because it computes all scores. The
        embedding's look-up and elementwise operations do not count.

        A recompute that stops before a layer's last matrix product saves 8 D^2 operations for each token and layer;
        this number includes them. A block of tokens is recomputed twice: with the whole layer, then on its own."""
        layers = [
            count * (4 * self.flops_of(kind) + self.repeated_flops_of(kind) - self.frozen_flops_of(kind))
            for kind, count in self.kind_counts
        ]
        return sum(layers) + self.head_flops_per_step

    @property
    def model_flops_per_step(self) -> float:
        """Floating-point operations of one step without any recompute, as model FLOPs utilization (MFU) counts them."""
        layers = [
            count * (3 * self.flops_of(kind) - self.frozen_flops_of(kind)) for kind, count in self.kind_counts
        ]
        return sum(layers) + self.head_flops_per_step

    @property
    def layer_flops(self) -> float:
        """Floating-point operations of one layer's forward pass; if layers are unequal, of the longest."""
        return max(map(self.flops_of, self.anatomy.kinds))

    @property
    def all_layers_flops(self) -> float:
        """Floating-point operations of all layers' forward passes."""
        return sum(count * self.flops_of(kind) for kind, count in self.kind_counts)

    def flops_of(self, kind: LayerKind) -> float:
        """Return the floating-point operations of the forward pass of a layer of this kind."""
        tokens = self.batch_size * self.seq_len
        return float(tokens * (kind.token_flops + self.seq_len * kind.pair_flops))

    def frozen_flops_of(self, kind: LayerKind) -> float:
        """Return the floating-point operations of the gradients of a layer's frozen matrices, which no backward pass
        computes. They are as many as those of the forward pass's products with these matrices."""
        if not self.lora:
            return 0.0
        return float(self.batch_size * self.seq_len * (kind.token_flops - 2 * kind.num_adapter_params))

    def repeated_flops_of(self, kind: LayerKind) -> float:
        """Return the floating-point operations of the second recompute in the backward pass of a layer of this kind:
        after the whole layer, each block of tokens is recomputed once more. 0 if the layer does not compute in
        blocks."""
        return float(self.batch_size * self.seq_len * kind.blocks.token_flops) if kind.blocks else 0.0

    @property
    def head_flops_per_step(self) -> float:
        """Floating-point operations of the head in one step: the logits, and the gradients of its input and matrix."""
        products = 2.0 if self.lora else 3.0  # a frozen matrix gets no gradient
        return 2.0 * products * self.batch_size * self.seq_len * self.vocab_size * self.hidden_size

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one layer's input for the whole batch. The input is kept so that the layer can be recomputed."""
        return self.batch_size * self.seq_len * self.hidden_size * self.weight_bytes

    @property
    def head_bytes(self) -> int:
        """Most bytes that a micro-batch's loss and its gradients take at one time: a block of logits in fp32, the
        block's gradient in the weights' dtype, and, after the first block, the gradient of the head's matrix."""
        weight_bytes, tokens = self.weight_bytes, self.batch_size // self.micro_batches * self.seq_len
        # tokens of the first block, which is the largest
        block_tokens = min(tokens, max(1, MOST_LOGITS // self.vocab_size))
        first_logits = block_tokens * self.vocab_size
        later_logits = min(block_tokens, tokens - block_tokens) * self.vocab_size
        matrix_bytes = 0 if self.lora else weight_bytes * self.vocab_size * self.hidden_size
        # bytes of a logit, of its gradient, and of the copies that the loss keeps
        logit_bytes = (4 if weight_bytes == 4 else 4 + weight_bytes) + weight_bytes * self.anatomy.slopes
        first_bytes = logit_bytes * first_logits
        later_bytes = logit_bytes * later_logits + matrix_bytes if later_logits else 0
        gradient_bytes = weight_bytes * first_logits + matrix_bytes
        kept_bytes = 3 * self.boundary_bytes + int(self.anatomy.head_boundaries * self.boundary_bytes)
        return kept_bytes // self.micro_batches + max(first_bytes, later_bytes, gradient_bytes)

    @property
    def layer_bytes(self) -> int:
        """Most bytes that a layer's recompute and backward pass on a micro-batch take at one time."""
        return max(map(self.bytes_of, self.anatomy.kinds))

    def bytes_of(self, kind: LayerKind) -> int:
        """Return the most bytes that the recompute and backward pass of a layer of this kind take on a micro-batch."""
        if kind.blocks is None:
            return self.whole_bytes_of(kind)
        boundary = self.boundary_bytes // self.micro_batches
        return max(int(inputs * boundary) + fixed for inputs, fixed in kind.blocks.lines)

    @property
    def whole_layer_bytes(self) -> int:
        """Most bytes that the recompute and backward pass of a layer take at one time if the layer computes all tokens
        at once, not in blocks of tokens (LayerKind.blocks)."""
        return max(map(self.whole_bytes_of, self.anatomy.kinds))

    def whole_bytes_of(self, kind: LayerKind) -> int:
        """Return the bytes of a layer of this kind as whole_layer_bytes: the layer's activations, the activations'
        gradients, and one matrix's gradient before this gradient is added to the sum."""
        boundary = self.boundary_bytes // self.micro_batches
        if kind.lines:
            lines = ((factor + self.seq_len * pair, fixed) for factor, pair, fixed in kind.lines)
            return max(int(factor * boundary) + fixed for factor, fixed in lines)
        activation_bytes = int(self.boundaries_of(kind) * self.boundary_bytes) // self.micro_batches
        # a frozen matrix gets no gradient
        return activation_bytes + (0 if self.lora else self.weight_bytes * math.prod(kind.largest_tensor))

    def boundaries_of(self, kind: LayerKind) -> float:
        """Return the most memory of the recompute and backward pass of a layer of this kind that computes all tokens at
        once, in multiples of the layer's input."""
        return kind.boundaries + self.seq_len * kind.pair_boundaries

    @property
    def given_bytes(self) -> int:
        """Bytes of the arguments that the layers get beside their input: angles of rotary positions, and masks."""
        anatomy, samples = self.anatomy, self.batch_size // self.micro_batches
        pair_bytes = samples * anatomy.pair_given_bytes + anatomy.pair_shared_bytes
        return anatomy.given_bytes * self.seq_len + self.seq_len**2 * pair_bytes

    @property
    def num_attention_rows(self) -> int:
        """Rows of one layer's attention scores: one for each sample, head and token; a row holds a score for each
        token."""
        return self.batch_size * self.num_heads * self.seq_len

    @property
    def dropout_bytes(self) -> int:
        """Most bytes that a layer's backward pass takes for dropout on a CPU, where no fused kernel computes attention
        with dropout. Rehearsals found at most 14 bytes for each pair of tokens and each head, plus three times the
        bytes of the layer's input."""
        return 14 * self.num_attention_rows * self.seq_len + 3 * self.boundary_bytes

    @property
    def working_bytes(self) -> int:
        """Most bytes that a step takes at one time, without the data kept for every layer; rehearsals test this."""
        # bytes of the other micro-batches, which wait while one micro-batch is in a layer
        waiting_boundary_bytes = 4 * self.boundary_bytes * (self.micro_batches - 1) // self.micro_batches
        return max(self.head_bytes, self.layer_bytes + waiting_boundary_bytes) + self.given_bytes
