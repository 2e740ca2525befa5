"""The GPT that every method trains: two ends that share the token embedding, and a list of equal layers.

It is the published runs' model: a pre-LN decoder with learned positions, fused QKV, exact GELU and a tied head. The
starting values of a tensor depend only on the seed and the tensor's name, so layers can be made one by one.

Shapes: B batch, T tokens, D hidden, V vocabulary."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core import adapters
from harness.core.anatomy import MOST_LOGITS, anatomy_of
from harness.core.cpu_cores import available_cores
from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY, Workload
from harness.models import weight_files

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A function that a model applies to each logit. It returns the new logits, and the function's slope at each logit.
Bend = Callable[[Tensor], tuple[Tensor, Tensor | float]]
# elements in a block of starting values; a multiple of 16, because torch draws 16 at once
DRAWN_AT_ONCE = 2**18


class Layer(nn.Module):
    """One transformer block, which maps (B, T, D) to (B, T, D)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        size = workload.hidden_size
        self.num_heads = workload.num_heads
        self.dropout = workload.dropout
        self.ln1 = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)  # rows: 3, heads, head size
        self.proj = nn.Linear(size, size)
        self.ln2 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, 4 * size)
        self.fc2 = nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.proj(self._attention(self.ln1(x))), self.dropout)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.ln2(x)))), self.dropout)

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        return mixed.transpose(1, 2).reshape(batch, tokens, size)


class Ends(nn.Module):
    """The model's two ends: the embedding before the first layer; the norm, head and loss after the last layer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.dropout = workload.dropout
        self.wte = nn.Embedding(workload.vocab_size, workload.hidden_size)
        self.wpe = nn.Embedding(workload.seq_len, workload.hidden_size)
        self.lnf = nn.LayerNorm(workload.hidden_size)

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return F.dropout(self.wte(inputs) + self.wpe(positions), self.dropout)

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy over all tokens, in fp32. The head's matrix is the token embedding's. The
        loss's gradient is multiplied by `scale`, the loss is not."""
        return head_loss(self.lnf(x).flatten(0, 1), self.wte.weight, targets.flatten(), scale)


@torch.fx.wrap  # torch.fx sees this function as one operation when it traces a model for CutPoints
def head_loss(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
    mean: Tensor = HeadLoss.apply(x, weight, targets, scale)  # type: ignore[no-untyped-call]
    return mean


class Embedding(Ends):
    """Maps (B, T) token ids to (B, T, D)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        del self.lnf

    forward = Ends.embed


class Head(Ends):
    """Maps hidden states (B, T, D) and target token ids (B, T) to the mean loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        del self.wpe

    forward = Ends.loss


class HeadLoss(torch.autograd.Function):
    """The mean cross-entropy of a linear head, computed in blocks of tokens, because the logits of all tokens together
    would be the largest tensor of most models.

    Each block's gradients are computed right after the block's loss, so no logits are computed twice. The gradients are
    scaled before they are rounded to fp16; without the scale most gradients would be rounded to zero. x: (N, D), hidden
    states of N tokens; weight: (V, D); targets: (N,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, bend: Bend | None = None
    ) -> Tensor:
        num_tokens, total = len(x), torch.zeros((), device=x.device)
        dx, dweight = torch.empty_like(x), None
        at_once = max(1, MOST_LOGITS // len(weight))
        for start in range(0, num_tokens, at_once):
            block = slice(start, start + at_once)
            loss, dlogits = cross_entropy(F.linear(x[block], weight), targets[block], num_tokens, scale, bend)
            total += loss
            if dlogits.dtype == weight.dtype == dx.dtype:
                torch.mm(dlogits, weight, out=dx[block])  # writes to dx without a temporary tensor
            else:  # under autocast the dtypes differ
                dx[block] = dlogits @ weight
            if ctx.needs_input_grad[1]:
                dweight = dlogits.t() @ x[block] if dweight is None else dweight.addmm_(dlogits.t(), x[block])
            del dlogits  # free the block's gradients before the next block
        ctx.gradients = dx, dweight
        return total

    @staticmethod
    def backward(ctx: Any, *dloss: Tensor) -> Any:
        # ctx keeps no reference, so autograd copies nothing
        (dx, dweight), ctx.gradients = ctx.gradients, None
        return dx.mul_(dloss[0]), None if dweight is None else dweight.mul_(dloss[0]), None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, num_tokens: int, scale: float, bend: Bend | None = None
) -> tuple[Tensor, Tensor]:
    """Return the part of these N tokens in the mean loss over `num_tokens` tokens, in fp32, and this part's gradient
    times `scale`, in the logits' dtype. The gradient overwrites logits that are fp32. logits: (N, V); targets: (N,)."""
    dtype, wanted = logits.dtype, targets.unsqueeze(1)
    logits, slope = bend(logits) if bend else (logits, 1.0)
    logits = logits.float()
    right, largest = logits.gather(1, wanted), logits.amax(1, keepdim=True)
    sums = logits.sub_(largest).exp_().sum(1, keepdim=True)
    loss = (sums.log() + largest - right).sum() / num_tokens
    divisor = num_tokens / scale
    dlogits = logits.div_(sums * divisor).scatter_add_(1, wanted, torch.full_like(sums, -1 / divisor))
    if bend:
        dlogits.mul_(slope)
    return loss, dlogits.to(dtype)


class GPT(nn.Module):
    """The whole model. Its backward pass recomputes every layer from the layer's input."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.ends = Ends(workload)
        self.layers = nn.ModuleList(Layer(workload) for _ in range(workload.num_layers))

    def forward(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        return self.loss(self.embed(inputs), targets, scale)

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D)."""
        return self.ends.embed(inputs)

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the loss of embedded tokens, (B, T, D). The loss's gradient is multiplied by `scale`."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.ends.loss(x, targets, scale)


def initialize(named: Iterable[tuple[str, Tensor]], workload: Workload) -> None:
    """Fill each tensor in place with the starting values for its name. Threads fill several tensors at once."""

    def fill(pair: tuple[str, Tensor]) -> None:
        name, tensor = pair
        if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
            _drawing(name, workload)(tensor)  # drawn in place: no second copy in memory
            return
        for start, drawn in drawn_blocks(name, tensor.shape, workload):
            tensor.view(-1)[start : start + len(drawn)].copy_(drawn)

    _sketch(workload)
    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, named))


