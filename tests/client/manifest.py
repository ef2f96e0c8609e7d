"""The output of kubectl and helm for deploy/, and its parts."""

import shutil
import subprocess

import pytest
import yaml
from server_process import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/corella"


def program(name):
    missing = shutil.which(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed: cargo xtask set-up does it")


def check(*command, stdin=""):
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kustomized(folder):
    """Returns the documents of a kustomization."""
    return read(check("kubectl", "kustomize", DEPLOY / "kubernetes" / folder))


def rendered(*options, values="", release="corella"):
    """Returns the documents of the chart with a text of values and further options."""
    return read(check("helm", "template", release, CHART, "--values=-", *options, stdin=values))


def read(text):
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents, kind):
    (document,) = [document for document in documents if document["kind"] == kind]
    return document


def pod_templates(documents):
    """Returns the templates of pods by the node's role, or by `server`."""
    templates = [document["spec"]["template"] for document in documents if document["kind"] == "Deployment"]
    assert templates, "no document has pods"
    return {template["metadata"]["labels"].get("corella/role", "server"): template for template in templates}


def container(template):
    (container,) = template["spec"]["containers"]
    return container
