"""Cloud Storage under Google's own names over TLS, for TensorFlow's gs://, whose endpoints are compiled in (tsl's
gcs_file_system.cc).

On an emulated host these names resolve to its loopback interface, where the emulator answers with its own certificate.
Each server creates a new CA and discards the CA's key. CURL_CA_BUNDLE in a container names a file with this CA and the
machine's own ones, so TLS to other servers is not affected. The token comes from the metadata server, as on a TPU VM.

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
    """Returns a server's TLS context for these names under a new CA. Writes `folder`/ca.pem: it and the system CAs."""
    now = datetime.now(UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tpu-launch emulator")])

    def certificate(name: x509.Name, public_key: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().issuer_name(ca_name).subject_name(name).public_key(public_key)
        # Valid since a day ago: the machine's clock may be set back while the emulator runs.
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        builder = builder.not_valid_after(now + timedelta(days=_DAYS))
        # RFC 5280 demands both identifiers; clients on Python 3.13 verify strictly.
        own_id = x509.SubjectKeyIdentifier.from_public_key(public_key)
        ca_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        builder = builder.add_extension(own_id, critical=False).add_extension(ca_id, critical=False)
        return builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)

    own = certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]), key.public_key(), ca=False)
    own = own.add_extension(
        x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
    ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed = own.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    ca = (
        certificate(ca_name, ca_key.public_key(), ca=True)
        .add_extension(_signs_certificates(), critical=True)
        .sign(ca_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = folder / "tls.pem"
    write_private_bytes(pair, secret + signed)  # load_cert_chain takes files only
    context.load_cert_chain(pair)
    pair.unlink()
    candidates = (ssl.get_default_verify_paths().cafile or "", *_SYSTEM_CAS)
    others = next((Path(path).read_bytes() for path in candidates if os.path.isfile(path)), b"")
    # Write in place: running containers have this file mounted.
    (folder / CA_FILE).write_bytes(ca + others)
    (folder / CA_FILE).chmod(0o644)
    return context


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=False,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def serve_tls(connection: socket.socket, context: ssl.SSLContext, handler: Handler) -> None:
    """Answers the requests of one connection to Cloud Storage's names."""
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
