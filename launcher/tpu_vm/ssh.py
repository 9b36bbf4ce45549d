"""Ssh connections to hosts: Fabric connections with gcloud's address, user, key, known-hosts file and host key alias
(`addresses`), so that host keys are checked as gcloud checks them.

Only Fabric's `Connection.open` and `close` are used, which authenticate and set up the transport. Its `run` and `Group`
start four threads a command and host, too many to observe 64 hosts a second. Commands run on a channel of the transport
instead (`_execute`), with one deadline for the whole command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
from fabric import Config as FabricConfig
from fabric import Connection as FabricConnection
from paramiko.hostkeys import HostKeys

from launcher.workstation import Address, ConnectionFailed

# Errors are in the results; keep paramiko from printing tracebacks of its threads.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

_SSH_PORT = 22
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 20.0
_KEEPALIVE_SECONDS = 5
_WAKE_SECONDS = 2.0
_HANDSHAKES = 8  # at once: 64 exceed their time-outs
_CHANNEL_SECONDS = 10.0  # for a host that is connected to answer at all (paramiko would wait for an hour)


class HostKeyUnknown(paramiko.SSHException):
    """No key of the host is known yet; gcloud adds it at its own first connection."""


# The host answers but refuses us; gcloud, which uploads our key and learns host keys, may still get through.
_REFUSALS = (HostKeyUnknown, paramiko.AuthenticationException, paramiko.ssh_exception.IncompatiblePeer)


class HostKeyChanged(paramiko.SSHException):
    """A host shows another key than the known one. Refused at once, which gcloud does after 47 s."""


class _AliasKeys(paramiko.MissingHostKeyPolicy):
    """Checks a host's key under the alias by which gcloud keeps it, and refuses an unknown one."""

    def __init__(self, address: Address, known: Callable[[str], HostKeys]) -> None:
        self.address = address
        self.known = known

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises HostKeyChanged or HostKeyUnknown unless the key is the known one."""
        alias = self.address.alias.lower()  # OpenSSH keeps aliases in lower case
        keys = self.known(self.address.known_hosts).lookup(alias)
        kept = None if keys is None else keys.get(key.get_name())
        subject = f"the host key of worker {self.address.worker} ({hostname})"
        if kept is None:
            raise HostKeyUnknown(f"{subject} is not the one gcloud keeps as {self.address.alias}")
        if kept != key:
            raise HostKeyChanged(
                f"{subject} has changed: another machine answers there, or the host was recreated; "
                f"if you know why: ssh-keygen -f {self.address.known_hosts} -R {alias}"
            )


class SshClient:
    """Opens connections, from several threads at once."""

    def __init__(self) -> None:
        self._handshakes = threading.BoundedSemaphore(_HANDSHAKES)
        self._reading = threading.Lock()
        self._keys: dict[str, paramiko.PKey] = {}  # by file: reading an RSA key takes longer than a handshake
        self._host_keys: dict[tuple[str, float], HostKeys] = {}  # by file and its modification time

    def connect(self, address: Address) -> SshConnection:
        """Opens a connection. Raises ConnectionFailed (`refused` for an unknown host key or a rejected user key)."""
        try:
            with _failures():
                return SshConnection(self._open(address))
        except TimeoutError:
            raise ConnectionFailed(f"can't be reached: no answer within {_CONNECT_SECONDS:.0f} s") from None

    def _open(self, address: Address) -> FabricConnection:
        """Connects, checks the host's key and signs in. Raises OSError (TimeoutError too) and paramiko's errors."""
        # A short time-out for the first packets and a long one for the handshake tell dead hosts from slow ones.
        link = socket.create_connection((address.host, _SSH_PORT), timeout=_CONNECT_SECONDS)
        # Ignore the user's ssh configuration: it must not redirect these connections.
        connection = FabricConnection(
            host=address.host,
            user=address.user,
            config=FabricConfig(lazy=True, overrides={"load_ssh_configs": False}),
            connect_timeout=_HANDSHAKE_SECONDS,
            connect_kwargs={
                "sock": link,
                "pkey": self.key(address.key_file),
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": _HANDSHAKE_SECONDS,
                "auth_timeout": _HANDSHAKE_SECONDS,
                "channel_timeout": _CHANNEL_SECONDS,
            },
        )
        connection.client.set_missing_host_key_policy(_AliasKeys(address, self._known_hosts))
        try:
            with self._handshakes:
                connection.open()
        except BaseException:
            link.close()
            raise
        transport = connection.client.get_transport()
        if transport is not None:
            transport.set_keepalive(_KEEPALIVE_SECONDS)
            transport.sock.settimeout(_WAKE_SECONDS)  # paramiko's thread wakes up ten times a second otherwise
            # A pulled cable shows only in unacknowledged packets, by default after a quarter of an hour. Where the
            # system lacks this option (macOS), commands run into their deadlines.
            if sys.platform == "linux":
                milliseconds = int(_CHANNEL_SECONDS * 1000)
                transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return connection

    def key(self, path: str) -> paramiko.PKey:
        """Returns the private key in a file, read once. Raises paramiko.AuthenticationException if it can't be used."""
        with self._reading:
            if path not in self._keys:
                try:
                    self._keys[path] = self._read_key(path)
                except (TypeError, ValueError, paramiko.pkey.UnknownKeyType) as error:
                    raise paramiko.AuthenticationException(
                        f"the key {path} is locked, or of a kind that only ssh can read"
                    ) from error
            return self._keys[path]

    def _read_key(self, path: str) -> paramiko.PKey:
        # PKey.from_path reads and checks a key twice: for RSA of 3,072 bits, as gcloud makes it, a quarter of a second.
        if not Path(f"{path}-cert.pub").exists():
            with contextlib.suppress(paramiko.SSHException):
                return paramiko.RSAKey.from_private_key_file(path)
        return paramiko.PKey.from_path(path)

    def _known_hosts(self, path: str) -> HostKeys:
        """Returns the host keys in a file, read again when it was modified; none for a missing file."""
        with self._reading:
            version = path, os.stat(path).st_mtime if Path(path).exists() else 0.0
            if version not in self._host_keys:
                host_keys = HostKeys()
                if version[1]:
                    host_keys.load(path)
                self._host_keys = {version: host_keys}
            return self._host_keys[version]


