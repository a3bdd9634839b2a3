"""docs/deploy.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from stagecache.plan import plan_deployment, read_stages
from tests.unit.deploy.files import METRICS_PORT, ROOT

TEXT = (ROOT / "docs/deploy.md").read_text()


def test_example_of_a_deployment_can_be_planned(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "deployment.toml").write_text(example)
    plan = plan_deployment(read_stages(tmp_path / "deployment.toml"))
    assert [(stage.spec.name, stage.spec.sessions) for stage in plan.stages] == [("thinker", 2), ("talker", 2)]


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", TEXT))
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.ya?ml)`", TEXT):
        assert list((ROOT / "deploy").rglob(name)), name


def test_every_check_of_doctor_is_listed() -> None:
    names: set[str] = set()
    for path in (ROOT / "client/stagecache/doctor").glob("*_checks.py"):
        names |= set(re.findall(r'Finding\(\s*"([\w.]+)"', path.read_text()))
    table = TEXT.partition("## What doctor looks at")[2]
    assert names
    for name in names:
        assert name in table or (name.startswith("engine.") and "engine.*" in table), name


def test_one_port_everywhere() -> None:
    assert set(re.findall(r"localhost:(9[34]\d\d)", TEXT)) == {str(METRICS_PORT)}
