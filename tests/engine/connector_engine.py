"""An engine of a stage whose KV goes to and comes from a folder (ExampleConnector): a process that is told what to do.

    python connector_engine.py CHECKPOINT KV_FOLDER    stdin: a JSON line a request; stdout: a JSON line an answer

A line names ``id``, ``tokens``, ``out`` (where its rows go, safetensors), and may name ``salt``, ``lora`` (name and
folder) and ``max_tokens``; the answer says how many tokens the engine took from a cache, how many it computed, and
which error its rows had. With ``reference`` the prompts of ``prompts`` are computed by an engine without any cache,
before the other one is made, those that ``loras`` names with that adapter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scenarios import make_engine, recorded, stop

from stagecache.errors import StageCacheError
from stagecache.shim.assemble import PromptAssembler
from stagecache.shim.sinks import write_hidden_states
from stagecache.shim.vllm import external_id, on_step


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Engine:
    """Runs requests and counts what each took."""

    def __init__(self, checkpoint: Path, kv_folder: Path, **changes: Any) -> None:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(kv_folder)},
        )
        self.llm = make_engine(checkpoint, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True, **changes)
        self.prompts: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.computed: dict[str, int] = {}
        on_step(self._count)
        on_step(PromptAssembler(self._whole, self._failed))

    def _count(self, rows: Any) -> None:
        for req_id in rows.req_ids:
            name = external_id(req_id)
            within = min(rows.num_scheduled[req_id], max(0, rows.prompt_len[req_id] - rows.num_computed[req_id]))
            self.computed[name] = self.computed.get(name, 0) + within

    def _whole(self, prompt: Any) -> None:
        self.prompts[external_id(prompt.req_id)] = prompt

    def _failed(self, req_id: str, error: StageCacheError) -> None:
        self.errors[external_id(req_id)] = f"{type(error).__name__}: {error}"

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """One request to its end; its rows are written."""
        from vllm import SamplingParams

        name = order["id"]
        for earlier in (self.prompts, self.errors, self.computed):
            earlier.pop(name, None)
        params = SamplingParams(
            max_tokens=order.get("max_tokens", 3), temperature=0.0, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": order["tokens"]}
        if order.get("salt"):
            prompt["cache_salt"] = order["salt"]
        engine = self.llm.llm_engine
        engine.add_request(name, prompt, params, lora_request=lora_of(order.get("lora")))
        output = None
        while engine.has_unfinished_requests():
            for found in engine.step():
                output = found if found.finished else output
        engine.step()  # That the request has ended reaches the worker with one more step.
        assert output is not None
        found = self.prompts.get(name)
        if found is not None:
            write_hidden_states(Path(order["out"]), found.hidden, {})
        return {
            "cached": output.num_cached_tokens,
            "computed": self.computed[name],
            "from_cache": None if found is None else found.from_cache,
            "answer": list(output.outputs[0].token_ids),
            "error": self.errors.get(name, ""),
        }


def lora_of(found: tuple[str, str] | None) -> Any:
    """A request for the adapter of that name and folder."""
    from vllm.lora.request import LoRARequest

    return None if found is None else LoRARequest(found[0], 1 + sum(found[1].encode()), found[1])


def write_reference(
    checkpoint: Path, prompts: dict[str, list[int]], loras: dict[str, tuple[str, str]], out: Path, **changes: Any
) -> None:
    """Rows of these prompts by an engine that caches nothing."""
    from scenarios import generate

    llm = make_engine(checkpoint, enable_prefix_caching=False, **changes)
    found = recorded(
        lambda: [generate(llm, {name: tokens}, lora=lora_of(loras.get(name))) for name, tokens in prompts.items()]
    )
    stop(llm)
    for given, prompt in found.items():
        write_hidden_states(out / f"{given}.safetensors", prompt.hidden, {})


def main() -> None:
    checkpoint, kv_folder = Path(sys.argv[1]), Path(sys.argv[2])
    engine: Engine | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if "reference" in order:
            write_reference(checkpoint, order["prompts"], order["loras"], Path(order["reference"]), **order["with"])
            tell({"written": len(order["prompts"])})
        elif "engine" in order:
            engine = Engine(checkpoint, kv_folder, **order["engine"])
            tell({"serves": True})
        else:
            assert engine is not None
            tell(engine.run(order))
    if engine is not None:
        stop(engine.llm)


if __name__ == "__main__":
    main()
