"""The package itself: what it exports, what importing it costs, what its wheel asks for."""

import importlib.metadata
import importlib.resources
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import unified_cache
from unified_cache import PrefixTree, errors, page_hashes

FAKE_DEBUG_BUILD = """
import sys, types, warnings
import unified_cache._native as native
fake = types.ModuleType("unified_cache._native")
fake.__dict__.update(native.__dict__, DEBUG_BUILD={debug})
for name in [name for name in sys.modules if name.split(".")[0] == "unified_cache"]:
    del sys.modules[name]
sys.modules["unified_cache._native"] = fake
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import unified_cache
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_typed() -> None:
    package = importlib.resources.files("unified_cache")
    assert (package / "py.typed").is_file()
    assert (package / "_native.pyi").is_file()


def test_every_exported_name_exists() -> None:
    assert len(set(unified_cache.__all__)) == len(unified_cache.__all__)
    for name in unified_cache.__all__:
        assert hasattr(unified_cache, name)


@pytest.mark.parametrize(
    "name, builtin",
    [
        ("ArgumentError", ValueError),
        ("UnknownNodeError", KeyError),
        ("LockError", RuntimeError),
        ("InvariantError", AssertionError),
        ("PoisonedError", RuntimeError),
    ],
)
def test_errors_are_ours_and_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.UnifiedCacheError)
    assert issubclass(error, builtin)
    assert getattr(unified_cache, name) is error
    assert str(error("node 7 is gone")) == "node 7 is gone"


def test_the_native_module_raises_the_package_s_errors() -> None:
    tree = unified_cache.PrefixTree()
    with pytest.raises(errors.ArgumentError):
        unified_cache.PrefixTree(0)
    with pytest.raises(errors.UnknownNodeError) as caught:
        tree.inc_lock_ref(12345)
    assert "12345" in str(caught.value)
    assert not str(caught.value).startswith(("'", '"'))
    lock = tree.inc_lock_ref(tree.insert([1], [0]).node)
    tree.dec_lock_ref(lock)
    with pytest.raises(errors.LockError):
        tree.dec_lock_ref(lock)


def test_importing_brings_nothing_heavy() -> None:
    heavy = {"torch", "cupy", "vllm", "sglang", "transformers", "asyncio", "multiprocessing", "pytest"}
    loaded = run("import sys, unified_cache; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert not heavy & set(loaded)


def test_a_debug_build_warns_at_import() -> None:
    output = run(FAKE_DEBUG_BUILD.format(debug=True))
    assert output.startswith("RuntimeWarning")
    assert "debug build" in output
    assert run(FAKE_DEBUG_BUILD.format(debug=False)) == ""


def test_what_is_tested_is_a_release_build() -> None:
    assert unified_cache._native.DEBUG_BUILD is False


def test_the_wheel_needs_numpy_and_nothing_else() -> None:
    required = importlib.metadata.requires("unified-cache") or []
    always = [line for line in required if "extra ==" not in line]
    assert [line.split(">")[0].strip() for line in always] == ["numpy"]
    extras = importlib.metadata.metadata("unified-cache").get_all("Provides-Extra")
    assert {"torch", "cuda12", "cuda13", "dev"} <= set(extras or [])


def test_versions_agree() -> None:
    assert unified_cache.__version__ == importlib.metadata.version("unified-cache")


@pytest.fixture
def _patient_threads() -> Iterator[None]:
    """A thread that waits for the interpreter's lock gets it only if the holder lets go by itself.

    (With the usual interval of 5 ms the holder of a longer call is asked to, and lets go on its return.)
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.3)
    yield
    sys.setswitchinterval(usual)


def _counted_meanwhile(call: Callable[[], object]) -> int:
    """How far another thread counts between begin and end of a call."""
    counted, stop = itertools.count(), threading.Event()

    def count() -> None:
        while not stop.is_set():
            next(counted)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = next(counted)
        call()
        return next(counted) - before - 1
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("_patient_threads")
def test_long_calls_let_other_threads_run() -> None:
    tokens = np.arange(1_500_000, dtype=np.uint32)
    pages = np.arange(len(tokens) // 64, dtype=np.uint32)
    tree = PrefixTree(64, events=True)
    assert _counted_meanwhile(lambda: sum(range(1_000_000))) == 0  # what a call that does not looks like
    assert _counted_meanwhile(lambda: page_hashes(tokens, 64)) > 0
    assert _counted_meanwhile(lambda: tree.insert(tokens, pages)) > 0
    assert _counted_meanwhile(tree.check_invariants) > 0
