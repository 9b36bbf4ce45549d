"""The registry's protocol as our client speaks it, to the emulated registry over TLS."""

import json
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.emulator.http_server import Disconnected, HttpRequest, HttpResponse, accept_in_thread, json_response
from launcher.errors import BadInput, Exit, LaunchError
from launcher.images import repositories
from launcher.images.layers import BaseImage, append_layers, choose_platform, read_image
from launcher.images.registry import ADDRESS, Blob, ManifestDocument, Registry, _network_reason, sha256
from launcher.images.repositories import RegistryCredentials, from_docker_settings
from launcher.provider import Attempt
from launcher.tpu_vm.host_scripts import start_script
from tests.launcher.script_host import write_program
from tests.servers import HOST, OTHER_HOST, TOKEN, RegistryServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


CODE, NO_DIGEST = "p/images/code", "sha256:" + "0" * 64


def session(password: str = TOKEN) -> Registry:
    """Returns a session that pushes to p/images/code and does not sleep between tries."""
    login = RegistryCredentials("oauth2accesstoken", password)
    return Registry(HOST, lambda host: login, sleep=lambda seconds: None, writes=CODE, reads=["p/images/base"])


@pytest.fixture
def client(registry: RegistryServer) -> Iterator[Registry]:
    with session() as client:
        yield client


def test_an_interrupted_upload_begins_again(registry: RegistryServer, client: Registry) -> None:
    failures = [503, 0]

    def fail(request: HttpRequest) -> HttpResponse | None:
        if request.method != "PUT" or not failures:
            return None
        if status := failures.pop(0):
            return json_response({}, status)
        raise Disconnected("for this test")

    registry.before = fail
    blob = Blob(os.urandom(100_000))
    client.upload(CODE, blob)
    assert client.has_blob(CODE, blob.digest)


def test_a_registry_that_stays_down_or_sends_other_bytes_says_so(registry: RegistryServer, client: Registry) -> None:
    registry.before = lambda request: json_response({"errors": [{"code": "UNAVAILABLE", "message": "down"}]}, 503)
    with pytest.raises(LaunchError, match=r"failed 5 times.*503: down") as caught:
        client.read_manifest(CODE, "tag")
    assert caught.value.transient
    registry.before = lambda request: HttpResponse(200, b"{}") if "manifests" in request.path else None
    with pytest.raises(LaunchError, match="sent another manifest"):
        client.read_manifest(CODE, NO_DIGEST)


@pytest.mark.usefixtures("registry")
def test_a_refused_login_is_a_permission_error_without_the_token() -> None:
    with session("wrong-secret") as client, pytest.raises(LaunchError, match="refuses these") as caught:
        client.find_manifest(CODE, "tag")
    assert caught.value.exit_code == Exit.PERMISSION
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("way", ["redirect", "upload"])
def test_only_the_registrys_host_gets_an_authorization(registry: RegistryServer, client: Registry, way: str) -> None:
    """`localhost`, a server with a valid certificate to which the registry sends the client, demands a login."""
    elsewhere, seen = f"localhost:{registry.address.rpartition(':')[2]}", []

    def answer(request: HttpRequest) -> HttpResponse | None:
        if request.headers["Host"] == elsewhere:
            seen.append((request.method, request.headers.get("Authorization")))
            realm = f'Bearer realm="https://{elsewhere}/v2/token",service="x"'
            return HttpResponse(401, b"", {"WWW-Authenticate": realm})
        if not request.headers.get("Authorization") or request.path == "/v2/token":
            return None
        target = {"Location": f"https://{elsewhere}/other"}
        if way == "redirect" and "/manifests/" in request.path:
            return HttpResponse(307, b"", target)
        return HttpResponse(202, b"", target) if request.method == "POST" else None

    registry.before = answer
    assert not client.has_blob(CODE, NO_DIGEST)  # has a token from now on
    with pytest.raises(LaunchError, match=r"refuses these credentials \(401\)"):
        client.require_manifest(CODE, "v1") if way == "redirect" else client.upload(CODE, Blob(b"layer"))
    assert seen == [("GET" if way == "redirect" else "PUT", None)]


@pytest.mark.parametrize("host", ["evildocker.io", "europe-docker-pkg.dev", "evilgcr.io"])
def test_similar_names_get_neither_googles_token_nor_docker_hubs_password(host: str, tmp_path: Path) -> None:
    hub = {"auths": {"https://index.docker.io/v1/": {"auth": "YTpi"}}}
    assert from_docker_settings(hub, host, tmp_path) is None
    assert from_docker_settings(hub, repositories.DOCKER_HUB, tmp_path) == RegistryCredentials("a", "b")
    assert not repositories.is_google(host)
    for server, known in ((host, ""), (HOST, HOST)):
        attempt = Attempt("r", 0, f"{server}/p/i@sha256:{'1' * 64}", ("true",), {})
        assert f"registry={known or chr(39) * 2}\n" in start_script(attempt, ["10.0.0.1"], "v4-8")


def test_other_authorities_are_refused(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    with session() as client, pytest.raises(BadInput, match="does not trust"):
        client.find_manifest(CODE, "tag")
    assert registry.asked == []
    wrong = {"https_proxy": ("http://me:se/cret@proxy:1", "http://:1"), ADDRESS: ("somewhere", "here:65536", "here:0")}
    for variable, value in ((variable, value) for variable, values in wrong.items() for value in values):
        monkeypatch.setenv(variable, value)
        with pytest.raises(BadInput, match=r"must be (http://\S+)?HOST:PORT"):
            session()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("unable to get local issuer certificate", "name its CA bundle as image.ca_bundle"),
        ("Missing Authority Key Identifier", "install tpu-launch with Python 3.12"),
        ("Basic Constraints of CA cert not marked critical", "install tpu-launch with Python 3.12"),
        ("CA cert does not include key usage extension", "install tpu-launch with Python 3.12"),
    ],
)
def test_the_advice_fits_what_is_wrong_with_a_certificate(reason: str, advice: str) -> None:
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {reason} (_ssl.c:1020)"  # as OpenSSL says
    with pytest.raises(BadInput, match=advice):
        _network_reason(HOST, ssl.SSLCertVerificationError(1, text))


