"""Runs at the start of each process of the SGLang under test: what a GPU would bring is replaced by stubs."""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE"):
    import gpu_stubs

    gpu_stubs.install()
