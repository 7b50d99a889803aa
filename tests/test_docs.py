"""The pages beside the README name what is there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT
from trainer.config import SHORT_FLAGS, Config

PAGES = [ROOT / "docs" / "from-the-tutorial.md", ROOT / "docs" / "coming-from.md", ROOT / "CONTRIBUTING.md"]
FLAGS = {f"--{field.name}" for field in fields(Config)} | SHORT_FLAGS.keys() | {"--config"}
# Of launchers.
OTHERS = {"--config_file", "--nproc_per_node", "--cpu"}


def ours(page: Path) -> list[str]:
    """What a page says of this trainer: the last column of its tables, and the text."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line.strip("|").split(" | ")[-1] if line.startswith("|") else line for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_they_name(page: Path) -> None:
    links = re.findall(r"\[(`?)([^\]`]+)`?\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert len(links) > 4
    for code, text, target in links:
        file = (page.parent / target).resolve()
        assert file.exists(), target
        name = text.rpartition(".")[2]
        if code and file.suffix == ".py" and not text.endswith(".py"):
            assert re.search(rf"^(def|class) {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE), (text, target)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_flags_are_those_of_the_trainer(page: Path) -> None:
    found = {flag for text in ours(page) for flag in re.findall(r"`(--\w+)", text)}
    assert len(found) > 20
    assert not found - FLAGS - OTHERS


def test_every_flag_that_others_have_too_is_in_a_table() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for flag in (
        "--epochs",
        "--lr",
        "--batch_size",
        "--mixed_precision",
        "--report_to",
        "--resume_from_checkpoint",
        "--sync_bn",
        "--ema_decay",
    ):
        assert flag in text


def test_commits_are_checked_by_what_is_installed() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == ["ruff format", "ruff check", "mypy"]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"ruff format --check .", "ruff check .", "mypy"} <= set(ci), "and by the same in CI"
