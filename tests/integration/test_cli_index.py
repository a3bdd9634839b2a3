"""``stagecache index`` and ``lookup`` against a real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stagecache.cli import app
from stagecache.cli.shared_blocks import ENDS, NoNamespaceError
from stagecache.errors import UnsupportedHashError
from stagecache.prefix_file import PrefixFileError
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached.index import BlockHasher, ExtraKeys
from tests.integration.helpers import own_daemon
from tests.integration.sharing_worker import BLOCK_SIZE, SharingWorker

TOKENS = list(range(1, 20))
HASHES = BlockHasher(BLOCK_SIZE, "seed").hash_blocks(TOKENS, ExtraKeys(cache_salt="x"))
STORED = 3


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a daemon whose stage ``thinker`` holds the first blocks of a salted prompt."""
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "64KiB", "--shared-namespaces", "2") as daemon:
        worker = SharingWorker(daemon.socket, stage="thinker")
        worker.join()
        raw, block_ids = b"".join(HASHES[:STORED]), list(range(STORED))
        worker.publish(block_ids, raw, worker.save(block_ids, raw))
        yield daemon.socket
        worker.close()


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "250"}).invoke(app, [str(argument) for argument in arguments])


def file(folder: Path, text: object) -> Path:
    path = folder / "prefix"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_index_shows_what_is_shared(socket: Path) -> None:
    shown = run("index", "--socket", socket).output
    for part in ("thinker", "weights 1", "__hidden_states__, wide", "of 64.0 KiB"):
        assert part in shown
    (namespace,) = json.loads(run("index", "--socket", socket, "--json").output)["namespaces"]
    assert namespace["published"] == str(STORED)
    assert int(namespace["num_blocks"]) == int(namespace["free"]) + int(namespace["cached"])


@pytest.mark.parametrize(
    "form",
    [
        TOKENS,
        " ".join(map(str, TOKENS)),
        "\n".join(map(str, TOKENS)),
        {"tokens": TOKENS},
        {"tokens": TOKENS, "salt": "y"},
    ],
)
def test_a_prefix_is_found_by_its_tokens_in_every_form(socket: Path, tmp_path: Path, form: object) -> None:
    path = file(tmp_path, form)
    (answer,) = json.loads(run("lookup", "--socket", socket, "--tokens", path, "--salt", "x", "--json").output)
    assert (answer["hit_tokens"], answer["end"], answer["state"]) == (STORED * BLOCK_SIZE, "NOT_STORED", "MISS")
    assert answer["keys"] == {"__hidden_states__": "MISS", "wide": "MISS"}
    assert answer["hashes"] == [block_hash.hex() for block_hash in HASHES]


def test_where_a_prefix_ends_is_explained(socket: Path, tmp_path: Path) -> None:
    path = file(tmp_path, {"tokens": TOKENS, "salt": "x"})
    shown = run("lookup", "--socket", socket, "--tokens", path).output
    assert "12 of 19 tokens are stored, 3 of 5 blocks" in shown
    assert f"block 3, tokens 12 to 15, hash {HASHES[3].hex()[:16]}" in shown
    assert ENDS[pb.PREFIX_END_NOT_STORED].split(";")[0] in shown
    other = run("lookup", "--socket", socket, "--tokens", path, "--salt", "another").output
    assert "0 of 19 tokens are stored" in other
    part = run("lookup", "--socket", socket, "--tokens", file(tmp_path, TOKENS[:14]), "--salt", "x").output
    assert "block 3, tokens 12 to 13: the tokens that follow do not fill a block" in part


def test_status_and_index_tell_how_much_is_stored_and_whether_it_is_locked(socket: Path) -> None:
    status = " ".join(run("status", "--socket", socket).output.split())
    assert re.search(r"shared blocks .* of 64.0 KiB: 1 namespace\(s\), \d of them locked in memory, 3 of", status)
    locked = [one["locked"] for one in json.loads(run("index", "--json", "--socket", socket).output)["namespaces"]]
    assert locked
    assert f", {sum(locked)} of them locked" in status


