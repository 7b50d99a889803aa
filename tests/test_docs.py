"""The pages beside the README name what is there, and the two READMEs say the same."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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


@dataclass
class Section:
    """What stands under a heading."""

    heading: str
    prose: list[str] = field(default_factory=list)
    blocks: list[list[str]] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join(self.prose)


def sections(page: Path) -> list[Section]:
    """A page by its headings, without the line that leads to the other language."""
    found: list[Section] = []
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                found[-1].blocks.append([line])
        elif fenced:
            found[-1].blocks[-1].append(line)
        elif line.startswith("    "):
            found[-1].blocks.append([line])
        elif re.match("#+ ", line):
            found.append(Section(line))
        elif not line.endswith(("[简体中文](README.zh-CN.md)", "| 简体中文")):
            found[-1].prose.append(line)
    return found


def names(text: str) -> list[str]:
    """The files, folders and flags in it, which are the same in all languages."""
    return re.findall(r"--\w+|[\w-]+\.[a-z]\w*|[\w-]+/", text, re.ASCII)


def levels(section: Section) -> int:
    return section.heading.index(" ")


def code(section: Section) -> list[list[object]]:
    """Line by line; of comments, and of the tree of a run's folder, the names alone."""
    blocks: list[list[object]] = []
    for block in section.blocks:
        if block[1:] and block[1].startswith("runs/"):
            blocks.append([*names("\n".join(block))])
        else:
            parts = [re.split(r"(?:^|\s+)# ", line, maxsplit=1) for line in block]
            blocks.append([(words, *map(names, comment)) for words, *comment in parts])
    return blocks


def markers(section: Section) -> list[str]:
    return re.findall("<!--.*?-->", section.text())


def inline(section: Section) -> list[str]:
    return sorted(set(re.findall("`[^`\n]+`", section.text())))


def flags(section: Section) -> list[str]:
    return sorted(set(re.findall(r"--\w+", " ".join(inline(section)))))


def links(section: Section) -> list[str]:
    return sorted(re.findall(r"\]\(([^)]+)\)", section.text()))


def figures(text: str) -> list[str]:
    """Numbers that are not words; those in code and links are compared with these."""
    text = re.sub(r"`[^`\n]+`|\]\([^)]+\)", "", text)
    return re.findall(r"(?<![A-Za-z\d_.,-])\d+(?:[.,]\d+)*(?:e-?\d+)?", text)


def numbers(section: Section) -> list[str]:
    return sorted(figures(section.text()))


def tables(section: Section) -> list[list[list[str]]]:
    """The numbers of each cell, in their order."""
    return [[figures(cell) for cell in line.split("|")] for line in section.prose if line.startswith("|")]


@pytest.mark.parametrize("what", [levels, code, markers, inline, flags, links, numbers, tables])
def test_the_chinese_readme_says_what_the_english_one_says(what: Callable[[Section], object]) -> None:
    """Section by section: whoever changes one of the two has to change the other."""
    english, chinese = sections(ROOT / "README.md"), sections(ROOT / "README.zh-CN.md")
    assert len(english) > 15
    for one, other in zip(english, chinese, strict=True):
        assert what(one) == what(other), f"README.md under {one.heading!r} and README.zh-CN.md under {other.heading!r} differ"


def test_the_readmes_lead_to_each_other() -> None:
    assert "\nEnglish | [简体中文](README.zh-CN.md)\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n[English](README.md) | 简体中文\n" in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
