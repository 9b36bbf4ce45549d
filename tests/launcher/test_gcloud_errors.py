"""Claims about reading gcloud's errors: each wording, where it was seen, and what it means.

Sources: `gcloud` is SDK 528 itself (googlecloudsdk/core, or run against a server that is not there); the others are
issues and source files of public repositories that quote Google's messages.
"""

import pytest

from launcher.errors import BadInput, CommandTimeout, Exit, LaunchError
from launcher.gcloud.errors import (
    Busy,
    Conflict,
    PermissionDenied,
    Preempted,
    QuotaExceeded,
    RateLimited,
    Refused,
    ResourceNotFound,
    StillRunning,
    Stockout,
    Unavailable,
    explain_error,
    summarize_error,
)

CREATE = ["gcloud", "compute", "tpus", "tpu-vm", "create", "demo"]
DESCRIBE = ["gcloud", "compute", "tpus", "tpu-vm", "describe", "create"]

# source, what gcloud printed, what it means
WORDINGS: list[tuple[str, str, type[LaunchError]]] = [
    ("terraform-provider-google #21243",
     'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8,\n  "message": "There is no more capacity in the zone '
     '\\"us-central1-c\\"; you can try in another zone where Cloud TPU Nodes are offered [EID: 0x9f48947a7d57c8d]"\n}',
     Stockout),
    ("skypilot #4579",
     'ERROR: (gcloud.x) {"code": 8, "message": "Insufficient reserved capacity. Contact customer support to increase '
     'your reservation. [EID: 0x7adf6d58c08b0aa4]"}', Stockout),
    ("skypilot failover handler, code 9",
     'ERROR: (gcloud.x) {"code": 9, "message": "Insufficient reserved capacity. Contact customer support"}', Stockout),
    ("Compute Engine, quoted in HAWQ #4",
     "ERROR: (gcloud.x) The zone 'projects/p/zones/us-central1-a' does not have enough resources available to fulfill "
     "the request. Try a different zone, or try again later.", Stockout),
    ("Compute Engine's error code", "ERROR: (gcloud.x) ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Stockout),
    ("Compute Engine's reason", "(state:STOCKOUT, sub-state:STOCKOUT, resource type:compute)", Stockout),
    ("an operation's code alone", 'ERROR: (gcloud.x) {"code": 8, "message": "something new"}', Stockout),
    ("terraform-provider-google #16147, of a creation",
     'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 13,\n  "message": "an internal error has occurred"\n}',
     Stockout),
    ("marin #1612",
     "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been "
     "exceeded. Limit: 0 in region us-east1.", QuotaExceeded),
    ("skypilot failover handler",
     "ERROR: (gcloud.x) Quota 'TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI' exhausted. Limit 32 in zone "
     "europe-west4-a", QuotaExceeded),
    ("axlearn tpu.py", "ERROR: (gcloud.x) No reservation for request queue of this project", QuotaExceeded),
    ("marin #6198",
     "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Maximum number of CreateNode requests per minute",
     RateLimited),
    ("python-docs-samples #3482",
     "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' and limit 'Read requests "
     "per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.", RateLimited),
    ("generative-ai-python #206", "reason: RATE_LIMIT_EXCEEDED quota_limit: ReadRequestsPerMinutePerProject",
     RateLimited),
    ("google.api_core", "RESOURCE_EXHAUSTED: Resource has been exhausted (e.g. check quota).", RateLimited),
    ("HTTP", "HTTPError 429: Too Many Requests", RateLimited),
    ("skypilot failover handler, code 3",
     'ERROR: (gcloud.x) {"code": 3, "message": "Cloud TPU received a bad request. update is not supported while in '
     'state PREEMPTED [EID: 0x73013519f5b7feb2]"}', Preempted),
    ("gcloud ssh", "ERROR: (gcloud.x) TPU demo is in terminal state PREEMPTED", Preempted),
    ("the API", "ERROR: (gcloud.x) ABORTED: unable to queue the operation", Busy),
    ("the API", "ERROR: (gcloud.x) INVALID_ARGUMENT: Cloud TPU received a bad request. update is not supported while "
     "in state REPAIRING", Busy),
    ("gcloud waiter.py",
     "ERROR: gcloud crashed (TimeoutError): Operation projects/p/locations/z/operations/o has not finished in 1800 "
     "seconds. The operations may still be underway remotely", StillRunning),
    ("gcloud, connection refused",
     "ERROR: gcloud crashed (ConnectionError): HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries "
     "exceeded with url: /v2/x (Caused by NewConnectionError('Failed to establish a new connection: [Errno 111]'))",
     Unavailable),
    ("gcloud without a network: credentials are refreshed first",
     "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host="
     "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token (Caused by NameResolutionError)\n"
     "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials.", Unavailable),
    ("gcloud without a network, httplib2",
     "ERROR: (gcloud.x) There was a problem refreshing auth tokens for account a@b: Unable to find the server at "
     "oauth2.googleapis.com\nPlease run:\n\n  $ gcloud auth login", Unavailable),
    ("the API", "ERROR: (gcloud.x) UNAVAILABLE: The service is currently unavailable.", Unavailable),
    ("the API", "ERROR: (gcloud.x) HTTPError 503: Service Unavailable", Unavailable),
    ("the API, not of a creation", 'ERROR: (gcloud.x) {"code": 13, "message": "an internal error has occurred"}',
     Unavailable),
    ("google.auth, a token that was revoked",
     "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request')\n"
     "Please run:\n\n  $ gcloud auth login", PermissionDenied),
    ("gcloud", "ERROR: (gcloud.x) You do not currently have an active account selected.", PermissionDenied),
    ("the API", "ERROR: (gcloud.x) PERMISSION_DENIED: Permission denied on 'locations/mars-1a' (or it may not exist).",
     PermissionDenied),
    ("skypilot failover handler", "ERROR: (gcloud.x) Location us-east1-d is not found or access is unauthorized.",
     PermissionDenied),
    ("the API", "ERROR: (gcloud.x) FAILED_PRECONDITION: Billing account of project p is not found", PermissionDenied),
    ("ssh, whose key is not on the host yet",
     "me@10.0.0.2: Permission denied (publickey).\nERROR: (gcloud.x) [/usr/bin/ssh] exited with return code [255].",
     LaunchError),
    ("ssh, whose host boots", "ssh: connect to host 10.0.0.2 port 22: Connection refused", LaunchError),
    ("the API", "ERROR: (gcloud.x) ALREADY_EXISTS: Resource 'projects/p/locations/z/nodes/n' already exists", Conflict),
    ("the API", "ERROR: (gcloud.x) NOT_FOUND: Resource 'projects/p/nodes/n' was not found", ResourceNotFound),
    ("the API", "ERROR: (gcloud.x) INVALID_ARGUMENT: CloudTpu received an invalid AcceleratorType", Refused),
    ("an old gcloud", "ERROR: (gcloud.x) unrecognized arguments: --spot", Refused),
    ("no source", "something new", LaunchError),
]  # fmt: skip

PERMANENT = {QuotaExceeded, PermissionDenied, Conflict, Refused}


@pytest.mark.parametrize(("source", "text", "kind"), WORDINGS)
def test_each_wording_has_its_meaning_and_may_be_permanent(source: str, text: str, kind: type[LaunchError]) -> None:
    argv = CREATE if "of a creation" in source and "not of" not in source else DESCRIBE
    error = explain_error(text, argv)
    assert type(error) is kind, source
    assert error.transient == (kind not in PERMANENT), source


def test_time_outs_pass_and_bad_input_and_a_used_slice_do_not() -> None:
    assert CommandTimeout("no answer").transient
    assert not BadInput("no").transient
    assert not LaunchError("host 0 is used by run x", exit_code=Exit.CONFLICT).transient


def test_offline_is_not_told_to_sign_in() -> None:
    offline = next(text for source, text, _ in WORDINGS if source.startswith("gcloud without a network:"))
    advice = str(explain_error(offline, DESCRIBE)).splitlines()[-1]
    assert "can't be reached" in advice
    assert "sign in" not in advice


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Create request issued for: [demo]\nWaiting for operation [o]\n...\n", "gcloud failed without a message"),
        ("Waiting for operation [o]\n\none\n \ntwo\n", "one\ntwo"),
        ("WARNING: old\nERROR: (gcloud.x) ABORTED: no\n- reason: r", "gcloud: ABORTED: no\n- reason: r"),
    ],
)
def test_an_error_is_told_without_what_gcloud_prints_besides(stderr: str, words: str) -> None:
    assert summarize_error(stderr) == words
    assert str(explain_error(stderr, DESCRIBE)).startswith(f"{words}\n  ")


def test_a_missing_sign_in_is_told_in_two_lines() -> None:
    text = next(text for source, text, _ in WORDINGS if source.startswith("google.auth"))
    assert len(str(explain_error(text, DESCRIBE)).splitlines()) == 2


def test_an_operation_s_error_is_told_by_its_message() -> None:
    told = str(explain_error(WORDINGS[0][1], CREATE))
    assert told.startswith('gcloud: There is no more capacity in the zone "us-central1-c"')
