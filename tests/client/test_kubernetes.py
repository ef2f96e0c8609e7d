"""The kustomizations and the chart of deploy/ fit Kubernetes' schemas, the binary and each other.

The tests need kubectl and helm, and are skipped without them.
"""

import contextlib
import copy
import re
import subprocess
import tomllib
import urllib.error
import urllib.request

import pytest
from certificate import Authority
from fleet import THREADS, complete, num_remote_tokens
from manifest import CHART, check, container, kustomized, of_kind, pod_templates, program, rendered
from server_process import ROOT, ServerProcess, free_port

PROMPT = list(range(400, 440))
KEY = "sk-chart-5d41402abc4b2a76"
# Kinds of other projects, whose schemas Kubernetes does not have.
FOREIGN = {"PodMonitor": "monitoring.coreos.com/v1"}

ACCESS = ("--set=apiKeys.secret=keys,tls.secret=certificate,service.type=LoadBalancer",)
INGRESS = (
    "--set=ingress.enabled=true,ingress.host=llm.example.org,ingress.tlsSecret=web,ingress.className=nginx",
)
SHARED = ("--set=persistence.accessModes={ReadWriteMany},persistence.storageClass=nfs,replicas=3",)
SCALED = (
    "--set=autoscaling.enabled=true,podDisruptionBudget.enabled=true,podMonitor.enabled=true",
    "--set=persistence.existingClaim=models,strategy.type=RollingUpdate,priorityClassName=high",
    "--set-json=tolerations=[{\"key\": \"gpu\", \"operator\": \"Exists\"}]",
    "--set-json=nodeSelector={\"disk\": \"nvme\"}",
    "--set-json=image.pullSecrets=[{\"name\": \"registry\"}]",
    "--set-json=extraVolumes=[{\"name\": \"models\", \"hostPath\": {\"path\": \"/models\"}}]",
    "--set-json=extraVolumeMounts=[{\"name\": \"models\", \"mountPath\": \"/models\", \"readOnly\": true}]",
    "--set-json=extraEnv=[{\"name\": \"RUST_LOG\", \"value\": \"debug\"}]",
    "--set-json=podLabels={\"team\": \"search\"}",
    "--set-json=podAnnotations={\"example.org/owner\": \"search\"}",
    "--set-json=topologySpreadConstraints=[{\"maxSkew\": 1, \"topologyKey\": \"kubernetes.io/hostname\", "
    '"whenUnsatisfiable": "ScheduleAnyway"}]',
)
ROLES = ("--set=mode=disaggregated",)
FLEET = (*ROLES, "--set=prefill.replicas=16,decode.replicas=2,decode.extraArgs={--kv-spill-memory=64M}")

BOOK = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/src/deployment.md").read_text(), re.DOTALL)[1]

SETS = {
    "kustomize server": lambda: kustomized("server"),
    "kustomize roles": lambda: kustomized("disaggregated"),
    "helm server": lambda: rendered(),
    "helm roles": lambda: rendered(*FLEET),
    "helm access": lambda: rendered(*ACCESS, *INGRESS, release="a"),
    "helm roles access": lambda: rendered(*ROLES, *ACCESS, *INGRESS),
    "helm shared": lambda: rendered(*SHARED),
    "helm scaled": lambda: rendered(*SCALED),
    "helm roles scaled": lambda: rendered(*ROLES, *SCALED),
    "helm ephemeral": lambda: rendered("--set=persistence.enabled=false,service.port=8080"),
    "helm book": lambda: rendered(values=BOOK),
}

pytestmark = [pytest.mark.night, program("kubectl"), program("helm")]


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_the_manifests(name):
    # Only tests that run should wait for this import.
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    documents = SETS[name]()
    for document in documents:
        kind = document["kind"]
        if kind in FOREIGN:
            assert document["apiVersion"] == FOREIGN[kind]
        else:
            kubernetes_validate.validate(document, version, strict=True)
    templates = pod_templates(documents)
    assert templates.keys() == ({"prefill", "decode"} if "roles" in name else {"server"})


def services(documents):
    """Returns the service of clients, and the headless one of decode nodes or `None`."""
    found = [document for document in documents if document["kind"] == "Service"]
    (front,) = [service for service in found if service["spec"].get("clusterIP") != "None"]
    return front, next((service for service in found if service is not front), None)


