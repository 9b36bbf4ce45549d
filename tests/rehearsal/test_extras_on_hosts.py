"""Claims about hostile values, env files, overlays and the dead-man timer, on emulated hosts; about 10 s."""

import json

import yaml

from tests.rehearsal.workstation import EmulatedSlice

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


def test_hostile_values_env_files_and_overlays_arrive_as_they_are(two_hosts: EmulatedSlice) -> None:
    described = yaml.safe_load((two_hosts.folder / two_hosts.run_file).read_text())
    name = "a file's $(touch pwned) name.yaml"
    two_hosts.file(name, yaml.safe_dump({**described, "run": {"environment": HOSTILE}}, allow_unicode=True))
    two_hosts.file("some.env", f"FROM_FILE='{NEEDLE} $(touch /tmp/pwned)'\n")
    (two_hosts.folder / "changed").mkdir()
    two_hosts.file("changed/probe.py", "WHERE = 'laid over the image'\n")
    arguments = [*HOSTILE.values(), "line\nbreak"]
    program = (
        "import json, os, sys; from training import probe; "
        f"hostile = {{key: os.environ[key] for key in {sorted(HOSTILE)!r}}}; "
        "rest = [os.environ['FROM_FILE'], probe.WHERE, os.path.exists('/tmp/pwned')]; "
        "print('TOLD', json.dumps([hostile, sys.argv[1:], *rest]))"
    )
    extras = ("--env-file", "some.env", "--overlay", "changed=/opt/tpu-launch/training")
    run = ("--emulated", "run", "--new", "--json", "-f", name, *extras)
    ended = two_hosts.good(*run, "--", "python", "-c", program, *arguments)
    for worker in (0, 1):
        (told,) = [line for line in ended.output.splitlines() if line.startswith(f"[{worker}] TOLD ")]
        expected = [HOSTILE, arguments, f"{NEEDLE} $(touch /tmp/pwned)", "laid over the image", False]
        assert json.loads(told.split("TOLD ")[1]) == expected
    events = {event["event"]: event for event in two_hosts.events(ended.json()["run"])}
    assert events["attempt"]["overlay"]
    assert events["started"]["image_id"].startswith("sha256:")
    # Logs apart: the program printed it itself.
    kept = [path for path in two_hosts.runs.rglob("*") if path.is_file() and path.parent.name != "attempt-0"]
    assert not [path for path in kept if NEEDLE in path.read_text(errors="replace")]
    assert not list(two_hosts.folder.glob("pwned"))
