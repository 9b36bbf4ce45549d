"""Claims about README.md: its commands of "A real run" work as typed, in turn, on an emulated slice. About 60 s."""

import json
import re
import shlex

from tests.rehearsal.workstation import ROOT, Workstation

# Works for a minute, and for three seconds when it is resumed.
PROGRAM = (
    "trap 'exit 75' TERM; echo at work; i=0; while [ $i -lt $((600 - 570 * TPU_LAUNCH_ATTEMPT)) ]; do "
    "i=$((i+1)); sleep 0.1; done"
)
ANSWERS = ("--project", "rehearsal-project", "--accelerator-type", "v4-8", "--zone", "us-central2-b", "--name", "typed")


def typed() -> list[list[str]]:
    """The commands of the section, as words after `tpu-launch`, without what stands behind a #."""
    section = (ROOT / "README.md").read_text().split("## A real run")[1].split("\n## ")[0]
    block = section.split("```console")[1].split("```")[0]
    lines = [line for line in block.splitlines() if line.startswith("$ tpu-launch ")]
    return [shlex.split(line.removeprefix("$ tpu-launch "), comments=True) for line in lines]


def test_the_commands_of_a_real_run_work_in_their_order(emulator: Workstation) -> None:
    """Ctrl-C detaches from `run`, as its comment says; `--attach` and `logs -f` go on until the next command's stop."""
    assert "preflight" in [
        words[0] for words in typed()
    ]  # of our trainer, which doesn't run here: tests/launcher/test_preflight.py
    commands = [words for words in typed() if words[0] != "preflight"]
    expected = "init doctor plan up run run logs stop run down"
    assert [words[0] for words in commands] == expected.split(), commands
    going = []
    for number, words in enumerate(commands):
        if words[0] == "init":
            emulator.good(*words, *ANSWERS)
            path = emulator.folder / "run.yaml"
            commented = re.compile(r"^  # command: .*$", re.MULTILINE)
            assert commented.search(path.read_text())
            path.write_text(commented.sub(f"  command: {json.dumps(['sh', '-c', PROGRAM])}", path.read_text()))
        elif words == ["run", "-f", "run.yaml"] and number == 4:
            running = emulator.begin("--emulated", *words)
            running.wait_for(r"^\[0\] at work", 120)
            running.interrupt()
            assert running.end(30).code == 130
        elif "--attach" in words or words[:2] == ["logs", "-f"]:
            going.append(emulator.begin("--emulated", *words))
            if words[0] == "logs":  # what was seen before Ctrl-C is not shown again by --attach
                going[-1].wait_for(r"^\[0\] at work", 60)
        else:
            ended = emulator.launch("--emulated", *words)
            assert ended.code == 0, f"{words}: {ended.output}"
            if words[0] == "stop":
                assert [running.end(60).code for running in going] == [75, 0]
