"""answer_in_vllm.py MODEL ANSWER < PROMPTS: vLLM's greedy answers to lists of tokens, as JSON in the end."""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    prompts, answer = json.load(sys.stdin), int(sys.argv[2])
    model = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    print(json.dumps([list(each.outputs[0].token_ids) for each in answers]))


if __name__ == "__main__":
    main()
