"""Claims about gcloud's command lines, repeated calls, and what its errors mean: each wording, and where it was seen.

Sources: `gcloud` is SDK 528 itself (googlecloudsdk/core, or run against a server that is not there); the others are
issues and source files of public repositories that quote Google's messages. The real gcloud runs in tests/rehearsal.
"""

import contextlib
import math
import random
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.config import Config
from launcher.errors import BadInput, CommandTimeout, Exit, LaunchError
from launcher.gcloud import (
    Busy,
    Conflict,
    PermissionDenied,
    Preempted,
    QuotaExceeded,
    Refused,
    ResourceNotFound,
    Retry,
    StillRunning,
    Stockout,
    Unavailable,
    call_gcloud,
    delete_until_gone,
    explain_error,
    run_gcloud,
    summarize_error,
)
from launcher.shell import Result
from launcher.tpu_vm import commands
from launcher.tpu_vm.connections import Address, parse_dry_run
from tests.launcher.emulated_gcloud import BUSY, DENIED, OFFLINE, UNAVAILABLE, Clock, Cloud
from tests.launcher.run_files import SLICE, load_text


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_text(tmp_path, SLICE.replace("v4-16", "v4-16, capacity: spot"), command=["true"])


@pytest.mark.parametrize(("busy", "raises"), [(3, False), (1000, True)])
def test_another_operation_is_waited_for_a_minute(busy: int, raises: bool) -> None:
    clock, answers = Clock(), iter([1] * busy + [0] * 1000)
    machine = Mock(clock=clock, random=random.Random(1))
    machine.run.side_effect = lambda argv, **_: Result(tuple(argv), next(answers), "done", BUSY)
    begun = clock.now
    with pytest.raises(Busy) if raises else contextlib.nullcontext():
        assert call_gcloud(machine, ["gcloud"], timeout=5) == "done"
    assert (clock.now - begun >= 60) is raises


def test_a_deletion_is_repeated_after_each_look_and_a_new_error_is_told_once() -> None:
    errors, said, clock = iter([UNAVAILABLE, UNAVAILABLE, "ALREADY_EXISTS: request", "", DENIED]), list[str](), Clock()
    looks = iter([("slice s", ["delete"])] * 3 + [("slice s", None), *[("slice s", ["delete"])] * 2])
    machine, begun = Mock(clock=clock), clock.now
    machine.run.side_effect = lambda argv, **_: Result(tuple(argv), int((text := next(errors)) != ""), "", text)
    with pytest.raises(PermissionDenied):
        delete_until_gone(machine, said.append, looks.__next__, clock.now + 60)
    assert [text.split("ed yet: ")[1][:20] for text in said] == ["gcloud: UNAVAILABLE:", "ALREADY_EXISTS: requ"]
    assert clock.now - begun == 4 * 2.0, "no pause after a deletion that succeeds"


def test_the_accelerator_type_zone_and_project_are_always_given(config: Config) -> None:
    words = "accelerator-type=v4-16 zone=us-central2-b project=p version=tpu-ubuntu2204-base spot labels=tpu-launch=1"
    assert {f"--{word}" for word in words.split()} <= set(commands.create_command(config, {"tpu-launch": "1"}))


def test_scripts_for_all_hosts_do_without_the_slow_key_exchange_and_what_may_be_secret_keeps_it(config: Config) -> None:
    def key_exchanges(command: list[str]) -> list[str]:
        """What the real client offers with the flags of a command, the first choice first."""
        flags = [word.removeprefix("--ssh-flag=") for word in command if word.startswith("--ssh-flag=")]
        shown = subprocess.run(["ssh", "-F", "none", *flags, "-G", "host"], capture_output=True, text=True, check=True)
        (line,) = (line for line in shown.stdout.splitlines() if line.startswith("kexalgorithms "))
        return line.split(" ")[1].split(",")

    clients_own = key_exchanges([])
    quick = key_exchanges(commands.ssh_command(config, "true"))
    assert quick == [name for name in clients_own if not name.startswith("sntrup761")]
    assert key_exchanges(commands.ssh_command(config, "true", worker="0")) == clients_own
    assert key_exchanges(commands.shell_command(config, 0)) == clients_own


def test_the_dry_run_says_how_to_reach_every_host() -> None:
    line = (
        "/usr/bin/ssh -T -i /home/me/.ssh/google_compute_engine -o CheckHostIP=no -o HashKnownHosts=no "
        "-o HostKeyAlias=tpu.4711-{w}-AbCd/= -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes "
        "-o UserKnownHostsFile=/home/me/.ssh/google_compute_known_hosts me@10.0.0.{w} -- true"
    )
    addresses = parse_dry_run("Using ssh batch size of 1.\n" + line.format(w=0) + "\n" + line.format(w=1) + "\n")
    keys = ("/home/me/.ssh/google_compute_engine", "/home/me/.ssh/google_compute_known_hosts")
    assert addresses == [Address(w, f"10.0.0.{w}", "me", *keys, f"tpu.4711-{w}-AbCd/=") for w in range(2)]