def test_the_environments_proxy_is_used_with_login(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    def tunnel(connection: socket.socket) -> None:
        connection.setblocking(True)
        heads.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        registry.serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        end = accept_in_thread(proxy, tunnel)
        monkeypatch.delenv(ADDRESS)
        monkeypatch.setenv("https_proxy", f"http://me:secret%21@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with session() as client:
            assert client.find_manifest(CODE, "tag") is None
        end.close()
    assert heads[0].startswith(f"CONNECT {HOST}:443 ".encode())
    assert RegistryCredentials("me", "secret!").basic.encode() in heads[0]


def test_a_manifest_sent_under_another_digest_is_not_kept(client: Registry) -> None:
    empty = ManifestDocument("application/vnd.oci.image.index.v1+json", b'{"manifests": []}')
    with pytest.raises(LaunchError, match="the manifest is sha256:"):
        client.write_manifest(CODE, NO_DIGEST, empty)
    assert client.find_manifest(CODE, sha256(empty.body)) is None


def test_names_of_images_are_parsed_and_malformed_ones_refused() -> None:
    for name, parts in {
        "eu.gcr.io/p/i:t": ("eu.gcr.io", "p/i", "t", ""),
        f"localhost:5000/a@{NO_DIGEST}": ("localhost:5000", "a", "", NO_DIGEST),
        "[::1]/a/b": ("[::1]", "a/b", "", ""),
        "debian:bookworm": ("registry-1.docker.io", "library/debian", "bookworm", ""),
        "docker.io/a/b": ("registry-1.docker.io", "a/b", "", ""),
    }.items():
        assert repositories.parse_reference(name) == repositories.Reference(*parts)
    for name in ("gcr.io/P/i", "gcr.io/p/i:", "gcr.io/p@sha256:1", "gcr.io/", "", "gcr.io/p/../q", "h:65536/p"):
        with pytest.raises(BadInput, match="not the name of an image"):
            repositories.parse_reference(name)


def test_credentials_come_from_dockers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = r"{\"Username\": \"me\", \"Secret\": \"of $name\"}"
    write_program(tmp_path, "docker-credential-test", f'read name; echo "{answer}"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = from_docker_settings({"credHelpers": {OTHER_HOST: "test"}}, OTHER_HOST, tmp_path)
    assert found == RegistryCredentials("me", f"of {OTHER_HOST}")
    stored = {"auths": {OTHER_HOST: {"auth": RegistryCredentials("a", "b:c").basic.removeprefix("Basic ")}}}
    assert from_docker_settings(stored, OTHER_HOST, tmp_path) == RegistryCredentials("a", "b:c")
    assert from_docker_settings({"auths": {}}, OTHER_HOST, tmp_path) is None
    assert "b:c" not in repr(found)


def test_the_image_for_tpu_vms_is_chosen_from_an_index() -> None:
    def choose(*architectures: str) -> str | None:
        entries = [
            {"digest": f"sha256:{number}", "platform": {"os": "linux", "architecture": architecture}}
            for number, architecture in enumerate(architectures)
        ]
        body = json.dumps({"manifests": entries}).encode()
        return choose_platform(ManifestDocument("application/vnd.oci.image.index.v1+json", body), "name")

    assert choose("arm64", "amd64", "unknown") == "sha256:1"
    with pytest.raises(BadInput, match="no image for linux/amd64"):
        choose("arm64")
    assert choose_platform(ManifestDocument(MANIFEST, b"{}"), "name") is None


def read(body: object, config: object = None) -> BaseImage:
    """Reads an image of these documents."""
    manifest = ManifestDocument(MANIFEST, body if isinstance(body, bytes) else json.dumps(body).encode())
    return read_image(manifest, lambda digest, size: json.dumps(config).encode(), "name")


ENTRY = {"digest": "sha256:1", "size": 1}
AMD = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": ["sha256:1"]}}


def test_damaged_documents_other_platforms_and_too_many_layers_are_refused() -> None:
    one = {"config": ENTRY, "layers": [ENTRY]}
    for body in (b"", b"[]", b"{}", b'{"config": {}, "layers": []}'):
        with pytest.raises(BadInput, match=r"^name: its manifest"):
            read(body)
    for config, why in (({}, "damaged"), ({**AMD, "architecture": "arm64"}, "is for linux/arm64")):
        with pytest.raises(BadInput, match=why):
            read(one, config)
    with pytest.raises(BadInput, match="too many"):
        append_layers(read({**one, "layers": [ENTRY] * 126}, AMD), [])


def test_an_image_that_docker_only_named_says_how_to_get_its_bytes(registry: RegistryServer, client: Registry) -> None:
    registry.state.pushed[f"{HOST}/{CODE}"] = {"named": "sha256:1"}
    with pytest.raises(BadInput, match="--full-pushes"):
        client.require_manifest(CODE, "named")
    with pytest.raises(BadInput, match="has no p/images/code/manifests/absent") as caught:
        client.require_manifest(CODE, "absent")
    assert "--full-pushes" not in str(caught.value)
