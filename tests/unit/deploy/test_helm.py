"""The Helm chart, rendered by Helm's own library: its flags are the server's, its ports agree, its objects have the
fields of Kubernetes' strict schemas, and bad values are refused."""

import functools
import re

import pytest
import typer
import yaml

from client_connector.serving.settings import ENVIRONMENT, find
from lora_server import __version__
from lora_server.cli import app
from lora_server.config import load
from lora_server.errors import ConfigError
from lora_server.placement import Layout
from lora_server.ports import DataPorts
from lora_server.wire.credentials import TLS_CA, TLS_NAME, TOKEN_FILE
from tests.support.doc_commands import blocks
from tests.support.sources import ROOT

helm = pytest.importorskip("helm_python", reason="helm-python-sdk of .[dev] is not installed")
kubernetes = pytest.importorskip("kubernetes_validate.utils", reason="kubernetes-validate of .[dev] is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="kubernetes-validate of .[dev] is not installed")

CHART = ROOT / "deploy/helm/lora-server"
TRUSTED = {"model": {"preset": "mixtral-8x7b"}, "insecure": True}
SECURE = {
    "model": {"configMap": "mixtral"}, "tls": {"secret": "lora-tls", "name": "lora.example"},
    "joinTokenSecret": "lora-join", "adaptersClaim": "adapters", "dataClaim": "registry",
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tokenSecret": "viewer"},
    "layout": "ep4-pp3", "nodes": 3, "ports": {"control": 7000, "http": 7001, "data": 7100},
    "extraArgs": ["--wire=e4m3", "--coordination=leader", "--preload"], "imagePullSecrets": [{"name": "pull"}],
    "nodeSelector": {"gpu": "yes"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
}  # fmt: skip
STANDBY = {"enabled": True, "registrySecret": "lora-registry"}
BOTH = pytest.mark.parametrize("values", [TRUSTED, SECURE], ids=["trusted", "secure"])
STRICT = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
API = {
    "Service": "core.v1.Service", "PodDisruptionBudget": "policy.v1.PodDisruptionBudget",
    "NetworkPolicy": "networking.v1.NetworkPolicy",
}  # fmt: skip
LWS = {"replicas", "startupPolicy", "networkConfig", "leaderWorkerTemplate", "rolloutStrategy"}  # its v1, as of 0.9
GROUP = {"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy", "volumeClaimTemplates"}


PORT = {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}}
POOL = {  # InferencePool's v1, as its CRD has it
    "type": "object", "additionalProperties": False, "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {"type": "object", "additionalProperties": False, "required": ["matchLabels"],
                     "properties": {"matchLabels": {"type": "object"}}},
        "targetPorts": {"type": "array", "minItems": 1, "items": PORT},
        "endpointPickerRef": {
            "type": "object", "additionalProperties": False, "required": ["name"],
            "properties": {"group": {"type": "string"}, "kind": {"type": "string"}, "name": {"type": "string"},
                           "port": PORT, "failureMode": {"enum": ["FailOpen", "FailClose"]}},
        },
    },
}  # fmt: skip


@functools.cache
def chart():
    return helm.Chart.load(str(CHART))


def documents(values):
    texts = chart().render(values, name="lora", namespace="ml").values()
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def render(values):
    """Objects by kind; the chart has one of each."""
    found = documents(values)
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def group(objects):
    return objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]


def pods(objects):
    """Node 0's, and the other nodes'."""
    return [group(objects)[f"{one}Template"] for one in ("leader", "worker")]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def flags(pod, rank, nodes):
    """Settings by name, as the real command parses them, with the variables that Kubernetes and LWS would fill in."""
    found = container(pod)
    text = "\n".join(found["command"][1:] + found["args"])
    given = {"LWS_GROUP_SIZE": str(nodes), "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "lora-0.lora.ml"}
    given["POD_IP"] = "10.0.0.1"
    assert "POD_IP" in {one["name"] for one in found["env"]}
    serve, *typed = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], text).split("\n")
    assert serve == "serve"
    parsed = typer.main.get_command(app).commands[serve].make_context(serve, typed).params
    return {name: value for name, value in parsed.items() if value is not None and name not in ("config", "help_all")}


@functools.cache
def definitions():
    return kubernetes.schema_contents(STRICT, "1.37.0")["$defs"]


def check_fields(name, value):
    schema = {"$ref": f"#/$defs/io.k8s.api.{name}", "$defs": definitions()}
    jsonschema.Draft202012Validator(schema).validate(value)


@BOTH
def test_the_server_takes_the_command_of_every_node(values):
    objects = render(values)
    nodes = group(objects)["size"]
    for rank, pod in enumerate(pods(objects)):
        config = load(flags(pod, rank, nodes))
        assert (config.nodes, config.node_rank, config.insecure) == (nodes, rank, values is TRUSTED)
        assert config.require_tokens != config.insecure and config.advertise == "10.0.0.1"
    assert str(config.controller).startswith("lora-0.lora.ml:")


