"""The registry's protocol as our client speaks it, to the emulated registry over TLS."""

import contextlib
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.emulator.http_server import Disconnected, HttpRequest, HttpResponse, accept_in_thread, json_response
from launcher.errors import BadInput, Exit, LaunchError
from launcher.images import registry, repositories
from launcher.images.layers import BaseImage, append_layers, choose_platform, read_image
from launcher.images.registry import ADDRESS, Blob, ManifestDocument, Registry, sha256
from launcher.images.repositories import RegistryCredentials, from_docker_settings
from launcher.provider import Attempt
from launcher.tpu_vm.host_scripts import start_script
from tests.launcher.script_host import write_program
from tests.servers import HOST, OTHER_HOST, TOKEN, RegistryServer, serve

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    with serve(tmp_path / "server", monkeypatch) as served:
        yield served


def session(host: str = HOST, password: str = TOKEN) -> Registry:
    """Returns a session that pushes to p/images/code and does not sleep between tries."""
    login = RegistryCredentials("oauth2accesstoken", password)
    images = {"writes": "p/images/code", "reads": ["p/images/base"]}
    return Registry(host, lambda host: login, sleep=lambda seconds: None, **images)


def test_an_interrupted_upload_begins_again(server: RegistryServer) -> None:
    failures = [503, 0]

    def fail(request: HttpRequest) -> HttpResponse | None:
        if request.method != "PUT" or not failures:
            return None
        if status := failures.pop(0):
            return json_response({}, status)
        raise Disconnected("for this test")

    server.before = fail
    blob = Blob(os.urandom(100_000))
    with session() as registry:
        registry.upload("p/images/code", blob)
        assert registry.has_blob("p/images/code", blob.digest)


def test_a_registry_that_stays_down_is_an_error_that_says_why(server: RegistryServer) -> None:
    server.before = lambda request: json_response({"errors": [{"code": "UNAVAILABLE", "message": "down"}]}, 503)
    with session() as registry, pytest.raises(LaunchError, match=r"failed 5 times.*503: down") as caught:
        registry.read_manifest("p/images/code", "tag")
    assert caught.value.transient


def test_a_refused_login_is_a_permission_error_without_the_token(server: RegistryServer) -> None:
    with session(password="wrong-secret") as registry, pytest.raises(LaunchError, match="refuses these") as caught:
        registry.find_manifest("p/images/code", "tag")
    assert caught.value.exit_code == Exit.PERMISSION
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("way", ["redirect", "upload"])
def test_only_the_registrys_own_host_gets_an_authorization(server: RegistryServer, way: str) -> None:
    """`localhost`, a server with a valid certificate to which the registry sends the client, demands a login."""
    elsewhere, seen = f"localhost:{server.address.rpartition(':')[2]}", []

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

    server.before = answer
    with session() as registry:
        assert not registry.has_blob("p/images/code", "sha256:" + "1" * 64)  # has a token from now on
        ask = {
            "redirect": lambda: registry.require_manifest("p/images/code", "v1"),
            "upload": lambda: registry.upload("p/images/code", Blob(b"layer")),
        }
        with pytest.raises(LaunchError, match=r"refuses these credentials \(401\)"):
            ask[way]()
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


