"""Claims about README.md and docs/: files, commands and links are valid; docs/reference/ is what the code says; all is
built and read without a network."""

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import launcher.errors
import training.errors
from launcher.cli.main import cli
from tests.launcher.run_files import load_text
from tools import reference
from training.cli.main import tpu_train

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "k8s/README.md")
PAGES = [*(ROOT / page for page in TOP_PAGES), *sorted(DOCS.rglob("*.md"))]
PROGRAMS = {"tpu-launch": cli, "tpu-train": tpu_train}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yields the page and the text of every code block in a language."""
    for page in PAGES:
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            yield name(page), block


FILES = [(page, block) for page, block in code_blocks("yaml") if "project:" in block]  # whole ones


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours in a console block, as its words; the `tpu-train` command behind `local --` too.

    What follows three spaces is a remark: so the commands' own help has it.
    """
    for page, block in code_blocks("console"):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            text = re.split(r" \| | > | {3,}", line.removeprefix("$ "))[0]
            if re.match(r"tpu-(launch|train) ", text) and "..." not in text:
                words = shlex.split(text, comments=True)
                yield page, words
                if "tpu-train" in words[1:]:
                    yield page, words[words.index("tpu-train") :]


def parse(words: list[str]) -> None:
    """Parses a command line as click would, without running anything. Raises click.ClickException."""
    command: click.Command = PROGRAMS[words[0]]
    context = command.make_context(words[0], list(words[1:]))
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        _, found, rest = command.resolve_command(context, rest)
        command, context = found, found.make_context(found.name, rest, parent=context)


@pytest.mark.parametrize(("page", "text"), FILES, ids=[page for page, _ in FILES])
def test_yaml_files_are_valid(tmp_path: Path, page: str, text: str) -> None:
    assert load_text(tmp_path, text).trainer is not None


def test_the_readme_is_short_and_shows_a_file() -> None:
    assert {"README.md", "docs/guide/run-file.md"} <= dict(FILES).keys()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("page", "words"), list(shown_commands()), ids=str)
def test_shown_commands_are_valid(page: str, words: list[str]) -> None:
    try:
        parse(words)
    except click.exceptions.Exit:  # --version and --help end the parsing
        pass
    except click.BadParameter as error:
        if not str(error).endswith("does not exist."):  # a reader's own file
            raise


def test_commands_are_checked_for_their_options() -> None:
    parse(["tpu-launch", "emulator", "inject", "kill-host", "demo", "1"])
    with pytest.raises(click.ClickException):
        parse(["tpu-launch", "up", "--no-such-option"])


def test_the_picture_of_the_readme_has_its_losses_and_loads_nothing() -> None:
    svg = (DOCS / "images" / "rehearsal.svg").read_text().replace("&#160;", " ").replace("&gt;", ">")
    assert not re.search(r"@font-face|url\(\"?https?:|href=\"https?:", svg)
    for text in (svg, (ROOT / "README.md").read_text()):
        figures = re.findall(r"[\d.]+ -> [\d.]+|perplexity [\d.]+\d", text)
        assert {"7.6547 -> 4.8259", "perplexity 182.71"} <= set(figures)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere_and_named_files_exist(page: Path) -> None:
    """Files: paths in backquotes that begin with a folder of this repository, in the current documentation."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"
    if page.name != "CHANGELOG.md":
        folders = "launcher|training|tests|tools|docs|images|k8s|examples|benchmarks"
        for path in re.findall(rf"`((?:{folders})/[\w./-]*[\w/])`", page.read_text()):
            assert (ROOT / path).exists(), f"{name(page)} names {path}"


def test_documentation_builds_and_needs_no_network(tmp_path: Path) -> None:
    """As `make docs` builds it. Of other hosts there are links that a reader may follow, and nothing that is loaded."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?(https?:[^\" >]+)", text)
        assert not loaded, f"{page.name} loads {loaded}"


COMMANDS = [*reference.all_commands("tpu-launch", cli), *reference.all_commands("tpu-train", tpu_train)]


def test_pages_are_what_the_code_says() -> None:
    assert reference.stale() == [], "run `make reference` and commit what it writes"


def test_every_section_and_subcommand_is_there_and_every_key_has_a_meaning() -> None:
    assert {"tpu-launch emulator inject preempt", "tpu-train checkpoint verify"} <= dict(COMMANDS).keys()
    for path, key in reference.all_keys():
        assert key.meaning, path
        assert key.section is None or inspect.cleandoc(key.section.__doc__ or ""), path


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=dict(COMMANDS))
def test_every_command_and_option_has_a_help_text(name: str, command: click.Command) -> None:
    assert command.help, name
    for item in reference.parameters(command):
        assert not isinstance(item, click.Option) or item.help, f"{name} {item.opts[0]}"


@pytest.mark.parametrize("codes", [launcher.errors.Exit, training.errors.Exit])
def test_every_exit_code_has_a_meaning(codes: type[launcher.errors.Exit] | type[training.errors.Exit]) -> None:
    assert {code.name for code in codes} <= {name for name, text in reference.member_texts(codes).items() if text}
