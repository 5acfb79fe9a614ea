"""The manifest of docs/hosts.md: it keeps the schemas of Kubernetes, and what its parts call each other fits together."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from pippy.cli.run import worker as worker_command
from pippy.drivers.engines.joined.address import listening_place, secret_in, split_address

PAGE = (Path(__file__).parents[3] / "docs/hosts.md").read_text()
RECIPE = PAGE[PAGE.index("### Kubernetes") : PAGE.index("### SkyPilot and ssh")]
(MANIFEST,) = re.findall(r"^```yaml\n(.*?)^```$", RECIPE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def service():
    return parts()["Service"]


@pytest.fixture
def script():
    return parts()["Pod"]


@pytest.fixture
def workers():
    return parts()["Deployment"]


def parts():
    return {part["kind"]: part for part in yaml.safe_load_all(MANIFEST)}


def call_in_comment():
    """The arguments of cluster() that the page has beside the script's command."""
    (said,) = re.findall(r"# cluster\((.*)\)$", MANIFEST, re.MULTILINE)
    return eval(f"(lambda n, **options: (n, options))({said})")


def test_each_part_keeps_its_schema():
    validate = pytest.importorskip(
        "kubernetes_validate", reason='kubernetes-validate is not installed: pip install -e ".[dev]"'
    )
    assert list(parts()) == ["Service", "Pod", "Deployment"]
    for part in parts().values():
        validate.validate(part, validate.latest_version(), strict=True)
    wrong = parts()["Deployment"]
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(validate.ValidationError, match="comand"):
        validate.validate(wrong, validate.latest_version(), strict=True)


def test_the_workers_go_where_the_script_listens(service, script, workers):
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    assert worker["command"][:2] == ["pippy", "worker"]
    given = worker_command.make_context("worker", worker["command"][2:]).params
    host, port = split_address(given["join"])
    n, options = call_in_comment()
    assert listening_place(options["join"])[:2] == ("0.0.0.0", port)
    assert service["metadata"]["name"] == host and service["spec"]["clusterIP"] == "None"
    assert [each["port"] for each in service["spec"]["ports"]] == [port]
    assert service["spec"]["selector"].items() <= script["metadata"]["labels"].items()
    template = workers["spec"]["template"]["metadata"]["labels"]
    assert workers["spec"]["selector"]["matchLabels"].items() <= template.items()
    assert not service["spec"]["selector"].items() <= template.items(), "workers would be asked for the script"
    assert workers["spec"]["replicas"] == n + 1, "the page has one spare"
    assert given["within"] == options["start_timeout"]


def test_all_have_the_secret_that_is_made_and_may_read_it(script, workers, tmp_path):
    (made,) = re.findall(r"^    kubectl create secret generic (.*)$", RECIPE, re.MULTILINE)
    name, literal = shlex.split(made)
    key = literal.removeprefix("--from-literal=").partition("=")[0]
    given = workers["spec"]["template"]["spec"]["containers"][0]["command"]
    path = Path(given[given.index("--secret-file") + 1])
    assert path == Path(call_in_comment()[1]["secret_file"])
    for pod in (script["spec"], workers["spec"]["template"]["spec"]):
        (container,), (volume,) = pod["containers"], pod["volumes"]
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"] and path == Path(mount["mountPath"]) / key
        assert volume["secret"]["secretName"] == name
        assert "fsGroup" not in pod.get("securityContext", {})
    kept = tmp_path / "..data" / key  # as the volume of a secret is laid out
    kept.parent.mkdir()
    kept.write_text("ab" * 32)
    kept.chmod(volume["secret"]["defaultMode"])
    (tmp_path / key).symlink_to(kept)
    assert secret_in(tmp_path / key) == b"ab" * 32
