"""The hand-written stub says what the native module is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unified_cache

pytestmark = pytest.mark.parallel

# The stub takes names from the package, and so from what that imports: half a minute to read, which
# `make lint` does. What the native module has is found without it.
CONFIG = """
[mypy]
mypy_path = python
cache_dir = /dev/null
follow_imports = silent
[mypy-numpy.*,torch.*,transformers.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_stubs_agree_with_the_module(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "unified_cache._native", "--mypy-config-file", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_documents_every_name() -> None:
    stub = Path(unified_cache.__file__).with_name("_native.pyi")
    undocumented = []
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            parts = [node, *(n for n in node.body if isinstance(n, ast.FunctionDef))]
            for part in parts:
                dunder = part.name.startswith("__") and part.name != "__new__"
                if not dunder and ast.get_docstring(part) is None:
                    undocumented.append(f"{node.name}.{part.name}" if part is not node else node.name)
    assert undocumented == []
