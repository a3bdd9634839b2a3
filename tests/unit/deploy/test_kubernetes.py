"""The Kubernetes manifests: valid by the schemas of the API server and of the Prometheus operator, and well behaved."""

from __future__ import annotations

from typing import Any

import pytest

from stagecached.config import Settings
from tests.unit.deploy.files import METRICS_PORT, SOCKET, UID, manifests, size_of

VERSIONS = ("1.29", "1.33")
"""Oldest with sidecars on by default, and a current one."""
OWN_IMAGE = "stagecache:0.1.0"


def pods(folder: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(file name, pod spec) of everything that runs pods."""
    return [
        (name, found["spec"]["template"]["spec"])
        for name, found in manifests(folder)
        if found["kind"] in ("DaemonSet", "Deployment")
    ]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [*pod.get("initContainers", ()), *pod["containers"]]
    return found


def daemon_of(pod: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in containers(pod) if one["name"] == "stagecached"), None)


def daemons() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = [(name, pod, daemon) for name, pod in pods() if (daemon := daemon_of(pod)) is not None]
    assert len(found) == 2, "the DaemonSet's and the sidecar's"
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_api_server_would_take_them(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for name, found in manifests():
        if found["kind"] != "PodMonitor":
            try:
                validator.validate(found, version, strict=True)
            except validator.ValidationError as error:
                pytest.fail(f"{name}: {error}")


def test_operator_would_take_the_pod_monitor() -> None:
    models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    (monitor,) = (found for _, found in manifests("monitoring") if found["kind"] == "PodMonitor")
    models.PodMonitor.model_validate(monitor)
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "soon"
    with pytest.raises(ValueError, match="interval"):
        models.PodMonitor.model_validate(monitor)


def test_pod_monitor_and_policy_find_the_daemons() -> None:
    by_kind = {found["kind"]: found["spec"] for _, found in manifests("monitoring")}
    for name, found in manifests():
        if found["kind"] in ("DaemonSet", "Deployment"):
            labels = found["spec"]["template"]["metadata"]["labels"]
            assert by_kind["PodMonitor"]["selector"]["matchLabels"].items() <= labels.items(), name
    (endpoint,) = by_kind["PodMonitor"]["podMetricsEndpoints"]
    for _, _, daemon in daemons():
        assert {"name": endpoint["port"], "containerPort": METRICS_PORT} in daemon["ports"]
    policy = by_kind["NetworkPolicy"]
    assert policy["egress"] == []
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": endpoint["port"]}]


def test_no_privilege_and_no_host_namespace() -> None:
    for name, pod in pods():
        assert not {"hostIPC", "hostPID", "hostNetwork"} & {key for key, value in pod.items() if value}, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, container["name"]
            assert context["capabilities"]["drop"] == ["ALL"], container["name"]
            assert not context.get("privileged"), container["name"]
            if container["image"] == OWN_IMAGE:
                assert context["readOnlyRootFilesystem"] is True, container["name"]


def test_sidecar_form_shares_nothing_of_the_host() -> None:
    ((_, pod),) = pods("sidecar")
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert all(container["securityContext"].get("runAsUser", UID) != 0 for container in containers(pod))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    daemon = daemon_of(pod)
    assert daemon is not None
    assert daemon["restartPolicy"] == "Always"
    assert size_of(volumes["shm"]["emptyDir"]["sizeLimit"]) > budget_of(daemon)


def test_root_only_where_directories_are_made() -> None:
    ((_, pod), *_) = pods("node")
    root = [one for one in containers(pod) if one["securityContext"].get("runAsUser") == 0]
    assert [one["name"] for one in root] == ["directories"]
    assert root[0]["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]


def test_daemon_and_engines_share_directory_and_memory() -> None:
    directory = SOCKET.rpartition("/")[0]
    sources: dict[str, list[Any]] = {}
    for name, pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers(pod):
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert {directory, "/dev/shm"} <= set(mounts), f"{name}: {container['name']}"
            assert not any(path.endswith(".sock") for path in mounts)
            assert not any("subPath" in mount for mount in container["volumeMounts"])
        sources.setdefault(name.split("/")[1], []).append(
            [volumes[mount].get("hostPath", {}).get("path") for mount in ("run", "shm")]
        )
    assert sources["node"] == [["/run/stagecache", "/dev/shm/stagecache"]] * 2


def budget_of(daemon: dict[str, Any]) -> int:
    (argument,) = (one for one in daemon["args"] if one.startswith("--memory-budget="))
    return size_of(argument.partition("=")[2])


def test_memory_limit_fits_the_budget_and_cores_are_whole() -> None:
    for name, pod, daemon in daemons():
        resources, budget = daemon["resources"], budget_of(daemon)
        assert resources["requests"] == resources["limits"], name
        assert resources["limits"]["cpu"].isdigit(), f"{name}: only whole CPUs are exclusive"
        assert size_of(resources["limits"]["memory"]) >= budget + budget // 256 + (256 << 20), name
        for container in containers(pod):
            assert container["resources"]["requests"] == container["resources"]["limits"], "else the pod is Burstable"


def test_probes_and_time_to_drain() -> None:
    for name, pod, daemon in daemons():
        assert daemon["startupProbe"]["exec"]["command"][:2] == ["stagecache", "ping"], name
        for probe in ("readinessProbe", "livenessProbe"):
            assert daemon[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}, name
        assert pod["terminationGracePeriodSeconds"] > Settings.model_fields["drain_timeout_s"].default + 5
        for container in pod["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), container["name"]


def test_upgrade_of_the_daemon_set_keeps_sessions() -> None:
    ((_, pod), *_) = pods("node")
    daemon = daemon_of(pod)
    assert daemon is not None
    command = daemon["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["stagecache", "drain", "--keep-sessions", "--no-wait"]


def test_engines_may_talk_to_a_daemon_of_another_user() -> None:
    (daemon, engine) = (pod for _, pod in pods("node"))
    container = daemon_of(daemon)
    assert container is not None
    assert f"--group={UID}" in container["args"]
    assert engine["securityContext"]["supplementalGroups"] == [UID]