@pytest.mark.parametrize(("retry_denied", "seconds"), [(True, 600), (False, 0)])
def test_a_denied_permission_is_retried_for_ten_minutes_and_told_once(retry_denied: bool, seconds: float) -> None:
    machine, said = Cloud().machine(), list[str]()
    begin = machine.clock.monotonic()
    retry = Retry(machine, said.append, "slice demo", retry_denied=retry_denied)
    with pytest.raises(PermissionDenied):
        retry.call(Mock(side_effect=PermissionDenied("denied")), begin + 3600)
    assert seconds <= machine.clock.monotonic() - begin <= seconds + 90
    assert said == ["slice demo: still waiting, although: denied"] * (seconds > 0)


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (Result((), 1, "ERROR: (gcloud.x) NOT_FOUND: gone", ""), ResourceNotFound, "gone"),
        (CommandTimeout("no answer"), CommandTimeout, "or the network to it, does not answer"),
    ],
)
def test_a_failed_call_tells_why(outcome: Result | CommandTimeout, error: type[LaunchError], words: str) -> None:
    with pytest.raises(error, match=words):
        run_gcloud(["gcloud"], timeout=5, run=Mock(side_effect=[outcome]))


@pytest.mark.parametrize("other", [Unavailable("503"), None])
def test_a_permission_is_doubted_anew_after_another_answer(other: LaunchError | None) -> None:
    machine = Cloud().machine()
    begin = machine.clock.monotonic()  # ten minutes of denials end a wait, two times eight do not

    def ask() -> str:
        passed = machine.clock.monotonic() - begin
        if 480 <= passed < 600:
            if other is not None:
                raise other
            return "early"
        if passed < 1000:
            raise PermissionDenied("denied")
        return "late"

    said = list[str]()
    retry = Retry(machine, said.append, "slice demo")
    if retry.call(ask, math.inf) == "early":
        machine.clock.sleep(120)
        assert retry.call(ask, math.inf) == "late"
    assert [line.rpartition(" ")[2] for line in said] == ["denied", *(["503"] if other else []), "denied"]


def test_no_try_begins_after_the_deadline() -> None:
    machine, asked = Cloud().machine(), list[float]()
    deadline = machine.clock.monotonic() + 300

    def ask() -> None:
        asked.append(machine.clock.monotonic())
        raise Unavailable("503")

    with pytest.raises(Unavailable):
        Retry(machine, print, "slice demo").call(ask, deadline)
    assert deadline - 60 < asked[-1] <= deadline


CREATE = ["gcloud", "compute", "tpus", "tpu-vm", "create", "demo"]
DESCRIBE = ["gcloud", "compute", "tpus", "tpu-vm", "describe", "create"]

REVOKED = (
    "There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request')\n"
    "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials."
)

