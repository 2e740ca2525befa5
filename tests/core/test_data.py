"""The batches: the same for every method, learnable by a law that is written down here, or a corpus read rightly."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from harness.core.data import batches, corpus_hash, hash_of_tokens, token_batches
from tests.support.training import tiny, train_resident


def zipf(num_ids: int) -> np.ndarray:
    """The chance of each id where a token is drawn anew."""
    weights = 1 / np.arange(1, num_ids + 1)
    return weights / weights.sum()


def successor(tokens: np.ndarray, num_ids: int) -> np.ndarray:
    return (tokens * 12_289 + 7_919) % num_ids


def bigram_loss(tokens: np.ndarray, num_ids: int) -> float:
    """Mean -log of the true conditional probabilities, nats per token: what no model of these tokens can beat."""
    before, after = tokens[..., :-1], tokens[..., 1:]
    chance = 0.5 * zipf(num_ids)[after] + 0.5 * (after == successor(before, num_ids))
    return float(-np.log(chance).mean())


def bigram_entropy(tokens: np.ndarray, num_ids: int) -> float:
    """Mean entropy of those probabilities, nats per token: half of the chance on the successor, half drawn anew."""
    anew = 0.5 * zipf(num_ids)
    joined = anew + 0.5  # the chance of a token that is the successor
    without_successor = anew * np.log(anew) - (anew * np.log(anew)).sum()
    return float((without_successor - joined * np.log(joined))[successor(tokens[..., :-1], num_ids)].mean())


def write_corpus(folder: Path, tokens: list[int], code: int, form: str) -> str:
    """A Megatron .bin/.idx pair of one document, byte by byte; returns its prefix."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code) + struct.pack("<QQ", 1, 2)
    index += struct.pack("<i", len(tokens)) + struct.pack("<q", 0) + struct.pack("<2q", 0, 1)
    (folder / "text.idx").write_bytes(index)
    (folder / "text.bin").write_bytes(struct.pack(f"<{len(tokens)}{form}", *tokens))
    return str(folder / "text")


def test_sample_does_not_depend_on_the_batch_size() -> None:
    small, large = batches(tiny(batch_size=2), 6), batches(tiny(batch_size=3), 4)
    assert np.array_equal(small.reshape(12, 17), large.reshape(12, 17))


def test_sample_does_not_depend_on_the_number_of_steps() -> None:
    assert np.array_equal(batches(tiny(), 5), batches(tiny(), 9)[:5])


def test_no_two_samples_are_alike() -> None:
    samples = batches(tiny(), 50).reshape(100, 17)
    assert len(np.unique(samples, axis=0)) == 100


def test_seeds_give_different_samples() -> None:
    assert (batches(tiny(seed=1), 5) != batches(tiny(seed=2), 5)).any(axis=-1).all()


@pytest.mark.parametrize(("vocab_size", "num_ids"), [(101, 101), (50_304, 50_257)])
def test_ids_are_below_the_vocabulary_and_never_its_padding(vocab_size: int, num_ids: int) -> None:
    tokens = batches(tiny(vocab_size=vocab_size, seq_len=1024), 20)
    assert tokens.min() >= 0
    assert num_ids - 100 <= tokens.max() < num_ids  # a stream that comes so near would reach the padding, too


def test_targets_are_the_inputs_shifted_by_one() -> None:
    assert all((inputs[:, 1:] == targets[:, :-1]).all() for inputs, targets in token_batches(tiny(), 5))


@pytest.mark.parametrize("vocab_size", [101, 512, 50_257])
def test_tokens_follow_the_law(vocab_size: int) -> None:
    tokens = batches(tiny(vocab_size=vocab_size, seq_len=1024), 20)
    assert bigram_loss(tokens, vocab_size) == pytest.approx(bigram_entropy(tokens, vocab_size), rel=0.01)


@pytest.mark.parametrize("vocab_size", [101, 512, 50_257])
def test_knowing_the_law_saves_two_nats_per_token(vocab_size: int) -> None:
    tokens = batches(tiny(vocab_size=vocab_size, seq_len=1024), 20)
    assert bigram_loss(tokens, vocab_size) < math.log(vocab_size) - 2


def test_training_learns_more_than_a_nat_of_it() -> None:
    workload = tiny(learning_rate=0.3, batch_size=8, seq_len=32)
    losses = train_resident(workload, 100).losses
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_bytes_are_those_of_the_first_release() -> None:
    # Frozen: losses recorded on other bytes cannot be compared.
    digest = "b4c1a6a31b6e4adfd0dd4d2817d74e79380d5342f6de620305ea45fce57960c9"
    assert hash_of_tokens(batches(tiny(), 3)) == digest


def test_hash_is_that_of_little_endian_64_bit_ids() -> None:
    assert hash_of_tokens(np.array([[1, 2]])) == hashlib.sha256(struct.pack("<2q", 1, 2)).hexdigest()


