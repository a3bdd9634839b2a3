"""An engine in processes of its own: ``python -m tests.omni.spawned CHECKPOINT``, told what to do line by line.

    start      make an engine, also after the last one died; answers its worker's process id and session
    run        run a prompt twice, so that the second time hits; answers the hit
    stop       end

Each answer is one JSON line that begins with ``>``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.omni.engines import engine_arguments, tokens


def answer(**values: Any) -> None:
    print(">" + json.dumps(values), flush=True)


def start(checkpoint: Path) -> Any:
    import vllm_omni  # noqa: F401  first: it changes vLLM's request classes, in every process alike
    from vllm import LLM

    llm = LLM(**engine_arguments(checkpoint, "thinker", distributed_executor_backend="uni"))
    run(llm)  # the runner takes its manager up at the first real step
    answer(**llm.collective_rpc("session")[0])
    return llm


def run(llm: Any) -> int:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, temperature=0.0, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": tokens(1, 150)}
    hits = [llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    return hits[-1]


def main() -> None:
    checkpoint = Path(sys.argv[1])
    llm = None
    for line in sys.stdin:
        command = line.strip()
        if command == "start":
            llm = None
            llm = start(checkpoint)
        elif command == "run":
            answer(hit=run(llm))
        elif command == "stop":
            break


if __name__ == "__main__":
    main()
