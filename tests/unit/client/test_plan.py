"""``stagecache plan``: sizes, forms of input, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagecache.cli import app
from stagecache.plan import (
    DeploymentPlan,
    PlanError,
    SharedPlan,
    StageSpec,
    parse_bytes,
    parse_key,
    plan_deployment,
    plan_stage,
    read_stages,
    stage_of,
)
from stagecache_wire.geometry import KeySchema
from stagecache_wire.layout import PAGE
from stagecached.config import DEFAULT_BUDGET, parse_size
from stagecached.shared.layout import fitting_blocks

THINKER = "__hidden_states__:bfloat16:2048"


def stage(**fields: object) -> StageSpec:
    return stage_of({"num_blocks": 8, **fields}, "stage")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "140"})
    if isinstance(result.exception, PlanError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_known_pools_have_their_known_sizes() -> None:
    """thinker hidden [15092, 16, 2048] bf16 and codes.audio [16180, 16, 16] int64"""
    hidden = plan_stage(stage(num_blocks=15092, keys=[THINKER])).keys[0].pool_bytes
    codes = plan_stage(stage(num_blocks=16180, keys=["codes.audio:int64:16"])).keys[0].pool_bytes
    assert hidden == 15092 * 16 * 2048 * 2
    assert codes == 16180 * 16 * 16 * 8
    assert "0.92 GiB" in run("--num-blocks", "15092", "--key", THINKER)[1]
    assert "31.6 MiB" in run("--num-blocks", "16180", "--key", "codes.audio:int64:16")[1]


def test_each_rank_of_each_replica_is_a_session() -> None:
    one = plan_stage(stage(keys=[THINKER]))
    many = plan_stage(stage(keys=[THINKER], replicas=3, tensor_parallel=4))
    assert many.session_bytes == one.session_bytes
    assert many.total_bytes == 12 * one.total_bytes


def test_parts_add_up() -> None:
    plan = plan_deployment([stage(name="a", keys=[THINKER, "x:int8"]), stage(name="b", replicas=2)])
    a, b = plan.stages
    assert a.session_bytes == a.locked_bytes + a.slots_bytes + a.arena_bytes + a.control_bytes
    assert plan.total_bytes == a.session_bytes + 2 * b.session_bytes
    assert plan.locked_bytes == a.locked_bytes
    assert plan.sessions == 3
    assert plan.total_bytes < plan.shm_bytes < plan.shm_bytes_default_budget
    assert plan.shm_bytes_default_budget * float(DEFAULT_BUDGET.rstrip("%")) / 100 >= plan.total_bytes
    assert plan.container_bytes > plan.shm_bytes + (80 << 20)


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        (THINKER, KeySchema("__hidden_states__", "bfloat16", (2048,))),
        ("codes.audio:int64:16", KeySchema("codes.audio", "int64", (16,))),
        ("meta.flag:bool", KeySchema("meta.flag", "bool", ())),
        (" a:float32:4x8 ", KeySchema("a", "float32", (4, 8))),
        ("odd:name:int8:2", KeySchema("odd:name", "int8", (2,))),
    ],
)
def test_key_text(text: str, schema: KeySchema) -> None:
    assert parse_key(text) == schema


@pytest.mark.parametrize(
    "text", ["", "a", "a:", "a:float99:4", "a:int8:0", "a:int8:2y3", "a:int8:99999999999", ":int8"]
)
def test_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|none of|below 1|allowed"):
        parse_key(text)


@pytest.mark.engine
def test_key_text_is_that_of_the_shim() -> None:
    """STAGECACHE_KEYS and --key have one form."""
    from stagecache.shim.omni.keys import keys_from_env

    text = "hidden_states.layer_24:bfloat16:2048 codes.audio:int64:16 meta.codec_streaming:int8 x:float32:2x3"
    assert keys_from_env({"STAGECACHE_KEYS": text}) == [parse_key(part) for part in text.split()]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"replicas": 0}, "replicas"),
        ({"keys": ["a:int8", "a:int16"]}, "named twice"),
        ({"keys": ["a:float99"]}, "float99"),
        ({"keys": [{"name": "a"}]}, "is no key"),
        ({"keys": [{"name": "a", "dtype": "int8", "shape": "16"}]}, "no list of sizes"),
        ({"keys": [f"k{n}:int8" for n in range(257)]}, "257 keys"),
        ({"blocks": 5}, "blocks"),
    ],
)
def test_fields_that_do_not_fit_are_named(fields: dict[str, object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        plan_deployment([stage(**fields)])


@pytest.mark.parametrize("size", ["64KiB", "1MiB", "8GiB"])
def test_shared_blocks_count_as_the_daemon_makes_them(size: str) -> None:
    """Never more blocks than the daemon makes, and one less a key at most: rows are rounded to whole pages."""
    one = stage(keys=["a:float32:4", "b:int8"])
    alone = plan_deployment([one])
    shared = plan_deployment([one], SharedPlan(parse_bytes(size), 2))
    total = shared.shared.total_bytes
    assert total == parse_size(size)
    assert shared.shm_bytes == alone.shm_bytes + total
    assert shared.locked_bytes == alone.locked_bytes + total
    assert shared.container_bytes >= alone.container_bytes + total
    assert shared.total_bytes == alone.total_bytes, "the budget of sessions is another one"
    made = fitting_blocks(total // 2, 16, tuple(one.keys))
    block_bytes = 16 * 17 + 64
    assert made - 1 - 3 * PAGE // block_bytes <= shared.shared.blocks(shared.stages[0]) <= made
    code, printed = run("--num-blocks", "8", "--key", "a:float32:4", "--shared-bytes", size)
    assert code == 0
    assert "shared blocks" in printed
    assert "--shared-bytes" not in run("--num-blocks", "8", "--key", "a:float32:4")[1]


@pytest.mark.parametrize(("size", "match"), [("some", "no size"), ("20%", "no size"), ("8KiB", "no room for a block")])
def test_shared_bytes_that_cannot_be_are_refused(size: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        plan_deployment([stage(keys=[THINKER])], SharedPlan(parse_bytes(size)))


def test_no_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="no stage"):
        plan_deployment([])


TOML = """
[[stages]]
name = "thinker"
num_blocks = 15092
tensor_parallel = 2
keys = ["__hidden_states__:bfloat16:2048"]

