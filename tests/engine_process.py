"""A process of its own that answers one prompt: what it shares with others is the store.

python -m tests.engine_process URL    (the prompt and the length of the answer as JSON on standard input)
"""

from __future__ import annotations

import json
import sys

import torch

from tests.engine_support import Served, counted, hits, tiny_model


def main() -> None:
    torch.set_num_threads(1)
    prompt, length = json.load(sys.stdin)
    served = Served(tiny_model(), 64, storage=sys.argv[1])
    with counted(served.model) as forwards:
        served.engine.add(prompt, length)
        (generation,) = served.run().values()
    served.cache.close()
    answer = {name: getattr(generation, name) for name in ("tokens", "logprobs")}
    print(json.dumps(answer | {"hits": hits(generation), "computed": sum(forwards)}))


if __name__ == "__main__":
    main()