@BOTH
def test_ports_agree_between_the_command_the_probes_the_service_and_the_policy(values):
    objects = render(values)
    leader, worker = pods(objects)
    config = load(flags(leader, 0, group(objects)["size"]))
    named = {one["name"]: one["containerPort"] for one in container(leader)["ports"]}
    assert named == {"control": config.listen.port, "http": config.http.port}
    assert container(worker)["ports"] == [{"name": "http", "containerPort": config.http.port}]
    assert [one.port for one in load(flags(worker, 1, 2)).controller.addresses] == [config.listen.port]
    for pod in (leader, worker):
        for probe, path in (("startup", "livez"), ("liveness", "livez"), ("readiness", "readyz")):
            asked = container(pod)[f"{probe}Probe"]["httpGet"]
            assert asked == {"path": f"/{path}", "port": "http", "scheme": "HTTPS" if config.tls_cert else "HTTP"}
    service = {one["name"]: (one["port"], one["targetPort"]) for one in objects["Service"]["spec"]["ports"]}
    assert service == {name: (port, name) for name, port in named.items()}
    rules = [rule["ports"] for rule in objects["NetworkPolicy"]["spec"]["ingress"]]
    opened = [[range(port["port"], port.get("endPort", port["port"]) + 1) for port in ports] for ports in rules]
    layout = Layout.parse(config.layout)
    data = DataPorts(config.data_port_base, layout)
    control, http = (range(port, port + 1) for port in (config.listen.port, config.http.port))
    steps = range(data.data(0).number, data.data(layout.num_shards - 1).number + 1)
    orders = range(data.orders(0).number, data.orders(layout.pp - 1).number + 1)
    assert opened == [[control, orders], [control, steps], [http]]


