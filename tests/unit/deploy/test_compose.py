"""The compose file: valid, and without the traps that doctor warns of."""

from __future__ import annotations

import pytest

from tests.unit.deploy.files import DEPLOY, METRICS_PORT, SOCKET, UID, compose, parse_yaml, size_of


def test_it_is_a_compose_file() -> None:
    """By the schema of the specification, and by a parser that knows units, ports and durations."""
    compose_spec = pytest.importorskip("compose_spec")
    yaml = pytest.importorskip("yaml")
    found = compose()
    compose_spec.models.ComposeSpecification.model_validate(found)
    assert set(compose_spec.PyCompose.from_yaml(yaml.safe_dump(found)).service_names()) == set(found["services"])
    found["services"]["stagecached"]["memlimit"] = 3
    with pytest.raises(ValueError, match="memlimit"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(found))


def test_daemon_and_worker_share_directory_and_memory() -> None:
    services = compose()["services"]
    for name in ("stagecached", "demo-worker"):
        mounts = dict(volume.split(":")[:2] for volume in services[name]["volumes"])
        assert mounts["run"] == SOCKET.rpartition("/")[0]
        assert mounts["shm"] == "/dev/shm"
        assert not any(target.endswith(".sock") for target in mounts.values())
    assert services["demo-worker"]["environment"]["STAGECACHE_SOCKET"] == SOCKET


def test_limits_fit_the_budget() -> None:
    found = compose()
    daemon = found["services"]["stagecached"]
    budget = size_of(daemon["command"][daemon["command"].index("--memory-budget") + 1])
    options = dict(part.split("=") for part in found["volumes"]["shm"]["driver_opts"]["o"].split(","))
    assert size_of(options["size"]) > budget
    assert int(options["uid"]) == UID
    assert size_of(daemon["mem_limit"]) >= budget + budget // 256 + (256 << 20)
    assert daemon["mem_limit"] == daemon["memswap_limit"]
    assert daemon["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert daemon["ulimits"]["nofile"]["soft"] >= 4096


def test_nothing_runs_with_more_than_it_needs() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not {"privileged", "ipc", "pid", "cap_add", "user"} & set(service), name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name
        image = service["image"]
        assert ":" in image, f"{name} names no release"
        assert not image.endswith(":latest"), name


def test_files_that_are_mounted_exist() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / "compose" / source).is_file(), source


def test_prometheus_scrapes_the_daemons_port() -> None:
    (config,) = parse_yaml((DEPLOY / "compose/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"stagecached:{METRICS_PORT}"]}]
    (sources,) = parse_yaml((DEPLOY / "compose/grafana/datasources.yml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
