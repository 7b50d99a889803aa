"""The upload of a trained model, by the real client, to a Hub on this machine; and the model card."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load

from tests.helpers import ROOT
from tests.hub import TOKEN, Hub
from tests.launching import ACCELERATE, CONFIGS, MAIN, Launch, launch
from tests.photos import photo, write_photos
from trainer import Classifier
from trainer.main import main

FLAGS = ("--data_dir", "photos", "--image_size", "8", "--epochs", "2", "--batch_size", "4", "--push_to_hub", "me/colours")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path)
    yield hub
    hub.shutdown()
    hub.server_close()


def variables(hub: Hub, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, **more}


def pushed(folder: Path, hub: Hub, *command: str | Path) -> Launch:
    write_photos(folder / "photos", train=4, val=2)
    return launch(folder, *command, MAIN, *FLAGS, variables=variables(hub))


def test_a_training_is_pushed(tmp_path: Path, hub: Hub) -> None:
    """From two processes, by one; what lies there is the run's model, and loads from there."""
    done = pushed(tmp_path, hub, *ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
    assert (done.code, done.errors) == (0, "")
    assert done.lines[-1] == f"pushed to {hub.url}/me/colours"
    assert list(hub.models) == ["me/colours"]
    files = hub.models["me/colours"]
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    for name, content in files.items():
        assert (tmp_path / "run" / "model" / name).read_bytes() == content

    card = files["README.md"].decode()
    _, head, text = card.split("---\n", 2)
    entry: dict[str, Any] = yaml.safe_load(head)
    results = done.json("results.json")
    assert entry["pipeline_tag"] == "image-classification"
    assert {"image-classification", "accelerate-trainer"} <= set(entry["tags"])
    (result,) = entry["model-index"][0]["results"]
    figures = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert figures["accuracy"] == pytest.approx(results["best_acc1"] / 100, abs=1e-6)
    assert result["dataset"]["name"] == "photos"
    assert result["dataset"]["split"] == "val"
    assert 'Classifier.from_pretrained("me/colours")' in text
    assert f"| {results['best_acc1']:.2f} % |" in text
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert (settings["image_size"], settings["epochs"], settings["data_dir"]) == ("8", 2, "photos")
    assert "output_dir" not in settings
    assert TOKEN not in card

    code = (
        "import torch\nfrom trainer import Classifier\nfrom tests.photos import photo\n"
        "model = Classifier.from_pretrained('me/colours')\n"
        "print(model(model.preprocess(photo('rust', 0))).tolist())"
    )
    environment = {**os.environ, **variables(hub), "HF_HOME": str(tmp_path / "cache")}
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    local = Classifier.from_pretrained("run/model")
    assert torch.equal(torch.tensor(json.loads(loaded.stdout)), local(local.preprocess(photo("rust", 0))))
    assert load(files["model.safetensors"]).keys() == local.module.state_dict().keys()


def test_a_failed_upload_loses_nothing(tmp_path: Path, hub: Hub) -> None:
    """One sentence, with the command that uploads it later; and that command does it."""
    hub.refuses_commits = True
    done = pushed(tmp_path, hub, "python")
    assert done.code == 1
    (sentence,) = done.sentences()
    assert sentence.startswith("error: --push_to_hub me/colours: the upload failed (")
    assert "read-only today" in sentence
    assert sentence.endswith("the run is whole in run: upload the model by `hf upload me/colours run/model`")
    assert not done.frames()
    assert done.json("results.json")["epochs"] == 2
    assert done.json("exit.json")["code"] == 1
    hub.refuses_commits = False
    command = [str(Path(sys.executable).parent / "hf"), *sentence.rpartition("`hf ")[2].rstrip("`").split()]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables(hub)}, capture_output=True, check=True)
    assert {"README.md", "config.json", "model.safetensors"} <= hub.models["me/colours"].keys()


@pytest.mark.parametrize(
    ("repo", "environment", "sentence"),
    [
        ("a/b/c", {}, "--push_to_hub a/b/c must be NAME or USER/NAME ("),
        ("me/two--dashes", {}, "--push_to_hub me/two--dashes must be NAME or USER/NAME ("),
        (" ", {}, "--push_to_hub must not be empty"),
        ("me/x", {"HF_HUB_OFFLINE": "1"}, "--push_to_hub me/x: HF_HUB_OFFLINE is set"),
        ("me/x", {"HF_TOKEN": ""}, "--push_to_hub me/x needs a token of the Hub: log in by `hf auth login`, or set HF_TOKEN"),
    ],
)
def test_mistakes_are_found_before_the_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repo: str,
    environment: dict[str, str],
    sentence: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", environment.get("HF_HUB_OFFLINE") == "1")
    monkeypatch.setenv("HF_TOKEN", environment.get("HF_TOKEN", TOKEN))
    with pytest.raises(SystemExit) as end:
        main(["--push_to_hub", repo, "--output_dir", "out"])
    out, errors = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert errors.startswith(f"error: {sentence}")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()
