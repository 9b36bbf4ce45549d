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


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def yaml_files() -> list[tuple[str, str]]:
    """Every whole YAML file that a page shows."""
    blocks = [(name(page), block) for page in PAGES for block in code_blocks(page, "yaml")]
    return [(page, block) for page, block in blocks if "project:" in block]


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours in a console block, as its words; the `tpu-train` command behind `local --` too.

    What follows three spaces is a remark: so the commands' own help has it.
    """
    for page in PAGES:
        for block in code_blocks(page, "console"):
            for line in re.sub(r"\\\n *", "", block).splitlines():
                text = re.split(r" \| | > | {3,}", line.removeprefix("$ "))[0]
                if re.match(r"tpu-(launch|train) ", text) and "..." not in text:
                    words = shlex.split(text, comments=True)
                    yield name(page), words
                    if "tpu-train" in words[1:]:
                        yield name(page), words[words.index("tpu-train") :]


def parse(words: list[str]) -> None:
    """Parses a command line as click would, without running anything. Raises click.ClickException."""
    command: click.Command = PROGRAMS[words[0]]
    context = command.make_context(words[0], list(words[1:]))
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        _, found, rest = command.resolve_command(context, rest)
        command, context = found, found.make_context(found.name, rest, parent=context)


@pytest.mark.parametrize(("page", "text"), yaml_files(), ids=[page for page, _ in yaml_files()])
def test_yaml_files_are_valid(tmp_path: Path, page: str, text: str) -> None:
    assert load_text(tmp_path, text).trainer is not None


def test_the_readme_is_short_and_shows_a_file() -> None:
    assert {"README.md", "docs/guide/run-file.md"} <= {page for page, _ in yaml_files()}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("page", "words"), list(shown_commands()), ids=lambda value: value if isinstance(value, str) else ""
)
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
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not re.match(r"https?://|#", target):
            assert (page.parent / target.split("#")[0]).exists(), f"{name(page)} links to {target}"


def test_files_that_pages_name_exist() -> None:
    """Paths in backquotes that begin with a folder of this repository, in the current documentation."""
    folders = "launcher|training|tests|tools|docs|images|k8s|examples|benchmarks"
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
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
KEYS = dict(reference.all_keys())


def test_pages_are_what_the_code_says() -> None:
    assert reference.stale() == [], "run `make reference` and commit what it writes"


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_meaning(path: str) -> None:
    assert KEYS[path].meaning


def test_every_section_and_subcommand_is_there() -> None:
    assert {"tpu-launch emulator inject preempt", "tpu-train checkpoint verify"} <= {name for name, _ in COMMANDS}
    for path, key in KEYS.items():
        if key.section is not None:
            assert inspect.cleandoc(key.section.__doc__ or ""), path


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_and_option_has_a_help_text(name: str, command: click.Command) -> None:
    assert command.help, name
    for item in reference.parameters(command):
        if isinstance(item, click.Option):
            assert item.help, f"{name} {item.opts[0]}"


@pytest.mark.parametrize("codes", [launcher.errors.Exit, training.errors.Exit])
def test_every_exit_code_has_a_meaning(codes: type[launcher.errors.Exit] | type[training.errors.Exit]) -> None:
    meanings = reference.member_texts(codes)
    assert [code.name for code in codes if not meanings.get(code.name)] == []
