"""Other bytes in a store, to see whether they are what is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unified_cache._native import object_checksums
from unified_cache.storage.page_format import HEADER_BYTES

__all__ = ["change_stored"]


def change_stored(store: Path, *, mend_checksum: bool) -> None:
    """The sign of every stored number changes; with a checksum that fits nobody can tell."""
    files = [file for file in store.rglob("*-*") if file.is_file()]
    assert files
    for file in files:
        data = np.frombuffer(bytearray(file.read_bytes()), np.uint8)
        header, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
        body.view("<f4")[:] *= -1
        if mend_checksum:
            checksum = int(object_checksums(header.tobytes(), 184, [body.tobytes()], [len(body)])[0])
            header[184:192] = np.frombuffer(checksum.to_bytes(8, "little"), np.uint8)
        file.chmod(0o600)
        file.write_bytes(data.tobytes())