@BOTH
def test_selectors_select_the_pods_that_they_mean(values):
    objects = render(values)
    leader, worker = (pod["metadata"]["labels"].items() for pod in pods(objects))
    service = objects["Service"]["spec"]["selector"].items()
    assert service <= leader and not service <= worker
    everywhere = [objects["PodDisruptionBudget"]["spec"]["selector"], objects["NetworkPolicy"]["spec"]["podSelector"]]
    assert all(one["matchLabels"].items() <= leader & worker for one in everywhere)
    if "ServiceMonitor" in objects:
        monitor = objects["ServiceMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= objects["Service"]["metadata"]["labels"].items()
        assert objects["Service"]["metadata"]["labels"][monitor["jobLabel"]] == "lora-server", "what alerts ask for"
        assert monitor["endpoints"][0]["scheme"] == "https"


@BOTH
def test_objects_have_fields_that_kubernetes_knows(values):
    objects = render(values)
    assert set(API) < set(objects)
    for kind, name in API.items():
        check_fields(name, objects[kind])
    for pod in pods(objects):
        check_fields("core.v1.PodTemplateSpec", pod)
    spec = objects["LeaderWorkerSet"]["spec"]
    assert set(spec) <= LWS and set(group(objects)) <= GROUP
    assert (spec["startupPolicy"], group(objects)["restartPolicy"]) == ("LeaderCreated", "None")
    with pytest.raises(jsonschema.ValidationError):
        check_fields("core.v1.PodTemplateSpec", {"spec": {"container": []}})


@BOTH
def test_pods_are_not_root_and_write_to_volumes_alone(values):
    for pod in pods(render(values)):
        spec, one = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        assert one["securityContext"]["readOnlyRootFilesystem"]
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["name"]: mount for mount in one["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
        assert {name for name, mount in mounts.items() if not mount.get("readOnly")} == {"data", "tmp"}
        paths = re.findall(r"=(/\S+)", "\n".join(one["args"]))
        assert all(path.startswith(tuple(mount["mountPath"] for mount in one["volumeMounts"])) for path in paths)
        assert not spec["enableServiceLinks"], "variables of Services begin with LORA_SERVER_"


@pytest.mark.parametrize("bad", [
    {"insecure": False}, {"insecure": False, "tls": {"secret": "lora-tls"}},
    {"model": {"preset": ""}}, {"model": {"preset": "mixtral-8x7b", "configMap": "mixtral"}},
    {"layout": "ep2"}, {"nodes": 0}, {"ports": {"control": 70000}}, {"ports": {"data": 40000}},
    {"extraArgs": ["--wire e4m3"]}, {"replicas": 2}, {"adaptersClaim": "no_such_name"},
    {"networkPolicy": {"engines": []}},  # which would let in every pod
    {"standby": STANDBY}, {"standby": {"enabled": True}, "joinTokenSecret": "lora-join"},
], ids=str)  # fmt: skip
def test_bad_values_are_refused(bad):
    with pytest.raises(helm.HelmError):
        chart().render(TRUSTED | bad, name="lora", namespace="ml")


def nested(given):
    """The values of --set flags."""
    values = {}
    for path, value in given:
        *folders, name = path.split(".")
        functools.reduce(lambda one, folder: one.setdefault(folder, {}), folders, values)[name] = yaml.safe_load(value)
    return values


def test_the_install_of_the_documents_renders_and_has_every_secret_that_it_makes():
    """Of deploy/README.md, as written."""
    said = {" ".join(one.split()[:2]): one for block in blocks("deploy/README.md") for one in block.commands}
    given = re.findall(r"--set (\S+?)=(\S+)", said["helm install"])
    objects = render(nested(given))
    config = load(flags(pods(objects)[0], 0, group(objects)["size"]))
    assert config.require_tokens and str(config.join_token_file) == "/join/token" and config.tls_name == "lora.example"
    mounted = {volume.get("secret", {}).get("secretName") for volume in pods(objects)[0]["spec"]["volumes"]}
    text = (ROOT / "deploy/README.md").read_text()
    made = set(re.findall(r"kubectl create secret generic ([\w-]+)", text))
    assert mounted - {None} == made - {"lora-engine", "lora-registry"}
    labels = example("vllm")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    (engines,) = objects["NetworkPolicy"]["spec"]["ingress"][1]["from"]
    assert engines["podSelector"]["matchLabels"].items() <= labels.items()
    assert objects["Service"]["metadata"]["name"] in text


def test_a_standby_is_a_second_controller_that_every_node_knows(monkeypatch):
    monkeypatch.setenv("LORA_SERVER_REGISTRY", "postgresql://lora@postgres/lora")  # of the Secret
    objects = {(one["kind"], one["metadata"]["name"]): one for one in documents(SECURE | {"standby": STANDBY})}
    deployment, service = objects["Deployment", "lora-standby"], objects["Service", "lora-standby"]
    check_fields("apps.v1.Deployment", deployment)
    check_fields("core.v1.Service", service)
    standby = deployment["spec"]["template"]
    leader, worker = pods({"LeaderWorkerSet": objects["LeaderWorkerSet", "lora"]})
    configs = [load(flags(pod, rank, 3)) for rank, pod in ((0, leader), (1, worker), (0, standby))]
    assert [config.standby for config in configs] == [False, False, True]
    assert {str(config.controller) for config in configs} == {"lora-0.lora.ml:7000,lora-standby.ml:7000"}
    told = {(config.nodes, config.layout, str(config.join_token_file)) for config in configs}
    assert told == {(3, "ep4-pp3", "/join/token")}
    for pod, has in ((leader, True), (worker, False), (standby, True)):
        named = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in container(pod)["env"]}
        assert named.get("LORA_SERVER_REGISTRY") == ({"name": "lora-registry", "key": "url"} if has else None)
    labels = [pod["metadata"]["labels"].items() for pod in (leader, worker, standby)]
    assert [service["spec"]["selector"].items() <= one for one in labels] == [False, False, True]
    assert not objects["Service", "lora-client"]["spec"]["selector"].items() <= labels[2]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels[2]
    assert "nvidia.com/gpu" not in str(container(standby)["resources"])


def example(name):
    """Objects of an example, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((ROOT / f"deploy/examples/{name}.yaml").read_text())}


def test_the_engines_of_the_example_are_as_the_connector_and_kubernetes_want_them():
    objects = example("vllm")
    check_fields("apps.v1.Deployment", objects["Deployment"])
    check_fields("core.v1.Service", objects["Service"])
    pod = objects["Deployment"]["spec"]["template"]
    assert objects["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert not pod["spec"]["enableServiceLinks"]
    told = {one["name"]: one["value"] for one in container(pod)["env"]}
    assert find({}, told).address == told["LORA_SERVER_ADDRESS"]
    assert set(told) <= {*ENVIRONMENT.values(), TLS_CA, TLS_NAME, TOKEN_FILE}
    mounts = [one["mountPath"] for one in container(pod)["volumeMounts"]]
    assert all(told[name].startswith(tuple(mounts)) for name in (TLS_CA, TOKEN_FILE))


def test_the_pool_of_the_example_selects_the_engines_at_their_port():
    objects, engines = example("inference-pool"), example("vllm")["Deployment"]["spec"]["template"]
    pool = objects["InferencePool"]["spec"]
    jsonschema.Draft202012Validator(POOL).validate(pool)
    assert pool["selector"]["matchLabels"].items() <= engines["metadata"]["labels"].items()
    ports = [one["containerPort"] for one in container(engines)["ports"]]
    assert [one["number"] for one in pool["targetPorts"]] == ports
    (rule,) = objects["HTTPRoute"]["spec"]["rules"]
    group, _ = objects["InferencePool"]["apiVersion"].split("/")
    target = {"group": group, "kind": "InferencePool", "name": objects["InferencePool"]["metadata"]["name"]}
    assert rule["backendRefs"] == [target]


def test_more_nodes_than_shards_are_refused_by_the_server():
    objects = render(TRUSTED | {"nodes": 5})
    with pytest.raises(ConfigError, match="at most 4"):
        load(flags(pods(objects)[0], 0, 5))


def test_the_chart_is_without_fault_and_of_this_version():
    report = helm.lint(str(CHART), TRUSTED, strict=True)
    assert report["errors"] == [] and {one["error"] for one in report["messages"]} == {"icon is recommended"}
    assert chart().metadata["appVersion"] == __version__