@pytest.mark.parametrize("name", SETS)
def test_names_lead_to_what_there_is(name):
    documents = SETS[name]()
    names = {}
    for document in documents:
        names.setdefault(document["kind"], set()).add(document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= 63
    templates = pod_templates(documents)
    for template in templates.values():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = [mount["name"] for mount in container(template)["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes)
        assert volumes["config"]["configMap"]["name"] in names["ConfigMap"]
        claim = volumes["cache"].get("persistentVolumeClaim", {}).get("claimName", "models")
        assert claim == "models" or claim in names["PersistentVolumeClaim"]
    labels = {role: template["metadata"]["labels"] for role, template in templates.items()}

    def selected(selector):
        return {role for role, of_pod in labels.items() if selector.items() <= of_pod.items()}

    front = {"server", "prefill"} & labels.keys()
    service, registry = services(documents)
    assert selected(service["spec"]["selector"]) == front
    if registry:
        assert selected(registry["spec"]["selector"]) == {"decode"}
        (port,) = registry["spec"]["ports"]
        word = f"--registry=dns:{registry['metadata']['name']}:{port['port']}"
        assert word in container(templates["prefill"])["args"]
        listening = {port["name"]: port["containerPort"] for port in container(templates["decode"])["ports"]}
        assert listening[port["targetPort"]] == port["port"]
    deployments = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Deployment"}
    found = {}
    for document in documents:
        spec = document.get("spec", {})
        kind = document["kind"]
        if "matchLabels" in spec.get("selector", {}):
            found.setdefault(kind, []).append(selected(spec["selector"]["matchLabels"]))
        if kind == "Ingress":
            backend = spec["rules"][0]["http"]["paths"][0]["backend"]["service"]
            assert backend["name"] == service["metadata"]["name"]
            assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
        if kind == "HorizontalPodAutoscaler":
            scaled = deployments.pop(spec["scaleTargetRef"]["name"])
            assert spec["scaleTargetRef"]["apiVersion"] == scaled["apiVersion"]
            assert "replicas" not in scaled["spec"], "an upgrade would undo what the autoscaler did"
    each = [{role} for role in sorted(labels)]
    assert found.pop("PodMonitor", [labels.keys()]) == [labels.keys()]
    assert all(sorted(roles, key=sorted) == each for roles in found.values()), found
    assert "scaled" not in name or not deployments, "each role is scaled"


@pytest.mark.parametrize("name", SETS)
def test_a_pod_has_time_to_drain_and_right_probes(name):
    for template in pod_templates(SETS[name]()).values():
        checked = container(template)
        (_, pause_s) = checked["lifecycle"]["preStop"]["exec"]["command"]
        (timeout,) = (word for word in checked["args"] if word.startswith("--drain-timeout="))
        drain_s = int(timeout.partition("=")[2])
        assert template["spec"]["terminationGracePeriodSeconds"] > int(pause_s) + drain_s
        ports = {port["name"] for port in checked["ports"]}
        has_tls = any(word.startswith("--tls-cert") for word in checked["args"])
        for probe, path in (("startup", "/ready"), ("readiness", "/ready"), ("liveness", "/health")):
            asked = checked[f"{probe}Probe"]["httpGet"]
            assert asked["path"] == path and asked["port"] in ports
            assert asked.get("scheme", "HTTP") == ("HTTPS" if has_tls else "HTTP")


@pytest.mark.parametrize(("mode", "release"), [("server", "corella"), ("disaggregated", "corella-fleet")])
def test_the_chart_starts_what_the_kustomization_does(mode, release):
    """Compares everything but labels, images, digests in names, and annotations that only the chart has."""
    of_kustomization = kustomized(mode)
    of_chart = rendered(f"--set=mode={mode},secret=corella", release=release)
    templates = pod_templates(of_chart)
    for role, expected in pod_templates(of_kustomization).items():
        expected, template = copy.deepcopy(expected), copy.deepcopy(templates[role])
        for one in (expected, template):
            container(one).pop("image")
            container(one).pop("imagePullPolicy", None)
            for volume in one["spec"]["volumes"]:
                if "configMap" in volume:
                    # Kustomize appends a digest.
                    volume["configMap"]["name"] = re.sub(r"-\w{10}$", "", volume["configMap"]["name"])
        assert template["spec"] == expected["spec"]
        assert expected["metadata"]["annotations"].items() <= template["metadata"]["annotations"].items()

    def rest(documents):
        """Returns the relevant parts besides the templates of pods."""
        for document in documents:
            spec = copy.deepcopy(document.get("spec", {}))
            name = document["metadata"]["name"]
            match document["kind"]:
                case "Deployment":
                    yield name, spec["replicas"], spec["strategy"]
                case "Service":
                    yield name, spec.get("type", "ClusterIP"), spec.get("clusterIP"), spec["ports"]
                case "PersistentVolumeClaim":
                    yield name, spec
                case "ConfigMap":
                    yield "config", tomllib.loads(document["data"]["corella.toml"])
                case kind:
                    raise AssertionError(f"nothing compares a {kind}")

    assert sorted(rest(of_chart), key=repr) == sorted(rest(of_kustomization), key=repr)


def written(documents, folder):
    """Writes the ConfigMap's file, and returns its path."""
    path = folder / "corella.toml"
    path.write_text(of_kind(documents, "ConfigMap")["data"]["corella.toml"])
    return path


def words(template, places):
    """Returns the arguments of a pod's container, with the test's paths instead of a pod's."""
    serve, *arguments = container(template)["args"]
    assert serve == "serve"
    for word in arguments:
        for name, place in places.items():
            word = word.replace(name, str(place))
        yield word


@pytest.mark.parametrize("name", ["kustomize roles", "helm roles"])
def test_prefill_nodes_find_all_decode_nodes_with_the_arguments_of_their_pods(name, tmp_path, monkeypatch):
    """Starts containers with the manifest's arguments in one network: two prefill nodes, three decode nodes."""
    documents = SETS[name]()
    templates = pod_templates(documents)
    for template in templates.values():
        assert "CORELLA_API_KEY" in {variable["name"] for variable in container(template)["env"]}
    # This is the key of the test's clients.
    monkeypatch.setenv("CORELLA_API_KEY", "unused")
    common = {"/etc/corella/corella.toml": written(documents, tmp_path), "$(POD_IP)": "127.0.0.1"}
    decode_ports = [free_port() for _ in range(3)]
    _, registry = services(documents)
    # The addresses that the headless service's name has in a cluster.
    addresses = ",".join(f"127.0.0.1:{port}" for port in decode_ports)
    peers = {f"dns:{registry['metadata']['name']}:9000": f"static:{addresses}"}

    def start(role, port, places):
        arguments = words(templates[role], {**common, **places, "0.0.0.0:9000": f"0.0.0.0:{port}"})
        return nodes.enter_context(ServerProcess(*arguments, *THREADS))

    with contextlib.ExitStack() as nodes:
        for port in decode_ports:
            start("decode", port, {})
        for prefill in [start("prefill", free_port(), peers) for _ in range(2)]:
            prefill.wait_until(
                lambda prefill=prefill: prefill.metric("corella_decode_nodes", standing="healthy") == 3,
                "a prefill node finds all decode nodes",
            )
            assert prefill.status_of("/v1/models") == 401
            prefill.wait_until(
                lambda prefill=prefill: complete(prefill, PROMPT, max_tokens=8)
                and num_remote_tokens(prefill) > 0,
                "a decode node decodes",
            )


@pytest.mark.parametrize("name", ["kustomize server", "helm server"])
def test_a_server_starts_with_its_arguments_and_configuration(name, tmp_path):
    documents = SETS[name]()
    places = {"/etc/corella/corella.toml": written(documents, tmp_path)}
    arguments = words(pod_templates(documents)["server"], places)
    with ServerProcess(*arguments, "--device", "mock") as server:
        assert server.status_of("/ready") == 200


def test_the_binary_takes_the_options_in_the_book(tmp_path):
    # The built-in model has a shorter context than the one in the book.
    documents = rendered("--set=model=,config.max-model-len=1024", values=BOOK)
    path = written(documents, tmp_path)
    with ServerProcess("--config", path, "--device", "mock") as server:
        assert server.status_of("/ready") == 200


def test_a_server_has_the_keys_and_the_certificate_of_its_secrets(tmp_path):
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nkey = "{KEY}"\n')
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    certificate.rename(tmp_path / "tls.crt")
    key.rename(tmp_path / "tls.key")
    documents = rendered(*ACCESS)
    template = pod_templates(documents)["server"]
    volumes = {volume["name"]: volume.get("secret") for volume in template["spec"]["volumes"]}
    assert volumes["keys"] == {"secretName": "keys"} and volumes["tls"] == {"secretName": "certificate"}
    written(documents, tmp_path)
    folders = {mount["mountPath"]: tmp_path for mount in container(template)["volumeMounts"]}
    # Longer paths come first, because some paths are the beginning of others.
    places = dict(sorted(folders.items(), reverse=True))
    arguments = words(template, places)
    with ServerProcess(*arguments, "--device", "mock", authority=authority.certificate) as server:
        request = urllib.request.Request(f"{server.base_url}/v1/models")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, context=server.context)
        request.add_header("authorization", f"Bearer {KEY}")
        assert urllib.request.urlopen(request, context=server.context).status == 200


def test_the_binary_reads_the_values_of_options(tmp_path):
    """Numbers are hard: Helm reads 4096 as a floating-point number, and --set 0.5 as a text."""
    documents = rendered(
        "--set=model=Qwen/Qwen3-0.6B,config.chat.temperature=0.5,config.kv-cache-memory=64M",
        "--set=config.serve.served-model-name={small,large},config.serve.allow-unknown-fields=true",
        "--set-json=config.max-model-len=1024,config.serve.max-stored-response-bytes=10000000",
        '--set-json=config.chat.system="a <b> \\"c\\" \\u00e9\\n"',
        release="a",
    )
    path = written(documents, tmp_path)
    assert tomllib.loads(path.read_text()) == {
        "model": "Qwen/Qwen3-0.6B",
        "kv-cache-memory": "64M",
        "max-model-len": 1024,
        "chat": {"temperature": "0.5", "system": 'a <b> "c" é\n'},
        "serve": {
            "host": "0.0.0.0",
            "served-model-name": ["small", "large"],
            "allow-unknown-fields": True,
            "max-stored-response-bytes": 10000000,
        },
    }
    path.write_text(path.read_text().replace('model = "Qwen/Qwen3-0.6B"\n', ""))
    with ServerProcess("--config", path, *THREADS) as server:
        assert [model.id for model in server.client.models.list()] == ["small", "large"]
        assert server.client.models.list().data[0].model_extra["max_model_len"] == 1024


def test_a_change_of_the_configuration_starts_pods_again():
    def annotations(*options):
        return pod_templates(rendered(*options))["server"]["metadata"]["annotations"]

    assert annotations("--set=model=a") == annotations("--set=model=a")
    assert annotations("--set=model=a") != annotations("--set=model=b")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("replcas=3", "'replcas'"),
        ("image.tga=1", "at '/image': additional properties 'tga'"),
        ("mode=pair", "at '/mode': value must be one of 'server', 'disaggregated'"),
        ("mode=disaggregated,replicas=2", "prefill.replicas"),
        ("decode.replica=2", "at '/decode': additional properties 'replica'"),
        ("prefill.resources.limits.memory=8GB", "at '/prefill/resources/limits/memory'"),
        ("tls.secret=Upper", "at '/tls/secret'"),
        ("resources.limit.cpu=4", "at '/resources': additional properties 'limit'"),
        ("resources.limits.memory=8GB", "at '/resources/limits/memory'"),
        ("probes.startup.period=2", "at '/probes/startup': additional properties 'period'"),
        ("drain.preStopSeconds=5s", "at '/drain/preStopSeconds': got string, want integer"),
        ("service.port=70000", "at '/service/port'"),
        ("config.Max_Len=3", "at '/config': additional properties 'Max_Len'"),
        ("config.serve.limits.a=3", "at '/config/serve/limits': got object"),
        ("config.serve.port=9000", "config names a port"),
        ("config.model=a", "set the value `model`"),
        ("replicas=2", "persistence.accessModes"),
        ("autoscaling.enabled=true", "persistence.accessModes"),
        ("autoscaling.minReplicas=9,autoscaling.enabled=true", "autoscaling.minReplicas"),
        ("ingress.enabled=true,ingress.tlsSecret=a", "ingress.host"),
    ],
)
def test_wrong_values_are_refused_by_name(value, reason):
    command = ["helm", "template", "corella", CHART, f"--set={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and reason in done.stderr, done.stderr


def test_each_role_has_its_own_number_and_resources_and_no_claim():
    documents = rendered(*FLEET, "--set=decode.resources.limits.cpu=2,decode.nodeSelector.gpu=h200")
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    replicas = {document["metadata"]["name"]: document["spec"]["replicas"] for document in deployments}
    assert replicas == {"corella-prefill": 16, "corella-decode": 2}
    templates = pod_templates(documents)
    limits = {role: container(template)["resources"]["limits"]["cpu"] for role, template in templates.items()}
    assert limits == {"prefill": "4", "decode": 2}
    places = {role: template["spec"].get("nodeSelector") for role, template in templates.items()}
    assert places == {"prefill": None, "decode": {"gpu": "h200"}}
    spills = {role: "--kv-spill-memory=64M" in container(template)["args"] for role, template in templates.items()}
    assert spills == {"prefill": False, "decode": True}
    assert "PersistentVolumeClaim" not in {document["kind"] for document in documents}


@pytest.mark.parametrize("options", [(), FLEET, SCALED, (*ACCESS, *INGRESS)])
def test_helm_lints_the_chart(options):
    check("helm", "lint", "--strict", CHART, *options)


def test_the_notes_name_what_there_is():
    for options, scheme in ((ROLES, "http"), (ACCESS, "https")):
        notes = check("helm", "install", "--dry-run=client", "corella", CHART, *options)
        service, _ = services(rendered(*options))
        port = service["spec"]["ports"][0]["port"]
        assert f"service/{service['metadata']['name']} 8000:{port}" in notes
        assert f"{scheme}://127.0.0.1:8000" in notes


def test_the_chart_has_the_version_of_the_binary():
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    labels = of_kind(rendered(), "Service")["metadata"]["labels"]
    assert labels["app.kubernetes.io/version"] == version
    assert labels["helm.sh/chart"] == f"corella-{version}"
    image = container(pod_templates(rendered())["server"])["image"]
    assert image == f"corella:{version}"
