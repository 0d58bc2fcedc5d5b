"""The manifests for Kubernetes, KubeRay and Compose are valid, and agree with the parser and with one another."""

from __future__ import annotations

import importlib
import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from slotwise.cli import build_parser
from slotwise.cli.parser import Parser
from slotwise.cli.serve_command import add_options
from slotwise.core.transfer.kv_transfer_config import SECRET, KVTransferConfig
from slotwise.fleet.replicas import checked

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/slotwise.yaml").read_text()))
OVERLAY = ROOT / "deploy/kubernetes-prefill"
PREFILL = list(yaml.safe_load_all((OVERLAY / "prefill.yaml").read_text()))
RAY = yaml.safe_load((ROOT / "deploy/kubernetes/rayservice.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.scale.yaml").read_text())
MODULES = {"apps/v1": "apps_v1", "v1": "core_v1", "policy/v1": "policy_v1", "networking.k8s.io/v1": "networking_v1"}
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in MANIFESTS}
REPLICA, ROUTER = BY_NAME["Deployment", "slotwise-replica"], BY_NAME["Deployment", "slotwise-router"]


def kind_of(manifest: dict[str, Any]) -> type:
    """Kubernetes' own type of a manifest, generated from its OpenAPI description."""
    return getattr(importlib.import_module(f"lightkube.models.{MODULES[manifest['apiVersion']]}"), manifest["kind"])


def check(value: Any, kind: type) -> None:
    """Fails unless `value` has Kubernetes' type, without a field that it does not have."""
    back = msgspec.to_builtins(msgspec.convert(value, kind))
    assert kept(back, value) == value


