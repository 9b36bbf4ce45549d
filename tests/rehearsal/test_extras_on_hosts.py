"""Claims about hostile values, env files, overlays and the dead-man timer, on emulated hosts; about 10 s."""

import json

import yaml

from tests.rehearsal.workstation import Workstation

HOSTILE = {
    "SPACES": "  two  spaces  ",
    "QUOTES": 'it\'s "quoted" `really`',
    "EXPANSION": "$(touch /tmp/pwned) ${HOME} $HOME \\$x \\\\",
    "DASHES": "--privileged -v /:/host",
    "OPERATORS": "a; b && c | d > e & f",
    "GLOB": "* ? [a-z] ~ !x #no comment",
    "UNICODE": "ü ß 日本 🙂",
    "EMPTY": "",
}
NEEDLE = "fr0m-the-env-file"


def test_hostile_values_env_files_and_overlays_arrive_as_they_are(two_hosts: tuple[Workstation, str]) -> None:
    work, file = two_hosts
    described = yaml.safe_load((work.folder / file).read_text())
    name = "a file's $(touch pwned) name.yaml"
    work.file(name, yaml.safe_dump({**described, "run": {"environment": HOSTILE}}, allow_unicode=True))
    work.file("some.env", f"FROM_FILE='{NEEDLE} $(touch /tmp/pwned)'\n")
    (work.folder / "changed").mkdir()
    work.file("changed/probe.py", "WHERE = 'laid over the image'\n")
    arguments = [*HOSTILE.values(), "line\nbreak"]
    program = "import json, os, sys; from training import probe; "
    program += (
        f"hostile = {{key: os.environ[key] for key in {sorted(HOSTILE)!r}}}; rest = "
        f"[os.environ['FROM_FILE'], probe.WHERE]; "
    )
    program += "print('TOLD', json.dumps([hostile, sys.argv[1:], *rest, os.path.exists('/tmp/pwned')]))"
    extras = ("--env-file", "some.env", "--overlay", "changed=/opt/tpu-launch/training")
    run = ("--emulated", "run", "--new", "--json", "-f", name, *extras)
    ended = work.good(*run, "--", "python", "-c", program, *arguments)
    for worker in (0, 1):
        (told,) = [line for line in ended.output.splitlines() if line.startswith(f"[{worker}] TOLD ")]
        expected = [HOSTILE, arguments, f"{NEEDLE} $(touch /tmp/pwned)", "laid over the image", False]
        assert json.loads(told.split("TOLD ")[1]) == expected
    attempt, begun = (
        next(event for event in work.events(ended.json()["run"]) if event["event"] == kind)
        for kind in ("attempt", "started")
    )
    assert attempt["overlay"]
    assert begun["image_id"].startswith("sha256:")
    runs = work.runs
    kept = [
        path for path in runs.rglob("*") if path.is_file() and path.parent.name != "attempt-0"
    ]  # the program printed it itself
    assert not [path for path in kept if NEEDLE in path.read_text(errors="replace")]
    assert not list(work.folder.glob("pwned"))
