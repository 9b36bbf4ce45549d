"""Claims about README's picture: it shows a rehearsal's commands and results, and opens without a network."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools.terminal_picture import picture, shown

OUTPUT = """\
image builds trust the CA bundle /etc/ssl/ca.crt (from PIP_CERT; TPU_LAUNCH_CA_BUNDLE overrides)
   0.4s  $ tpu-launch emulator start --bucket rehearsal
         building tpu-launch/host:cdc342ac3f7ad995
           [stage-1 5/6] COPY guest-agent.py /usr/local/sbin/guest-agent
   1.6s  $ tpu-launch --emulated up -f examples/rehearsal.yaml
            8.1s  slice rehearsal is READY: 2 hosts, 8 devices
            0.7s    [packages 1/2] COPY requirements.txt /opt/tpu-launch/requirements.txt
         Usage: tpu-train [OPTIONS] COMMAND [ARGS]...

           Trains Transformers on every host of a Cloud TPU slice.
         [0] [Gloo] Rank 0 is connected to 1 peer ranks.
         [0] step 60/60  loss 5.14649  157.4 examples/s  0:00 left
         [0] summary: {"run_id": "rehearsal"}
 154.4s  the emulator and everything it started are gone

loss                 7.6469 -> 5.1465

real\t2m35.059s
"""


def test_builds_and_help_texts_are_left_out() -> None:
    assert [line for line in shown(OUTPUT.splitlines(keepends=True)) if line] == [
        "   0.4s  $ tpu-launch emulator start --bucket rehearsal",
        "   1.6s  $ tpu-launch --emulated up -f examples/rehearsal.yaml",
        "            8.1s  slice rehearsal is READY: 2 hosts, 8 devices",
        "         [0] step 60/60  loss 5.14649  157.4 examples/s  0:00 left",
        " 154.4s  the emulator and everything it started are gone",
        "loss                 7.6469 -> 5.1465",
    ]


def test_folders_of_this_machine_are_not_shown() -> None:
    (line,) = shown([f"         emulator of {Path.cwd()}/.tpu-launch: http://127.0.0.1:40353\n"])
    assert line == "         emulator of ~/tpu-launch/.tpu-launch: http://127.0.0.1:40353"


def test_the_picture_loads_nothing() -> None:
    committed = (Path(__file__).resolve().parents[2] / "docs" / "images" / "rehearsal.svg").read_text()
    for svg in (committed, picture(OUTPUT.splitlines(keepends=True))):
        ElementTree.fromstring(svg)
        assert not re.search(r"@font-face|url\(\"?https?:|href=\"https?:", svg)


def test_the_committed_picture_has_the_losses_of_the_readme() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "images" / "rehearsal.svg").read_text().replace("&#160;", " ").replace("&gt;", ">")
    for figure in ("7.6547 -> 4.8259", "perplexity 182.71"):
        assert figure in text
        assert figure in (root / "README.md").read_text()
