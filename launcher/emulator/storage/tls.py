"""Cloud Storage under Google's own names over TLS, for TensorFlow's gs://, whose endpoints are compiled in (tsl's
gcs_file_system.cc).

On an emulated host these names resolve to its loopback interface, where the emulator answers with its own certificate.
Each server creates a new certificate, which is its own issuer and can sign no other. CURL_CA_BUNDLE in a container
names a file with this certificate and the machine's own CAs, so TLS to other servers is not affected. The token comes
from the metadata server, as on a TPU VM.

TensorFlow reads whole objects by the XML API's paths (`GET /bucket/object`), and calls the JSON API otherwise.
"""

import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from launcher.emulator.http_server import Handler, HttpRequest, HttpResponse, serve_http
from launcher.home import write_private_bytes

NAMES = ("storage.googleapis.com", "www.googleapis.com")
CA_FILE = "ca.pem"  # in the emulator's private folder, and from there in containers
_JSON = ("storage", "upload", "download", "resumable")
_DAYS = 365
_SYSTEM_CAS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


def tls_context(folder: Path, names: Sequence[str] = NAMES) -> ssl.SSLContext:
    """Returns a server's TLS context for these names with a new certificate, which is its own issuer. Writes
    `folder`/ca.pem: it and the system CAs."""
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tpu-launch emulator")])
    extensions: dict[x509.ExtensionType, bool] = {  # each, and whether it is critical
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.SubjectAlternativeName([x509.DNSName(each) for each in names]): False,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        # RFC 5280 demands both identifiers; clients on Python 3.13 verify strictly.
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()): False,
    }
    # Valid since a day ago: the machine's clock may be set back while the emulator runs.
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=_DAYS))
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = folder / "tls.pem"
    write_private_bytes(pair, secret + certificate)  # load_cert_chain takes files only
    context.load_cert_chain(pair)
    pair.unlink()
    candidates = (ssl.get_default_verify_paths().cafile or "", *_SYSTEM_CAS)
    others = next((Path(path).read_bytes() for path in candidates if os.path.isfile(path)), b"")
    # Write in place: running containers have this file mounted.
    (folder / CA_FILE).write_bytes(certificate + others)
    (folder / CA_FILE).chmod(0o644)
    return context


def serve_tls(connection: socket.socket, context: ssl.SSLContext, handler: Handler) -> None:
    """Answers the HTTPS requests of a connection to Cloud Storage's names with `handler`, and closes the connection."""
    serve_secure(connection, context, lambda request: answer(request, handler))


def serve_secure(connection: socket.socket, context: ssl.SSLContext, handler: Handler) -> None:
    """Answers the requests of one TLS connection and closes it; returns at once when the handshake fails."""
    connection.setblocking(True)
    connection.settimeout(30)
    try:
        secure = context.wrap_socket(connection, server_side=True)
    except OSError:
        return
    secure.settimeout(None)
    serve_http(secure, handler)
    secure.close()


def answer(request: HttpRequest, handler: Handler) -> HttpResponse:
    """Answers a request under Google's names. The URL of a resumable upload becomes https."""
    response = handler(as_json_api(request))
    location = response.headers.get("Location", "")
    if location.startswith("http://"):
        response.headers["Location"] = "https://" + location.removeprefix("http://")
    return response


def as_json_api(request: HttpRequest) -> HttpRequest:
    """Returns a GET of `/bucket/object` as a download of the JSON API, and requests of that API unchanged."""
    parts = request.path.strip("/").split("/")
    if parts[0] in _JSON or len(parts) < 2:
        return request
    bucket, name = parts[0], "%2F".join(parts[1:])
    path = f"/download/storage/v1/b/{bucket}/o/{name}"
    return replace(request, path=path, query={**request.query, "alt": "media"})
