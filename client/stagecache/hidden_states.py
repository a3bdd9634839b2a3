"""Full-prompt hidden states of a file of prompts, with prefix caching on: what ``stagecache hidden-states`` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecache.errors import StageCacheError
from stagecache.local_engine import running_engine
from stagecache.shim.assemble import PromptRows
from stagecache.shim.sinks import SafetensorsSink
from stagecache.shim.steps import external_id, on_step


class PromptFileError(StageCacheError):
    """A line of the prompt file cannot be used; the text names the line and what it should be."""


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file: an id, and token ids or a text."""

    req_id: str
    tokens: tuple[int, ...] = ()
    text: str | None = None


@dataclass
class Extraction:
    """What came of the prompts. Counts are of rows.

    Attributes:
        written: prompts whose file was written.
        from_cache: rows that the cache gave back.
        computed: rows that the engine computed.
        failed: ids of prompts without a file, with the reason.
    """

    written: int = 0
    from_cache: int = 0
    computed: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file with one JSON value a line: a list of token ids, a text, or an object with ``tokens`` or ``text``
    and, if wanted, ``id``. Without an id a prompt is named by its line number, from 0.

    Raises:
        PromptFileError: the file is no UTF-8, a line is none of these, or an id comes twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path} is not UTF-8 ({error}); write one JSON value a line, in UTF-8") from error
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        prompt = _parse_line(line, f"{path}:{number + 1}", f"{number:06d}")
        if prompt.req_id in seen:
            raise PromptFileError(f"{path}:{number + 1}: the id {prompt.req_id!r} was used before")
        seen.add(prompt.req_id)
        prompts.append(prompt)
    if not prompts:
        raise PromptFileError(f"{path} holds no prompts")
    return prompts


def _parse_line(line: str, where: str, default_id: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: not JSON ({error}); write one JSON value a line") from error
    req_id = default_id
    if isinstance(value, dict):
        req_id = str(value.get("id", default_id))
        if not req_id.isprintable():
            raise PromptFileError(f"{where}: the id {req_id!r} is no name for a file")
        value = value.get("tokens", value.get("text"))
    if isinstance(value, str) and value:
        return Prompt(req_id, text=value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return Prompt(req_id, tokens=tuple(value))
    raise PromptFileError(
        f'{where}: needs token ids ([1, 2, 3]), a text ("..."), or an object with "tokens" or "text", none empty'
    )


def encode_texts(prompts: Sequence[Prompt], model: Path) -> list[Prompt]:
    """The prompts with token ids; texts are encoded by the tokenizer in the model's directory.

    Raises:
        PromptFileError: there are texts, and the model has no tokenizer.
    """
    if all(prompt.text is None for prompt in prompts):
        return list(prompts)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise PromptFileError(f"{model} has no tokenizer that can be read, so prompts must be token ids") from error
    encoded = []
    for prompt in prompts:
        tokens = prompt.tokens if prompt.text is None else tuple(tokenizer.encode(prompt.text))
        encoded.append(Prompt(prompt.req_id, tokens=tokens))
    return encoded


def extract(
    arguments: dict[str, Any],
    prompts: Sequence[Prompt],
    out: Path,
    *,
    on_start: Callable[[], None],
    on_prompt: Callable[[], None],
    on_step_done: Callable[[], None] = lambda: None,
) -> Extraction:
    """Run the prompts and write one safetensors file each. STAGECACHE_SOCKET names the daemon.

    Args:
        arguments: of vLLM's ``LLM``.
        prompts: with token ids.
        out: directory of the files.
        on_start: called when the engine is ready.
        on_prompt: called when a prompt is done, written or failed.
        on_step_done: called between engine steps; what it raises ends the run.
    """
    import vllm.exceptions
    from vllm import SamplingParams

    # vLLM's own class for what a client did wrong is no ValueError in every release.
    refusals = (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))
    result = Extraction()
    sink = _CountingSink(out, result, on_prompt)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
    with running_engine(arguments) as engine:
        on_start()
        unsubscribe = on_step(sink)
        try:
            vocabulary = engine.model_config.get_vocab_size()
            for prompt in prompts:
                try:
                    # Without a tokenizer vLLM does not look, and one such id would end the engine for all prompts.
                    if max(prompt.tokens) >= vocabulary:
                        raise ValueError(f"token id {max(prompt.tokens)} of a vocabulary of {vocabulary}")
                    engine.add_request(prompt.req_id, {"prompt_token_ids": list(prompt.tokens)}, params)
                except refusals as error:  # longer than the model's context, or an id outside its vocabulary
                    result.failed[prompt.req_id] = str(error)
                    on_prompt()
            while engine.has_unfinished_requests():
                engine.step()
                on_step_done()
        finally:
            unsubscribe()
    return result


class _CountingSink(SafetensorsSink):
    def __init__(self, out: Path, result: Extraction, on_prompt: Callable[[], None]) -> None:
        super().__init__(out)
        self._result = result
        self._on_prompt = on_prompt

    def write(self, prompt: PromptRows) -> bool:
        written = super().write(prompt)
        if written:
            self._result.written += 1
            self._result.from_cache += prompt.from_cache
            self._result.computed += int(prompt.hidden.shape[0]) - prompt.from_cache
        else:
            self._result.failed[external_id(prompt.req_id)] = "the file could not be written"
        self._on_prompt()
        return written

    def write_error(self, req_id: str, error: StageCacheError) -> None:
        super().write_error(req_id, error)
        self._result.failed[external_id(req_id)] = str(error)
        self._on_prompt()