def test_other_authorities_are_refused(server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    with session() as registry, pytest.raises(BadInput, match="does not trust"):
        registry.find_manifest("p/images/code", "tag")
    assert server.asked == []
    for wrong in ("somewhere", "here:65536", "here:0"):
        monkeypatch.setenv(ADDRESS, wrong)
        with pytest.raises(BadInput, match="must be HOST:PORT"):
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
    """In OpenSSL's words."""
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {reason} (_ssl.c:1020)"
    with pytest.raises(BadInput, match=advice):
        registry._network_reason(HOST, ssl.SSLCertVerificationError(1, text))


def test_the_environments_proxy_is_used_with_its_login(server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    def tunnel(connection: socket.socket) -> None:
        connection.setblocking(True)
        heads.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as upstream:
            back = threading.Thread(target=copy, args=(upstream, connection), daemon=True)
            back.start()
            copy(connection, upstream)
            back.join(5)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        end = accept_in_thread(proxy, tunnel)
        monkeypatch.delenv(ADDRESS)
        monkeypatch.setenv("https_proxy", f"http://me:secret%21@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with session() as registry:
            assert registry.find_manifest("p/images/code", "tag") is None
        end.close()
    assert heads[0].startswith(f"CONNECT {HOST}:443 ".encode())
    assert RegistryCredentials("me", "secret!").basic.encode() in heads[0]


def test_a_manifest_sent_under_another_digest_is_not_kept(server: RegistryServer) -> None:
    empty = ManifestDocument("application/vnd.oci.image.index.v1+json", b'{"manifests": []}')
    with session() as registry:
        with pytest.raises(LaunchError, match="the manifest is sha256:"):
            registry.write_manifest("p/images/code", "sha256:" + "0" * 64, empty)
        assert registry.find_manifest("p/images/code", sha256(empty.body)) is None


def test_a_manifest_with_other_bytes_than_its_digest_is_refused(server: RegistryServer) -> None:
    server.before = lambda request: HttpResponse(200, b"{}") if "manifests" in request.path else None
    with session() as registry, pytest.raises(LaunchError, match="sent another manifest"):
        registry.read_manifest("p/images/code", "sha256:" + "0" * 64)


def test_names_of_images_are_parsed_and_malformed_ones_refused() -> None:
    digest = "sha256:" + "1" * 64
    for name, parts in {
        "eu.gcr.io/p/i:t": ("eu.gcr.io", "p/i", "t", ""),
        f"localhost:5000/a@{digest}": ("localhost:5000", "a", "", digest),
        "debian:bookworm": ("registry-1.docker.io", "library/debian", "bookworm", ""),
        "docker.io/a/b": ("registry-1.docker.io", "a/b", "", ""),
    }.items():
        parsed = repositories.parse_reference(name)
        assert (parsed.host, parsed.path, parsed.tag, parsed.digest) == parts
    for name in ("gcr.io/P/i", "gcr.io/p/i:", "gcr.io/p@sha256:1", "gcr.io/", "", "gcr.io/p/../q"):
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
    entries = [
        {"digest": f"sha256:{number}", "platform": {"os": "linux", "architecture": architecture}}
        for number, architecture in enumerate(["arm64", "amd64", "unknown"])
    ]
    index = "application/vnd.oci.image.index.v1+json"
    assert choose_platform(ManifestDocument(index, json.dumps({"manifests": entries}).encode()), "name") == "sha256:1"
    with pytest.raises(BadInput, match="no image for linux/amd64"):
        choose_platform(ManifestDocument(index, json.dumps({"manifests": entries[:1]}).encode()), "name")
    assert choose_platform(ManifestDocument(MANIFEST, b"{}"), "name") is None


ENTRY = {"digest": "sha256:1", "size": 1}


def read(config: object, layers: int = 1) -> BaseImage:
    """Reads an image with this configuration."""
    body = json.dumps({"config": ENTRY, "layers": [ENTRY] * layers}).encode()
    return read_image(ManifestDocument(MANIFEST, body), lambda digest, size: json.dumps(config).encode(), "name")


AMD = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": ["sha256:1"]}}


def test_damaged_documents_and_other_platforms_are_refused() -> None:
    for body in (b"", b"[]", b"{}", b'{"config": {}, "layers": []}'):
        with pytest.raises(BadInput, match=r"^name: its manifest"):
            read_image(ManifestDocument(MANIFEST, body), lambda digest, size: b"", "name")
    with pytest.raises(BadInput, match="damaged"):
        read({})
    with pytest.raises(BadInput, match="is for linux/arm64"):
        read({**AMD, "architecture": "arm64"})


def test_an_image_takes_no_more_layers_than_engines_do() -> None:
    with pytest.raises(BadInput, match="too many"):
        append_layers(read(AMD, layers=126), [])


def test_an_image_that_docker_only_named_says_how_to_get_its_bytes(server: RegistryServer) -> None:
    server.state.pushed[f"{HOST}/p/images/code"] = {"named": "sha256:1"}
    with session() as registry:
        with pytest.raises(BadInput, match="--full-pushes"):
            registry.require_manifest("p/images/code", "named")
        with pytest.raises(BadInput, match="has no p/images/code/manifests/absent") as caught:
            registry.require_manifest("p/images/code", "absent")
    assert "--full-pushes" not in str(caught.value)
