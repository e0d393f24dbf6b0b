"""`generate` of transformers alone and with a `PrefixCache`: one document, several questions, in turns.

Times a question over a document that was seen before, to its first token and for each token after it. Prints
medians, in milliseconds; ``--json`` for programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from unified_cache.demo.model import VOCABULARY, ModelSize, make_model
from unified_cache.engines.transformers import PrefixCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=int, default=1500, help="tokens")
    parser.add_argument("--question", type=int, default=30, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    longest = args.document + args.question + args.answer
    model = make_model(ModelSize(args.layers, hidden=512, intermediate=1024), 5, longest, args.device)
    document = torch.randint(0, VOCABULARY, (1, args.document), device=args.device)
    seconds: dict[str, dict[str, list[float]]] = {
        "alone": {"first": [], "next": []},
        "cached": {"first": [], "next": []},
    }
    equal = True
    with PrefixCache(model, page_size=16, num_pages=longest * (args.questions + 2) // 16) as cached:
        cached.generate(document, max_new_tokens=1)
        for _ in range(args.questions):
            question = torch.randint(0, VOCABULARY, (1, args.question), device=args.device)
            ids = torch.cat((document, question), 1)
            answers = []
            for name, generate in (("alone", model.generate), ("cached", cached.generate)):
                first = _seconds(generate, ids, 1)
                whole, answer = _timed(generate, ids, args.answer)
                seconds[name]["first"].append(first)
                seconds[name]["next"].append((whole - first) / (args.answer - 1))
                answers.append(answer)
            equal = equal and torch.equal(*answers)
    result = {
        name: {step: round(1e3 * statistics.median(each), 2) for step, each in steps.items()}
        for name, steps in seconds.items()
    }
    if args.json:
        print(json.dumps({"equal": equal, "ms": result, "device": args.device}))
        return
    print(f"answers {'equal' if equal else 'NOT EQUAL'}; ms, medians of {args.questions}, on {args.device}")
    for name, steps in result.items():
        print(f"{name:>8}: first token {steps['first']:8.2f}   each token after it {steps['next']:7.2f}")


def _timed(generate: Any, ids: torch.Tensor, tokens: int) -> tuple[float, torch.Tensor]:
    begun = time.perf_counter()
    answer: torch.Tensor = generate(ids, max_new_tokens=tokens, do_sample=False)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun, answer


def _seconds(generate: Any, ids: torch.Tensor, tokens: int) -> float:
    # Another question each time, or the second call would hit the first one's.
    ids = torch.cat((ids[:, :-1], torch.randint_like(ids[:, -1:], VOCABULARY)), 1)
    return _timed(generate, ids, tokens)[0]


if __name__ == "__main__":
    main()
