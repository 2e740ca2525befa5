"""The two files of a Megatron corpus, and what tells one content of a file from another without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK_BYTES, BLOCKS = 4096, 256


def corpus_files(corpus: str) -> tuple[Path, Path]:
    """Tokens and index of a corpus that is named by its prefix, or by one of the two."""
    prefix = corpus.removesuffix(".bin").removesuffix(".idx")
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def sampled_hash(path: Path) -> str:
    """Of a file's size and of blocks at equal distances, 1 MiB of a large one; all of a smaller one. Its times do not
    count: a copy is the same, and what was rewritten with its old times is another."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size} ".encode())
            for number in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    except FileNotFoundError:
        return "missing"
    return digest.hexdigest()[:16]