class SshConnection:
    """A connection that Fabric opened; see `launcher.workstation.HostConnection`."""

    def __init__(self, connection: FabricConnection) -> None:
        self._connection = connection

    @property
    def is_open(self) -> bool:
        return bool(self._connection.is_connected)

    def run(self, command: str, *, timeout: float, stdin: str | None) -> tuple[int, str, str]:
        """Runs a command line. Returns exit code, output, error output. Raises TimeoutError, ConnectionFailed."""
        with _failures():
            code, out, err = _execute(self._connection, command, timeout, stdin)
        if code == -1:  # paramiko: the channel closed without a status
            raise ConnectionFailed("the connection closed before the command ended")
        return code, out, err

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        """Runs a command line, and passes its lines to `on_line`. Returns its exit code. Raises as `run`."""
        with _failures():
            code = _follow(self._connection, command, timeout, on_line)
        if code == -1:
            raise ConnectionFailed("the connection closed before the command ended")
        return code

    def close(self) -> None:
        """Closes the connection, also a broken one; commands that run on it fail."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException, AttributeError):  # it may be broken
            # Shut down first: close() waits for the transport's thread.
            self._connection.client.get_transport().sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.close()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turns errors of paramiko and sockets in its block into ConnectionFailed; lets TimeoutError pass."""
    try:
        yield
    except TimeoutError:
        raise
    except paramiko.SSHException as error:
        raise ConnectionFailed(_describe(error), refused=isinstance(error, _REFUSALS)) from error
    except (OSError, EOFError) as error:
        raise ConnectionFailed(_describe(error)) from error


def _execute(connection: FabricConnection, command: str, timeout: float, stdin: str | None) -> tuple[int, str, str]:
    """Runs a command on a channel of its own. Returns its exit code (-1 if the channel closed without one), output and
    error output. Raises TimeoutError after `timeout` seconds, and paramiko's errors for a broken connection."""
    deadline = time.monotonic() + timeout
    with connection.client.get_transport().open_session(timeout=min(timeout, _CHANNEL_SECONDS)) as channel:
        channel.settimeout(timeout)
        channel.exec_command(command)
        if stdin is not None:
            channel.sendall(stdin.encode())
        channel.shutdown_write()
        parts: dict[str, list[bytes]] = {"recv": [], "recv_stderr": []}
        for source, received in parts.items():
            while True:
                channel.settimeout(max(0.01, deadline - time.monotonic()))
                if not (data := getattr(channel, source)(1 << 16)):
                    break
                received.append(data)
        if not channel.status_event.wait(max(0.01, deadline - time.monotonic())):
            raise TimeoutError
        out, err = (b"".join(received).decode(errors="surrogateescape") for received in parts.values())
        return channel.exit_status, out, err


def _follow(connection: FabricConnection, command: str, timeout: float, on_line: Callable[[str], None]) -> int:
    """Runs a command on a channel of its own, and passes each line of its output and error output to `on_line` as it
    comes. Returns its exit code, -1 if the channel closed without one. Raises like `_execute`."""
    deadline = time.monotonic() + timeout
    with connection.client.get_transport().open_session(timeout=min(timeout, _CHANNEL_SECONDS)) as channel:
        channel.set_combine_stderr(True)
        channel.settimeout(timeout)
        channel.exec_command(command)
        rest = b""
        while True:
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            if not (data := channel.recv(1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                on_line(line.decode(errors="replace").removesuffix("\r"))
        if rest:
            on_line(rest.decode(errors="replace"))
        if not channel.status_event.wait(max(0.01, deadline - time.monotonic())):
            raise TimeoutError
        return int(channel.exit_status)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"can't be reached: {error}"
    return str(error) or type(error).__name__
