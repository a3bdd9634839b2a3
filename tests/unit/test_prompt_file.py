"""The prompt file of ``stagecache hidden-states``."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecache.hidden_states import Prompt, PromptFileError, encode_texts, read_prompts


@pytest.fixture
def write(tmp_path: Path) -> object:
    def write(text: str) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        return path

    return write


def test_lists_texts_and_objects_are_read_and_named_by_line(write) -> None:  # type: ignore[no-untyped-def]
    path = write('[1, 2]\n\n"a text"\n{"id": "x", "tokens": [3]}\n{"text": "more"}\n')
    assert read_prompts(path) == [
        Prompt("000000", (1, 2)),
        Prompt("000002", text="a text"),
        Prompt("x", (3,)),
        Prompt("000004", text="more"),
    ]


@pytest.mark.parametrize(
    "line", ["[]", '""', "[1.5]", "[-1]", "[true]", '{"id": "x"}', "7", "null", "[1", '{"tokens": "x"']
)
def test_a_line_that_is_no_prompt_is_named(write, line: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:2"):
        read_prompts(write(f"[1]\n{line}\n"))


def test_an_id_may_come_once(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PromptFileError, match="used before"):
        read_prompts(write('{"id": "a", "tokens": [1]}\n{"id": "a", "tokens": [2]}\n'))


def test_an_empty_file_is_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PromptFileError, match="no prompts"):
        read_prompts(write("\n"))


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(PromptFileError, match="token ids"):
        encode_texts([Prompt("a", text="hello")], tmp_path)


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    prompts = [Prompt("a", (1, 2))]
    assert encode_texts(prompts, tmp_path) == prompts


def test_texts_are_encoded_by_the_models_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from stagecache.demo.workload import read_text, train_tokenizer, write_tokenizer

    tokenizer = train_tokenizer(read_text(), 512)
    write_tokenizer(tokenizer, tmp_path)
    [prompt] = encode_texts([Prompt("a", text="the tide mill")], tmp_path)
    assert list(prompt.tokens) == tokenizer.encode("the tide mill").ids
