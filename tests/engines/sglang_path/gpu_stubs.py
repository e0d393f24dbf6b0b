"""Stubs for packages that SGLang imports and that need a GPU, or a build for this CPU that nobody publishes.

Only SGLang itself gets to see them: when torch or transformers ask whether a package is there, it is not.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = {
    *("datasets", "decord", "modelscope", "outlines", "sgl_kernel", "soundfile", "timm", "torchaudio"),
    *("torchcodec", "torchvision", "triton", "xgrammar"),
}


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _any_class(name)


def _any_class(name: str) -> Any:
    members = {
        "__init__": lambda self, *args, **options: None,
        "__call__": lambda self, *args, **options: self,
        "__class_getitem__": classmethod(lambda cls, item: cls),
    }
    return _AnyClass(name, (), members)


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = _any_class(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if package not in NAMES or (name == package and not _asked_by_sglang()):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_sglang() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "importlib" not in file and not file.startswith("<frozen"):
            return "/sglang/" in file
        frame = frame.f_back
    return False


def install() -> None:
    """Last in line, so that real packages win."""
    # Its answers to "is it there?" are remembered, so it asks before there is a stub.
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.utils import import_utils

    for name in dir(import_utils):
        if name.startswith("is_") and name.endswith("_available"):
            with contextlib.suppress(Exception):
                getattr(import_utils, name)()
    sys.meta_path.append(_Finder())