[[stages]]
name = "talker"
num_blocks = 16180
replicas = 2
keys = [{ name = "codes.audio", dtype = "int64", shape = [16] }]
"""
YAML = """
stages:
  - name: thinker
    num_blocks: 15092
    tensor_parallel: 2
    keys: ["__hidden_states__:bfloat16:2048"]
  - name: talker
    num_blocks: 16180
    replicas: 2
    keys:
      - {name: codes.audio, dtype: int64, shape: [16]}
"""


def test_forms_of_a_file_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    plans: list[DeploymentPlan] = []
    for name, text in (("d.toml", TOML), ("d.yaml", YAML)):
        (tmp_path / name).write_text(text)
        plans.append(plan_deployment(read_stages(tmp_path / name)))
    assert plans[0] == plans[1]
    assert [planned.spec.sessions for planned in plans[0].stages] == [2, 2]
    status, text = run(str(tmp_path / "d.toml"), "--json")
    assert status == 0
    assert json.loads(text) == plans[0].as_dict()


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("d.toml", "stages = 4", "no list of stages"),
        ("d.toml", "stages = [", r"d\.toml"),
        ("d.json", "[]", "no list of stages"),
        ("d.json", '{"stages": [{"name": "x", "num_blocks": 4, "key": []}]}', "stage x: key"),
        ("d.yaml", "stages: [", r"d\.yaml"),
        ("d.txt", "", "no .toml"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, match: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=match):
        read_stages(tmp_path / name)


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"stages": "\xe9"}', "not UTF-8"),
        (b"\0", "d\\."),
        (b"[" * 100_000, "nested|d\\."),
        (b"a: " + b"{" * 3000, "d\\."),
    ],
    ids=["latin-1", "NUL", "deep", "deep mapping"],
)
def test_files_of_other_bytes_are_refused_with_a_reason(
    tmp_path: Path, suffix: str, content: bytes, match: str
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / f"d.{suffix}"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=match):
        read_stages(file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_stages(tmp_path / "d.toml")


def test_command_wants_one_source() -> None:
    assert run()[0] == 2
    assert run("x.toml", "--num-blocks", "4")[0] == 2


def test_command_says_what_to_set() -> None:
    status, text = run("--num-blocks", "15092", "--key", THINKER, "--replicas", "2", "--tp", "2", "--stage", "thinker")
    assert status == 0
    plan = plan_deployment([stage(num_blocks=15092, keys=[THINKER], replicas=2, tensor_parallel=2)])
    assert f"--memory-budget {-(-plan.total_bytes // (1 << 20))}M" in text
    for word in ("stage thinker", "2 replicas x 2 ranks", "these 4 sessions", "/dev/shm", "LimitMEMLOCK"):
        assert word in text