# source, what gcloud printed, what it means
WORDINGS: list[tuple[str, str, type[LaunchError]]] = [
    ("terraform-provider-google #21243", '{\n  "code": 8,\n  "message": "There is no more capacity in the zone '
     '\\"us-central1-c\\"; you can try in another zone [EID: 0x9f48947a7d57c8d]"\n}', Stockout),
    ("skypilot #4579", '{"code": 8, "message": "Insufficient reserved capacity. Contact customer support"}', Stockout),
    ("the same, code 9", '{"code": 9, "message": "Insufficient reserved capacity. Contact support"}', Stockout),
    ("Compute Engine, quoted in HAWQ #4",
     "The zone 'projects/p/zones/z' does not have enough resources available to fulfill the request.", Stockout),
    ("Compute Engine's error code", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Stockout),
    ("Compute Engine's reason", "(state:STOCKOUT, sub-state:STOCKOUT, resource type:compute)", Stockout),
    ("an operation's code alone", '{"code": 8, "message": "something new"}', Stockout),
    ("terraform-provider-google #16147, of a creation",
     '{\n  "code": 13,\n  "message": "an internal error has occurred"\n}', Stockout),
    ("marin #1612", "RESOURCE_EXHAUSTED: Quota limit 'TPUV6E...' has been exceeded. Limit: 0 in region us-east1.",
     QuotaExceeded),
    ("skypilot failover handler", "Quota 'TPUV2s...' exhausted. Limit 32 in zone europe-west4-a", QuotaExceeded),
    ("axlearn tpu.py", "No reservation for request queue of this project", QuotaExceeded),
    ("marin #6198", "RESOURCE_EXHAUSTED: Maximum number of CreateNode requests per minute", Unavailable),
    ("python-docs-samples #3482", "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' and limit "
     "'Read requests per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.", Unavailable),
    ("generative-ai-python #206", "RATE_LIMIT_EXCEEDED quota_limit: ReadRequestsPerMinutePerProject", Unavailable),
    ("google.api_core", "RESOURCE_EXHAUSTED: Resource has been exhausted (e.g. check quota).", Unavailable),
    ("HTTP", "HTTPError 429: Too Many Requests", Unavailable),
    ("skypilot failover handler, code 3",
     '{"code": 3, "message": "Cloud TPU received a bad request. update is not supported while in state PREEMPTED"}',
     Preempted),
    ("gcloud ssh", "TPU demo is in terminal state PREEMPTED", Preempted),
    ("the API", "ABORTED: unable to queue the operation", Busy),
    ("the API", "INVALID_ARGUMENT: bad request. update is not supported while in state REPAIRING", Busy),
    ("gcloud waiter.py", "gcloud crashed (TimeoutError): Operation projects/p/locations/z/operations/o has not "
     "finished in 1800 seconds. The operations may still be underway remotely", StillRunning),
    ("gcloud, connection refused", "gcloud crashed (ConnectionError): HTTPSConnectionPool(host='tpu.googleapis.com', "
     "port=443): Max retries exceeded with url: /v2/x (NewConnectionError('[Errno 111]'))", Unavailable),
    ("gcloud without a network: credentials are refreshed first", OFFLINE, Unavailable),
    ("gcloud without a network, httplib2", "There was a problem refreshing auth tokens for account a@b: Unable to "
     "find the server at oauth2.googleapis.com\nPlease run:\n\n  $ gcloud auth login", Unavailable),
    ("the API", "UNAVAILABLE: The service is currently unavailable.", Unavailable),
    ("the API", "HTTPError 503: Service Unavailable", Unavailable),
    ("the API, not of a creation", '{"code": 13, "message": "an internal error has occurred"}', Unavailable),
    ("google.auth, a token that was revoked", REVOKED, PermissionDenied),
    ("gcloud", "You do not currently have an active account selected.", PermissionDenied),
    ("the API", "PERMISSION_DENIED: Permission denied on 'locations/mars-1a' (or it may not exist)", PermissionDenied),
    ("skypilot", "Location us-east1-d is not found or access is unauthorized.", PermissionDenied),
    ("the API", "FAILED_PRECONDITION: Billing account of project p is not found", PermissionDenied),
    ("ssh, whose key is not on the host yet",
     "me@10.0.0.2: Permission denied (publickey).\n[/usr/bin/ssh] exited with return code [255].", LaunchError),
    ("ssh, whose host boots", "ssh: connect to host 10.0.0.2 port 22: Connection refused", LaunchError),
    ("the API", "ALREADY_EXISTS: Resource 'projects/p/locations/z/nodes/n' already exists", Conflict),
    ("the API", "NOT_FOUND: Resource 'projects/p/nodes/n' was not found", ResourceNotFound),
    ("the API, of a slice with a telling name", "NOT_FOUND: 'nodes/stockout-a' was not found", ResourceNotFound),
    ("the API", "INVALID_ARGUMENT: CloudTpu received an invalid AcceleratorType", Refused),
    ("an old gcloud", "unrecognized arguments: --spot", Refused),
    ("no source", "something new", LaunchError),
]  # fmt: skip

PERMANENT = {QuotaExceeded, PermissionDenied, Conflict, Refused}


@pytest.mark.parametrize(("source", "text", "kind"), WORDINGS)
def test_each_wording_has_its_meaning_and_may_be_permanent(source: str, text: str, kind: type[LaunchError]) -> None:
    argv = CREATE if "of a creation" in source and "not of" not in source else DESCRIBE
    for error in explain_error(text, argv), explain_error(f"ERROR: (gcloud.x) {text}", argv):
        assert type(error) is kind, source
        assert error.transient == (kind not in PERMANENT), source


def test_time_outs_pass_and_bad_input_and_a_used_slice_do_not() -> None:
    assert CommandTimeout("no answer").transient
    assert not BadInput("no").transient
    assert not LaunchError("host 0 is used by run x", exit_code=Exit.CONFLICT).transient


def test_a_missing_sign_in_is_told_in_two_lines_and_offline_is_not_told_to_sign_in() -> None:
    offline, revoked = (str(explain_error(text, DESCRIBE)) for text in (OFFLINE, REVOKED))
    assert len(revoked.splitlines()) == 2
    assert "can't be reached" in offline.splitlines()[-1]
    assert "sign in" not in offline.splitlines()[-1]


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Create request issued for: [demo]\nWaiting for operation [o]\n...\n", "gcloud failed without a message"),
        ("Waiting for operation [o]\n\none\n \ntwo\n", "one\ntwo"),
        ("WARNING: old\nERROR: (gcloud.x) ABORTED: no\n- reason: r", "gcloud: ABORTED: no\n- reason: r"),
        ('ERROR: (gcloud.x) {"code": 8, "message": "No more \\"here\\""}', 'gcloud: No more "here"'),
    ],
)
def test_an_error_is_told_without_what_gcloud_prints_besides(stderr: str, words: str) -> None:
    assert summarize_error(stderr) == words
    assert str(explain_error(stderr, DESCRIBE)).startswith(f"{words}\n  ")
