"""What benchmarks must not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parent.parent / "benches"


@pytest.mark.parametrize(
    "bench", [["storage.py", "--only", "nothing"], ["storage_restart.py", "--pages", "256"]]
)
def test_what_else_is_in_a_folder_stays_there(bench: list[str], tmp_path: Path) -> None:
    """A bench of storage once removed the whole folder that it was told to use."""
    (tmp_path / "of somebody").write_text("kept")
    command = [sys.executable, BENCHES / bench[0], *bench[1:], "--folder", tmp_path]
    if "restart" in bench[0]:
        command += ["--rounds", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("of somebody", "kept")]
