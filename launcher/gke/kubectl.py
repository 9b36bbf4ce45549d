"""Runs kubectl, and explains its errors. Every call has a time-out; `explain` is pure.

The patterns in `_MEANINGS` match messages of kubectl 1.32 and of API servers; the more specific ones come first.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from launcher.errors import Exit, LaunchError
from launcher.workstation import Workstation

SECONDS = 20.0  # the time-out of one request
JOBSET_RELEASE = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl in one namespace of one cluster."""

    machine: Workstation
    context: str | None  # None: kubectl's current one
    namespace: str

    def argv(self, *words: str, seconds: float | None = SECONDS) -> list[str]:
        """Returns the command line. kubectl gives up a request after `seconds` (None: never)."""
        context = ["--context", self.context] if self.context else []
        timeout = [] if seconds is None else [f"--request-timeout={seconds:.0f}s"]
        return ["kubectl", *context, "--namespace", self.namespace, *timeout, *words]

    def call(self, *words: str, input: str | None = None, seconds: float = SECONDS) -> str:
        """Runs a command, given `input` on stdin, and returns its stdout. Raises CommandTimeout after `seconds` + 10,
        else the LaunchError that explains its failure."""
        argv = self.argv(*words, seconds=seconds)
        result = self.machine.run(argv, timeout=seconds + 10, input=input)
        if not result.ok:
            raise explain(result.stderr, argv)
        return result.stdout

    def follow(
        self,
        *words: str,
        on_line: Callable[[str], None],
        on_start: Callable[[Callable[[], None]], object],
        seconds: float,
    ) -> None:
        """Runs a command that watches or follows until it ends; `on_line` gets lines of stdout and stderr. `on_start`
        is given a function that ends it, which is no error; after `seconds` it ends itself, because it would survive
        this process being killed. Raises CommandTimeout after `seconds` + 10, else the LaunchError that explains its
        failure."""
        argv = self.argv(*words, seconds=seconds)
        result = self.machine.stream(argv, on_line, timeout=seconds + 10, on_start=on_start)
        if result.returncode > 0:
            raise explain(result.stdout[-2000:], argv)


class NotTaken(LaunchError):
    """The cluster's API server did not take the request: the error says nothing about a host."""


