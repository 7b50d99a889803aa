"""The pages beside the README name what is there, and the two READMEs say the same."""

import re
from collections.abc import Callable
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


def sections(page: Path) -> list[str]:
    """A page's text by its headings, each with what stands under it; without the line that leads to the other language."""
    text = re.sub(r"\n(\[English\]|English \|).*\n", "\n", page.read_text(encoding="utf-8"), count=1)
    blocks = re.findall(BLOCK, text, re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):  # a comment of a block is no heading
        text = text.replace(block, f"<block {number}>\n", 1)
    parts = re.split(r"^(?=#{1,6} )", text, flags=re.MULTILINE)
    for number, block in enumerate(blocks):
        parts = [part.replace(f"<block {number}>\n", block) for part in parts]
    return parts


BLOCK = r"^```.*?^```\n|^    \S.*?\n"
CHINESE = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


def prose(text: str) -> str:
    return re.sub(BLOCK, "", text, flags=re.DOTALL | re.MULTILINE)


def names(text: str) -> list[str]:
    """The files, folders and flags in it, which no language changes."""
    return re.findall(r"--\w+|[\w-]+\.[a-z]\w*|[\w-]+/", text, re.ASCII)


def code(text: str) -> list[list[list[str]]]:
    """Blocks of lines; of a comment, and of a line that has Chinese in it or lies indented in a ```text, the names alone."""
    blocks = []
    for block in re.findall(BLOCK, text, re.DOTALL | re.MULTILINE):
        lines = []
        tree = block.startswith("```text") and "\n  " in block and "  (--output_dir)" in block
        for line in block.splitlines():
            words, _, comment = re.sub(r"(^|\s)# ", r"\1\0", line).partition("\0")
            lines.append(([] if tree else [words.rstrip()]) + names(line if tree else comment))
        blocks.append([name for line in lines for name in line] if tree else lines)
    return blocks


def headings(text: str) -> int:
    return len(re.findall(r"^#+ ", text, re.MULTILINE)) and len(text.split(" ")[0])


def markers(text: str) -> list[str]:
    return re.findall(r"<!--.*?-->", text)


def inline(text: str) -> list[str]:
    return sorted(set(re.findall(r"`[^`\n]+`", prose(text))))


def flags(text: str) -> list[str]:
    return sorted(set(re.findall(r"--\w+", " ".join(inline(text)))))


def links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)]+)\)", prose(text)))


def numbers(text: str) -> list[str]:
    """In figures, not as words; those in code are compared with it."""
    text = re.sub(r"`[^`\n]+`|\]\([^)]+\)", "", prose(text))
    return sorted(re.findall(r"(?<![A-Za-z\d_.,-])\d+(?:[.,]\d+)*(?:e-?\d+)?", text))


def rows(text: str) -> list[list[list[str]]]:
    """The numbers of each cell of the tables."""
    return [[numbers(cell) for cell in line.strip("|").split("|")] for line in prose(text).splitlines() if line.startswith("|")]


@pytest.mark.parametrize("what", [headings, code, markers, inline, flags, links, numbers, rows])
def test_the_chinese_readme_says_what_the_english_one_says(what: Callable[[str], object]) -> None:
    """Section by section: whoever changes one of the two is told to change the other."""
    english, chinese = sections(ROOT / "README.md"), sections(ROOT / "README.zh-CN.md")
    assert len(english) > 15
    for one, other in zip(english, chinese, strict=True):
        assert what(one) == what(other), f"README.md and README.zh-CN.md differ under {one.splitlines()[0]!r}"
