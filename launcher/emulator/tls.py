"""HTTPS under Google's own names: storage on emulated hosts, and the registry.

Each server creates a new certificate, which is its own issuer and can sign no other. CURL_CA_BUNDLE in a container
names a file with this certificate and the machine's own CAs, so TLS to other servers is not affected.
"""

import os
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from launcher.emulator.http_server import Handler, serve_http
from launcher.home import write_private

CA_FILE = "ca.pem"  # in the emulator's private folder, and from there in containers
_DAYS = 365
_SYSTEM_CAS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


def tls_context(folder: Path, names: Sequence[str]) -> ssl.SSLContext:
    """Returns a server's TLS context for these names with a new certificate, valid for a year, which is its own issuer.
    Writes the certificate and the system's CAs to `folder`/ca.pem."""
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
    write_private(pair, secret + certificate)  # load_cert_chain takes files only
    context.load_cert_chain(pair)
    pair.unlink()
    candidates = (ssl.get_default_verify_paths().cafile or "", *_SYSTEM_CAS)
    others = next((Path(path).read_bytes() for path in candidates if os.path.isfile(path)), b"")
    # Write in place: running containers have this file mounted.
    (folder / CA_FILE).write_bytes(certificate + others)
    (folder / CA_FILE).chmod(0o644)
    return context


def serve_tls(connection: socket.socket, context: ssl.SSLContext, handler: Handler) -> None:
    """Answers the requests of one TLS connection and closes it; returns when the handshake fails or lasts over 30 s."""
    connection.settimeout(30)
    try:
        secure = context.wrap_socket(connection, server_side=True)
    except OSError:
        return
    secure.settimeout(None)
    serve_http(secure, handler)
    secure.close()