def drawn_blocks(
    name: str, shape: torch.Size, workload: Workload, at_once: int = DRAWN_AT_ONCE
) -> Iterator[tuple[int, Tensor]]:
    """Yield the values of initial() in blocks, as (first index, elements). Each block overwrites the block before it,
    because a host may lack room for a whole embedding. `at_once`: elements in a block, a multiple of 16."""
    numel, draw = shape.numel(), _drawing(name, workload)
    room = torch.empty(min(numel, 2 * at_once))
    # If a tensor's size is no multiple of 16, torch draws the tensor's last 16 numbers again. So the last block
    # also takes the remainder, if it is shorter than a block, and ends where the whole tensor ends.
    for start in range(0, max(1, numel - at_once + 1), at_once):
        left = numel - start
        yield start, draw(room[: left if left < 2 * at_once else at_once])


def initial(name: str, shape: torch.Size, workload: Workload) -> Tensor:
    """Return the fp32 starting values, on the host, of the parameter that GPT.named_parameters() calls `name`."""
    return _drawing(name, workload)(torch.empty(shape))


def initials(shapes: Iterable[tuple[str, torch.Size]], workload: Workload) -> Iterator[Tensor]:
    """Yield initial() of each name and shape, in order. While callers use one tensor, the cores draw the next ones."""
    _sketch(workload)
    cores = available_cores()
    ahead: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(cores) as pool:
        for name, shape in shapes:
            ahead.append(pool.submit(initial, name, shape, workload))
            if len(ahead) > cores:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _sketch(workload: Workload) -> None:
    """Find the model's anatomy before threads ask for it. A model by its config.json that is new here is sketched by a
    process that takes seconds, and each thread would start one."""
    anatomy_of(workload)


def _drawing(name: str, workload: Workload) -> Callable[[Tensor], Tensor]:
    """Return a function that fills an fp32 host tensor with the next starting values of the parameter `name`. If the
    model has no parameter of this name, the function fills in zeros, and the gate reports the name."""
    anatomy, name = anatomy_of(workload), adapters.original_name(name)
    within = anatomy.within(name)
    if workload.weights is not None and not adapters.is_adapter(within):
        return weight_files.reading(workload.weights, name)
    mean, std = anatomy.starts.get(within, (0.0, 0.0))
    is_uniform = adapters.is_first_factor(within)
    if not std and not is_uniform:
        return lambda tensor: tensor.fill_(mean)
    seed = hashlib.sha256(f"{workload.seed} {name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)
    if is_uniform:
        shape = anatomy.shape_of(name)
        assert shape is not None
        bound = adapters.start_bound(shape)
        return lambda tensor: tensor.uniform_(-bound, bound, generator=generator)
    return lambda tensor: tensor.normal_(mean, std, generator=generator)


def is_decayed(shape: Sequence[int]) -> bool:
    """True if weight decay applies to a parameter of this shape: it applies to matrices, not to biases and norms."""
    return len(shape) > 1


def adamw_groups(
    parameters: Iterable[nn.Parameter], shape_of: Callable[[Any], Any] = Tensor.size
) -> list[dict]:
    """Return the parameters in groups for torch's AdamW: those with weight decay, and those without."""
    groups: dict[float, list] = {WEIGHT_DECAY: [], 0.0: []}
    for parameter in parameters:
        groups[WEIGHT_DECAY if is_decayed(shape_of(parameter)) else 0.0].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def adamw(parameters: Iterable[nn.Parameter], **groups: Any) -> torch.optim.AdamW:
    """Return the AdamW of the published runs. `groups` are keyword arguments for adamw_groups()."""
    return torch.optim.AdamW(adamw_groups(parameters, **groups), betas=BETAS, eps=EPSILON, fused=True)
