"""The package itself: what it exports, what importing it costs, what its wheel asks for."""

import importlib.metadata
import importlib.resources
import subprocess
import sys

import pytest

import unified_cache
from unified_cache import errors

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
