"""The paths of the two files of a Megatron corpus, and a hash of a file that reads only some of its bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK_BYTES, NUM_BLOCKS = 4096, 256


def corpus_files(corpus: str) -> tuple[Path, Path]:
    """Return the token and index files of a corpus. `corpus`: their common prefix, or the name of either file."""
    prefix = corpus.removesuffix(".bin").removesuffix(".idx")
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def sampled_hash(path: Path, num_blocks: int = NUM_BLOCKS) -> str:
    """Return a hash of a file's size and of `num_blocks` blocks of BLOCK_BYTES bytes at equal distances; "missing" if
    there is no regular file, because a pipe would be waited for. A file of fewer blocks is hashed whole. The file's
    time stamps are not hashed, so a copy has the same hash, and a change in a hashed block changes the hash even if the
    time stamps stay."""
    digest = hashlib.sha256()
    if not path.is_file():
        return "missing"
    try:
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            digest.update(f"{num_bytes} ".encode())
            for number in range(num_blocks):
                file.seek(max(0, num_bytes - BLOCK_BYTES) * number // (num_blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    except FileNotFoundError:
        return "missing"
    return digest.hexdigest()[:16]