# Lacks kubectl's own time-outs: a request that the server has taken may wait for a host.
_NOT_TAKEN = (
    r"\(TooManyRequests\)|The connection to the server|Unable to connect to the server:.* (dial|EOF|TLS|reset)|"
    r"getting credentials:|You must be logged in to the server"
)
# (pattern of kubectl's error output, exit code, message; {0}, {1} ... are the pattern's groups)
_MEANINGS: tuple[tuple[str, Exit, str], ...] = (
    (r"context \"?([^\"\n]+?)\"? does not exist|no context exists with the name: \"([^\"]+)\"|"
     r"context was not found for specified context: (\S+)", Exit.BAD_INPUT,
     "kubectl has no context {0}: `kubectl config get-contexts` lists its contexts, `gcloud container clusters "
     "get-credentials CLUSTER --location LOCATION --project PROJECT` adds one; then correct gke.context"),
    (r"current-context is not set|server localhost:8080 was refused|\[::1\]:8080|127\.0\.0\.1:8080", Exit.BAD_INPUT,
     "kubectl knows no cluster: `gcloud container clusters get-credentials CLUSTER --location LOCATION --project "
     "PROJECT`, or set gke.context"),
    (r"gke-gcloud-auth-plugin.*(?:not found|no such file)", Exit.BAD_INPUT,
     "kubectl lacks GKE's login: install gke-gcloud-auth-plugin (`gcloud components install "
     "gke-gcloud-auth-plugin`)"),
    (r"(Max retries exceeded|NewConnectionError|NameResolutionError|name resolution)[\s\S]*getting credentials:",
     Exit.CLOUD_ERROR,
     "Google does not answer kubectl's login ({0}): can your network reach it?"),  # of gcloud, in the plugin's message
    (r"\(Unauthorized\)|You must be logged in to the server|getting credentials: (.*)", Exit.PERMISSION,
     "the cluster does not accept your login: `gcloud auth login`, then `gcloud container clusters get-credentials "
     "...` again"),
    (r"is forbidden: exceeded quota: ([^,\s]+)(.*)", Exit.QUOTA,
     "the namespace's ResourceQuota {0} is used up{1}: end another run, or have the quota raised"),
    (r"is forbidden: violates (PodSecurity .*)", Exit.BAD_INPUT,
     "the namespace refuses the run's pods, which violate {0}: use another one; docs/guide/gke.md says what they need"),
    (r"User \"([^\"]+)\" cannot (\S+) resource \"([^\"]+)\"(?: in API group \"[^\"]*\")?(?: in the namespace "
     r"\"([^\"]+)\")?", Exit.PERMISSION,
     "{0} may not {1} {2} in namespace {3}: grant the role in k8s/role.yaml"),
    (r"\(Forbidden\): (.*)", Exit.PERMISSION, "the cluster refuses: {0}"),
    (r"doesn't have a resource type \"jobsets?\"|no matches for kind \"JobSet\"|"
     r"could not find the requested resource.*jobset", Exit.BAD_INPUT,
     "the cluster has no JobSet: its administrator installs it with `kubectl apply --server-side -f "
     f"{JOBSET_RELEASE}`"),
    (r"namespaces? \"([^\"]+)\" not found", Exit.BAD_INPUT,
     "the cluster has no namespace {0}: `kubectl create namespace {0}`, or correct gke.namespace"),
    (r"strict decoding error: (.*)", Exit.BAD_INPUT,
     f"the cluster's JobSet is older than the release that the manifest needs ({JOBSET_RELEASE}): {{0}}"),
    (r"admission webhook \"([^\"]+)\" denied the request: (.*)", Exit.BAD_INPUT, "the cluster's {0} refuses it: {1}"),
    (r"\(AlreadyExists\): (.*)", Exit.CONFLICT, "another client created it first: {0}"),
    (r"\(NotFound\): (jobsets.*)", Exit.CONFLICT, "{0}: another client deleted it: run again"),
    (r" is invalid: ([\s\S]*)", Exit.BAD_INPUT, "the cluster refuses the manifest: {0}"),
    (r"x509: (.*)|certificate (?:signed by unknown|has expired|is not trusted).*", Exit.CLOUD_ERROR,
     "the cluster's certificate is not trusted ({0}): `gcloud container clusters get-credentials ...` again"),
    (r"The connection to the server (\S+) was refused|Unable to connect to the server: (.*)|(i/o timeout|"
     r"TLS handshake timeout|no such host)|(context deadline exceeded|Client\.Timeout exceeded)|"
     r"(unexpected EOF|connection reset by peer)", Exit.CLOUD_ERROR,
     "the cluster does not answer ({0}): is it running, and can your network reach it?"),
    (r"\((TooManyRequests|ServiceUnavailable|InternalError|Timeout|ServerTimeout)\): (.*)", Exit.CLOUD_ERROR,
     "the cluster's API server fails ({1}): try again in a minute"),
)  # fmt: skip


def explain(stderr: str, argv: list[str]) -> LaunchError:
    """Returns the error to raise for a failed kubectl command: what happened, and what to do. NotTaken: its request did
    not reach the API server, or was refused for too many others or without a login."""
    for pattern, code, meaning in _MEANINGS:
        if match := re.search(pattern, stderr):
            groups = [group.strip() for group in match.groups() if group is not None] or [match.group(0)]
            kind = NotTaken if re.search(_NOT_TAKEN, stderr) else LaunchError
            return kind(meaning.format(*groups, "?", "?", "?"), exit_code=code)
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return LaunchError(f"{shlex.join(argv)} failed: {' '.join(lines[-3:]) if lines else 'it gave no reason'}")