def kept(back: Any, value: Any) -> Any:
    """The parts of `back` that `value` has."""
    if isinstance(value, dict) and isinstance(back, dict):
        return {name: kept(back[name], one) for name, one in value.items() if name in back}
    if isinstance(value, list) and isinstance(back, list):
        return [kept(*pair) for pair in zip(back, value, strict=True)]
    return back


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return typing.cast(dict[str, Any], found)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("manifest", [*MANIFESTS, *PREFILL], ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_has_the_type_that_kubernetes_has(manifest: dict[str, Any]) -> None:
    check(manifest, kind_of(manifest))


@pytest.mark.parametrize("broken", [
    {"spec": {"replica": 2}}, {"spec": {"replicas": "two"}}, {"specs": {}},
    {"spec": {"template": {"spec": {"containers": [{"name": "x", "readynessProbe": {}}]}}}}])
def test_a_field_that_kubernetes_does_not_have_is_found(broken: dict[str, Any]) -> None:
    wrong = json.loads(json.dumps(REPLICA))
    for name, value in broken.items():
        wrong[name] = value if name not in wrong else {**wrong[name], **value}
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        check(wrong, kind_of(REPLICA))


@pytest.mark.parametrize("manifest", [REPLICA, ROUTER, PREFILL[0]], ids=["replica", "router", "prefill"])
def test_a_pod_is_probed_drained_and_has_few_rights(manifest: dict[str, Any]) -> None:
    pod, one = manifest["spec"]["template"]["spec"], container(manifest)
    assert one["readinessProbe"]["httpGet"]["path"] == "/health"
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        for way in one.get(probe, {}).values():
            assert not isinstance(way, dict) or way["port"] in ports
    arguments = one["args"]
    timeout = float(arguments[arguments.index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > timeout + 10
    assert one["securityContext"]["capabilities"]["drop"] == ["ALL"] and pod["securityContext"]["runAsNonRoot"]
    mounted = {mount["name"] for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["enableServiceLinks"] is False  # else the service `slotwise` sets SLOTWISE_PORT


def test_selectors_find_the_pods() -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in (REPLICA, ROUTER)]
    for (_, name), manifest in BY_NAME.items():
        spec = manifest["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = selector.get("matchLabels", selector)
        assert sum(wanted.items() <= labels.items() for labels in pods) == 1, name


def test_the_parser_accepts_the_arguments_and_routers_find_the_replicas() -> None:
    build_parser("serve").parse_args(["serve", *container(REPLICA)["args"]])
    assert container(ROUTER)["command"] == ["slotwise", "scale"]
    asked = build_parser("scale").parse_args(["scale", *container(ROUTER)["args"]])
    assert_served(asked.rest)
    service = BY_NAME["Service", "slotwise-replicas"]
    assert service["spec"]["clusterIP"] == "None"
    assert asked.urls == [f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"]


def assert_served(rest: list[str]) -> None:
    parser = Parser(prog="slotwise scale", add_help=False)
    add_options(parser)
    served = parser.parse_args(rest)
    assert served.host == "0.0.0.0" and served.port == 8000


def test_roles_of_kubernetes_fit_each_other() -> None:
    overlay = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    base = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
    assert overlay["resources"] == ["../kubernetes", "prefill.yaml"] and base["resources"] == ["slotwise.yaml"]
    more: dict[str, list[str]] = {}
    secret = [one for one in container(PREFILL[0])["env"] if one["name"] == SECRET]  # all have the same one
    assert len(secret) == 1
    for patch in overlay["patches"]:
        operations = yaml.safe_load(patch["patch"])
        added = {name: f"/spec/template/spec/containers/0/{name}/-" for name in ("args", "env")}
        assert {(one["op"], one["path"]) for one in operations} == {("add", path) for path in added.values()}
        assert ("Deployment", patch["target"]["name"]) in BY_NAME
        more[patch["target"]["name"]] = [one["value"] for one in operations if one["path"] == added["args"]]
        assert [one["value"] for one in operations if one["path"] == added["env"]] == secret
    stateful, service, _ = PREFILL
    name = f"{stateful['metadata']['name']}-0"  # of the first pod
    producer, consumer = (
        build_parser("serve").parse_args(["serve", *arguments]).kv_transfer_config for arguments in (
            [one.replace("$(POD_NAME)", name) for one in container(stateful)["args"]],
            [*container(REPLICA)["args"], *more["slotwise-replica"]]))
    assert producer.is_producer and consumer.is_consumer and consumer.accepts(producer.kv_ip, producer.kv_port)
    assert producer.kv_ip == f"{name}.{service['metadata']['name']}"
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert {port["containerPort"] for port in container(stateful)["ports"]} == {8000, producer.kv_port}
    asked = build_parser("scale").parse_args(["scale", *container(ROUTER)["args"], *more["slotwise-router"]])
    assert asked.urls[1:] == [f"http://{service['metadata']['name']}:8000"]


def test_ray_runs_the_application_of_this_package() -> None:
    config = yaml.safe_load(RAY["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "slotwise.fleet:app"
    from slotwise.fleet.ray_app import RaySettings

    settings = RaySettings.of(application["args"])
    cluster = RAY["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (settings.min_replicas, settings.max_replicas) == (workers["minReplicas"], workers["maxReplicas"])
    assert str(int(settings.num_cpus)) == workers["rayStartParams"]["num-cpus"]
    version = cluster["rayVersion"]
    assert f"rayproject/ray:{version}-" in (ROOT / "deploy/kubernetes/ray.Dockerfile").read_text()
    pods = importlib.import_module("lightkube.models.core_v1").PodTemplateSpec
    for group in (cluster["headGroupSpec"], workers):
        check(group["template"], pods)


def test_every_file_that_compose_mounts_exists() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]


def test_the_router_of_compose_finds_its_replicas() -> None:
    services = COMPOSE["services"]
    asked = build_parser("scale").parse_args(services["router"]["entrypoint"][1:])
    assert_served(asked.rest)
    assert [checked(url) for url in asked.urls] == ["http://replica:8000"] and "replica" in services
    assert services["replica"]["deploy"]["replicas"] == 2
    assert seconds(services["router"]["stop_grace_period"]) > 40
    assert services["router"]["ports"] == ["127.0.0.1:8000:8000"] and services["grafana"]["ports"] == [
        "127.0.0.1:3000:3000"]


def test_roles_of_compose_fit_each_other() -> None:
    services = yaml.safe_load((ROOT / "compose.prefill.yaml").read_text())["services"]
    secrets = [services[name]["environment"][SECRET] for name in ("prefill", "replica", "router")]
    assert len(set(secrets)) == 1 and secrets[0].startswith(f"${{{SECRET}:?")  # Compose starts nothing without it
    extended = services["prefill"]["extends"]
    assert extended["service"] in yaml.safe_load((ROOT / extended["file"]).read_text())["services"]
    config: dict[str, KVTransferConfig] = {}
    for name in ("prefill", "replica"):
        served = build_parser("serve").parse_args(["serve", *services[name]["command"]])
        config[name] = served.kv_transfer_config
    producer, consumer = config["prefill"], config["replica"]
    assert producer.is_producer and producer.kv_ip in services and services["prefill"]["deploy"]["replicas"] == 1
    assert consumer.is_consumer and consumer.accepts(producer.kv_ip, producer.kv_port)
    assert services["prefill"]["networks"]["default"]["aliases"] == ["replica"], "as the router asks for them"


def test_prometheus_finds_replicas_and_router_and_uses_the_key() -> None:
    config = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    replica, router = config["scrape_configs"]
    assert replica["dns_sd_configs"][0]["names"] == ["replica"]
    assert router["static_configs"][0]["targets"] == ["router:8000"]
    for job in (replica, router):
        assert job["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert COMPOSE["services"]["prometheus"]["secrets"] == ["api_key"]
    (kept_by,) = router["metric_relabel_configs"]
    from slotwise.fleet.door import FAMILIES, PREFIX

    names = [PREFIX + name for name in FAMILIES]
    assert all(re.fullmatch(kept_by["regex"], name) for name in names)
    assert not re.fullmatch(kept_by["regex"], "slotwise:num_requests_running")