@pytest.mark.parametrize(("code", "form", "first"), [(8, "H", 60_000), (4, "i", 70_000)])
def test_corpus_samples_are_windows_of_it(tmp_path: Path, code: int, form: str, first: int) -> None:
    prefix = write_corpus(tmp_path, list(range(first, first + 300)), code, form)
    samples = batches(tiny(corpus=prefix, vocab_size=100_000), 10)
    windows = np.arange(first, first + 284)[:, None] + np.arange(17)
    assert all(sample.tolist() in windows.tolist() for sample in samples.reshape(20, 17))


def test_corpus_is_sampled_at_every_place(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, list(range(20)), 8, "H")
    assert set(batches(tiny(corpus=prefix), 50)[..., 0].flatten()) == {0, 1, 2, 3}


def test_corpus_of_one_sample_is_that_sample(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, list(range(17)), 8, "H")
    assert np.array_equal(batches(tiny(corpus=prefix, batch_size=1), 1)[0, 0], np.arange(17))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_corpus_may_be_named_by_either_file(tmp_path: Path, suffix: str) -> None:
    prefix = write_corpus(tmp_path, list(range(50)), 8, "H")
    assert np.array_equal(batches(tiny(corpus=prefix + suffix), 3), batches(tiny(corpus=prefix), 3))


def told_of(prefix: str | Path) -> str:
    """The one line that a corpus is refused with."""
    with pytest.raises(ValueError) as error:
        batches(tiny(corpus=str(prefix)), 1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_index_is_told_by_its_path(tmp_path: Path) -> None:
    message = f"cannot read the corpus {tmp_path}/none.idx: No such file or directory; try another --data"
    assert told_of(tmp_path / "none") == message


def test_missing_tokens_are_told_by_their_path(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1], 8, "H")
    (tmp_path / "text.bin").unlink()
    assert (
        told_of(prefix)
        == f"cannot read the corpus {prefix}.bin: No such file or directory; try another --data"
    )


@pytest.mark.parametrize(
    "content", [b"", b"MMIDIDX\x00\x00\x01", b"some other file, long enough to be an index"]
)
def test_what_is_no_index_is_told_so(tmp_path: Path, content: bytes) -> None:
    prefix = write_corpus(tmp_path, [1], 8, "H")
    (tmp_path / "text.idx").write_bytes(content)
    assert (
        told_of(prefix)
        == f"{prefix}.idx: expected a Megatron index; try --data with the prefix of a .bin/.idx pair"
    )


def test_index_of_floats_is_told_by_its_code(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 6, "f")
    assert (
        told_of(prefix) == f"{prefix}.idx: expected version 1 and integer tokens, got version 1 and dtype 6"
    )


def test_empty_corpus_is_told_so(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [], 8, "H")
    assert told_of(prefix) == f"{prefix}.bin: expected tokens, got an empty file"


def test_corpus_below_one_sample_is_told_by_both_lengths(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 16, 8, "H")
    assert told_of(prefix).startswith(
        f"{prefix}.bin: expected at least one sample of 17 tokens, got 16 tokens;"
    )


def test_a_corpus_cut_between_tokens_is_told_by_both_counts(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 8, "H")
    (tmp_path / "text.bin").write_bytes((tmp_path / "text.bin").read_bytes()[:-2])
    assert told_of(prefix) == f"{prefix}.bin: expected 50 tokens, as {prefix}.idx says, got 49"


def test_an_index_of_more_sequences_than_tokens_is_told_by_both_counts(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 8, "H")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 60, 61) + np.full(60, 1, "<i4").tobytes()
    (tmp_path / "text.idx").write_bytes(index)
    assert told_of(prefix) == f"{prefix}.bin: expected 60 tokens, as {prefix}.idx says, got 50"


def test_id_beyond_the_vocabulary_is_told_with_it(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [101] * 50, 8, "H")
    assert told_of(prefix).startswith(
        f"{prefix}.bin: expected tokens from 0 to 100, as --vocab says, got 101;"
    )


def test_last_id_of_the_vocabulary_is_allowed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [100] * 50, 8, "H")
    assert (batches(tiny(corpus=prefix), 1) == 100).all()


def test_negative_id_is_told_by_its_value(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [5, -1] * 25, 4, "i")
    assert "got -1;" in told_of(prefix)


def test_corpus_cut_within_a_token_is_told_by_its_path(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 4, "i")
    (tmp_path / "text.bin").write_bytes(b"\x00" * 199)
    assert f"{prefix}.bin" in told_of(prefix)


def test_an_index_of_negative_lengths_is_refused_although_their_sum_is_right(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 8, "H")
    lengths = np.array([60, -10], "<i4").tobytes()
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + lengths)
    assert told_of(prefix) == f"{prefix}.idx: expected lengths of at least 0, got -10; make the index again"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_pipe_in_place_of_a_corpus_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    prefix = write_corpus(tmp_path, [1] * 50, 8, "H")
    Path(f"{prefix}{suffix}").unlink()
    os.mkfifo(f"{prefix}{suffix}")
    assert (
        told_of(prefix) == f"{prefix}{suffix}: expected a regular file, got another kind; try another --data"
    )
    assert len(corpus_hash(tiny(corpus=prefix), 4)) == 16