def test_a_prefix_is_found_by_the_engines_hashes(socket: Path, tmp_path: Path) -> None:
    path = file(tmp_path, "\n".join(block_hash.hex() for block_hash in HASHES[:STORED]))
    assert "12 of 12 tokens are stored" in run("lookup", "--socket", socket, "--hashes", path).output
    (answer,) = json.loads(run("lookup", "--socket", socket, "--hashes", path, "--json").output)
    assert answer["end"] == "WHOLE"


@pytest.mark.parametrize(
    ("text", "option", "words"),
    [
        ("", "--tokens", "holds no token ids"),
        ("1 two 3", "--tokens", "'two' is no token id"),
        ("[1, -2]", "--tokens", "token 1 is -2"),
        ('[1, "2"]', "--tokens", "token 1 is '2'"),
        ('{"token": [1]}', "--tokens", "field 'token'"),
        ('{"tokens": [1], "images": [{"offset": 1}]}', "--tokens", "image 0 needs"),
        ('{"tokens": [1], "salt": 7}', "--tokens", "salt is 7"),
        ("abc", "--hashes", "hash 0 is 'abc'"),
        ("[]", "--hashes", "holds no hashes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(
    socket: Path, tmp_path: Path, text: str, option: str, words: str
) -> None:
    result = run("lookup", "--socket", socket, option, file(tmp_path, text))
    assert isinstance(result.exception, PrefixFileError)
    assert words in str(result.exception)


def test_a_namespace_that_is_not_there_is_named_with_those_that_are(socket: Path, tmp_path: Path) -> None:
    result = run("lookup", "--socket", socket, "--tokens", file(tmp_path, TOKENS), "--stage", "talker")
    assert isinstance(result.exception, NoNamespaceError)
    assert "stage 'talker'" in str(result.exception)
    assert "of stage thinker" in str(result.exception)
    assert run("lookup", "--socket", socket).exit_code == 2


def test_tokens_of_an_engine_that_hashes_pickles_are_refused_with_the_cure(socket: Path, tmp_path: Path) -> None:
    worker = SharingWorker(socket, stage="pickled")
    try:
        assert worker.join(hash_algorithm="sha256").on
        result = run("lookup", "--socket", socket, "--tokens", file(tmp_path, TOKENS), "--stage", "pickled")
        assert isinstance(result.exception, UnsupportedHashError)
        assert "sha256_cbor" in str(result.exception)
        both = json.loads(run("lookup", "--socket", socket, "--tokens", file(tmp_path, TOKENS), "--json").output)
        assert ["error" in answer for answer in both] == [answer["stage"] == "pickled" for answer in both]
    finally:
        worker.close()


def test_every_end_of_a_prefix_has_an_explanation() -> None:
    assert set(ENDS) == set(pb.PrefixEnd.values()) - {pb.PREFIX_END_UNSPECIFIED}


def test_a_daemon_that_shares_nothing_says_how_it_would(tmp_path: Path) -> None:
    with own_daemon(tmp_path) as daemon:
        assert "--shared-bytes" in run("index", "--socket", daemon.socket).output
        result = run("lookup", "--socket", daemon.socket, "--tokens", file(tmp_path, TOKENS))
        assert isinstance(result.exception, NoNamespaceError)
        assert "--shared-bytes" in str(result.exception)


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    for option, holds in (("--tokens", "token ids"), ("--hashes", "hashes")):
        error = run("lookup", option, file(tmp_path, "[" * 100_000)).exception
        assert isinstance(error, PrefixFileError)
        assert f"too deeply to be {holds}" in str(error)


def test_a_salt_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    error = run("lookup", "--tokens", file(tmp_path, TOKENS), "--salt", "\udcff").exception
    assert isinstance(error, PrefixFileError)
    assert "no UTF-8" in str(error)
