"""The token batches that every method trains on. The tokens come from a synthetic seeded stream that a model can learn,
or from a Megatron corpus.

Sample i depends only on the seed and i. So the batch of any step can be made again without the steps before it, and a
larger batch contains the same samples in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.core.corpus_files import corpus_files, sampled_hash
from harness.core.job import Workload

if TYPE_CHECKING:
    from torch import Tensor

# most samples that corpus_hash() reads: a disk takes about a second for 1024 seeks
MOST_HASHED_SAMPLES = 1024
NUM_TOKENS = 50257  # GPT-2's tokens; ids from this number on only pad the vocabulary and are never drawn
SUCCESSOR_PROBABILITY = 0.5  # probability that a token is the successor of the token before it
# the successor of token t is (t * SUCCESSOR_MULTIPLIER + SUCCESSOR_OFFSET) % number of tokens
SUCCESSOR_MULTIPLIER, SUCCESSOR_OFFSET = 12_289, 7_919
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Sampler = Callable[[int], np.ndarray]


def batches(workload: Workload, num_steps: int) -> np.ndarray:
    """Return token ids (num_steps, B, T + 1), int64: inputs are [..., :-1], targets [..., 1:]. Raises ValueError if the
    corpus cannot be read or holds ids beyond the vocabulary."""
    sample = corpus(workload) if workload.corpus else synthetic(workload)
    num_samples = num_steps * workload.batch_size
    tokens = np.stack([sample(index) for index in range(num_samples)])
    return tokens.reshape(num_steps, workload.batch_size, workload.seq_len + 1)


def token_batches(workload: Workload, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of batches() as a list: a pair (inputs, targets) for each step; both are token ids of shape
    (B, T). Code that trains in its own process, without the worker, calls this function."""
    import torch

    tokens = torch.from_numpy(batches(workload, num_steps))
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def hash_of_tokens(tokens: np.ndarray) -> str:
    """Return the hash of token ids. A record names its run's data by this hash."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()


def corpus_hash(workload: Workload, num_samples: int) -> str:
    """Return a hash of a corpus. The hash covers the sampled_hash() of both files, and at most MOST_HASHED_SAMPLES of
    the `num_samples` samples that the training reads, at equal distances."""
    digest = hashlib.sha256(" ".join(map(sampled_hash, corpus_files(str(workload.corpus)))).encode())
    with contextlib.suppress(ValueError):  # if the corpus cannot be read, the run will say why
        sample, num_hashed = corpus(workload), min(num_samples, MOST_HASHED_SAMPLES)
        for index in range(num_hashed):
            digest.update(sample(index * num_samples // num_hashed).tobytes())
    return digest.hexdigest()[:16]


def synthetic(workload: Workload) -> Sampler:
    """Return a function that makes sample i of the synthetic stream: T + 1 token ids. Half of the tokens are the
    successor of the token before them; the other tokens are drawn by Zipf's law. A model can learn this
    stream, so a broken optimizer shows in the loss. The loss on uniform tokens stays at ln V with any optimizer."""
    num_ids = min(workload.vocab_size, NUM_TOKENS) if workload.config is None else workload.vocab_size
    cumulative = np.cumsum(1.0 / np.arange(1, num_ids + 1))
    cumulative /= cumulative[-1]

    def sample(index: int) -> np.ndarray:
        uniform = _uniform(workload.seed, index, 2 * (workload.seq_len + 1))
        fresh = np.searchsorted(cumulative, uniform[: workload.seq_len + 1]).astype(np.int64)
        follows = uniform[workload.seq_len + 1 :] < SUCCESSOR_PROBABILITY
        tokens = fresh.tolist()
        for position in np.flatnonzero(follows[1:]) + 1:
            tokens[position] = (tokens[position - 1] * SUCCESSOR_MULTIPLIER + SUCCESSOR_OFFSET) % num_ids
        return np.array(tokens, dtype=np.int64)

    return sample


def corpus(workload: Workload) -> Sampler:
    """Return a function that makes sample i of a Megatron corpus: T + 1 tokens in a row from a seeded random position.
    `workload.corpus` is the prefix of the corpus's .bin and .idx. Raises ValueError if the corpus cannot be read or is
    too short; the function raises ValueError for ids beyond the vocabulary."""
    prefix = str(corpus_files(str(workload.corpus))[0]).removesuffix(".bin")
    if not Path(prefix).name:
        message = f"expected the prefix of PREFIX.bin and PREFIX.idx, got {workload.corpus!r}"
        raise ValueError(f"{message}; leave --data out for tokens drawn by --seed")
    tokens = _open_tokens(prefix)
    num_starts = len(tokens) - workload.seq_len
    if num_starts < 1:
        message = f"expected at least one sample of {workload.seq_len + 1} tokens, got {len(tokens)} tokens"
        raise ValueError(f"{prefix}.bin: {message}; try a smaller --seq")

    def sample(index: int) -> np.ndarray:
        start = int(_uniform(workload.seed, index, 1)[0] * num_starts)
        window = np.asarray(tokens[start : start + workload.seq_len + 1], dtype=np.int64)
        beyond = window[(window < 0) | (window >= workload.vocab_size)]
        if beyond.size:
            message = f"expected tokens from 0 to {workload.vocab_size - 1}, as --vocab says, got {beyond[0]}"
            raise ValueError(f"{prefix}.bin: {message}; try a larger --vocab")
        return window

    return sample


def _open_tokens(prefix: str) -> np.ndarray:
    """Return all tokens of the corpus as an array that is mapped from the .bin file, not read. Raises ValueError if the
    files cannot be read or do not fit each other.

    The .idx file holds, in this order: magic, version (u64), dtype code (u8), number of sequences (u64), number of
    documents (u64), number of tokens of each sequence (i32).
    """
    try:
        dtype, num_sequences = _index_head(f"{prefix}.idx")
        tokens = _map_tokens(f"{prefix}.bin", dtype)
        num_tokens = _num_listed(f"{prefix}.idx", num_sequences)
    except OSError as error:
        raise ValueError(
            f"cannot read the corpus {error.filename}: {error.strerror}; try another --data"
        ) from error
    if num_tokens != len(tokens):
        message = f"expected {num_tokens} tokens, as {prefix}.idx says, got {len(tokens)}"
        raise ValueError(f"{prefix}.bin: {message}")
    return tokens


def _index_head(path: str) -> tuple[np.dtype, int]:
    """Return the dtype of the tokens and the number of sequences that an .idx file states."""
    _check_kind(Path(path))
    with open(path, "rb") as index:
        head = index.read(len(INDEX_MAGIC) + 17)
    if len(head) < len(INDEX_MAGIC) + 17 or not head.startswith(INDEX_MAGIC):
        raise ValueError(f"{path}: expected a Megatron index; try --data with the prefix of a .bin/.idx pair")
    version, code, num_sequences = struct.unpack("<QBQ", head[len(INDEX_MAGIC) :])
    if version != 1 or code not in INDEX_DTYPES:
        raise ValueError(
            f"{path}: expected version 1 and integer tokens, got version {version} and dtype {code}"
        )
    return np.dtype(INDEX_DTYPES[code]), num_sequences


def _map_tokens(path: str, dtype: np.dtype) -> np.ndarray:
    _check_kind(Path(path))
    num_bytes = Path(path).stat().st_size
    if not num_bytes:
        raise ValueError(f"{path}: expected tokens, got an empty file")
    if num_bytes % dtype.itemsize:
        raise ValueError(
            f"{path}: expected a multiple of {dtype.itemsize} bytes (one token), got {num_bytes}"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _num_listed(path: str, num_sequences: int) -> int:
    """Return the sum of the lengths of `num_sequences` sequences in an .idx file, or of as many as the file holds."""
    num_stored = (Path(path).stat().st_size - len(INDEX_MAGIC) - 25) // 4
    lengths = np.fromfile(path, "<i4", min(num_sequences, max(0, num_stored)), offset=len(INDEX_MAGIC) + 25)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"{path}: expected lengths of at least 0, got {lengths.min()}; make the index again")
    return int(lengths.sum(dtype=np.int64))


def _check_kind(path: Path) -> None:
    """Raise ValueError unless the file is a regular one: a pipe would be waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: expected a regular file, got another kind; try another --data")


def _uniform(seed: int, index: int, num_numbers: int) -> np.ndarray:
    """Return `num_numbers` uniform numbers in [0, 1), made from raw words of the counter-based Philox generator: no
    release of numpy changes these words."""
    numbers = np.random.Philox(key=seed, counter=[0, 0, 0, index]).random_raw(num_numbers)
    return (numbers >> np.uint64(11)) * 2.0**-53
