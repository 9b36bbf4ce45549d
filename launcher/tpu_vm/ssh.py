"""Ssh connections to hosts: Fabric connections with gcloud's address, user, key, known-hosts file and host key alias
(`addresses`), so that host keys are checked as gcloud checks them.

Only Fabric's `Connection.open` and `close` are used, which authenticate and set up the transport. Its `run` and `Group`
start four threads a command and host, too many to observe 64 hosts a second. Commands run on a channel of the transport
instead, with one deadline for the whole command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import paramiko
from fabric import Config as FabricConfig
from fabric import Connection as FabricConnection
from paramiko.hostkeys import HostKeys, InvalidHostKey

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


class _AliasKeys(paramiko.MissingHostKeyPolicy):
    """Checks a host's key under the alias by which gcloud keeps it, and refuses an unknown one."""

    def __init__(self, address: Address, known: Callable[[str], HostKeys]) -> None:
        self.address, self.known = address, known

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises HostKeyUnknown for an unknown key, SSHException for another key than the known one. The latter is no
        refusal, after which gcloud would be tried: gcloud refuses the host too, after 47 s."""
        alias = self.address.alias.lower()  # OpenSSH keeps aliases in lower case
        keys = self.known(self.address.known_hosts).lookup(alias)
        kept = None if keys is None else keys.get(key.get_name())
        subject = f"the host key of worker {self.address.worker} ({hostname})"
        if kept is None:
            raise HostKeyUnknown(f"{subject} is not the one gcloud keeps as {self.address.alias}")
        if kept != key:
            raise paramiko.SSHException(
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
        """Opens a connection. Raises ConnectionFailed, `refused` for an unknown host key, or a user key that the host
        rejects or only ssh can read."""
        try:
            with _translate_failures():
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
        """Returns the private key in a file, read once. Raises paramiko.AuthenticationException if it is locked or of a
        kind that only ssh can read, else as `_read_key`."""
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
        """Returns the private key in a file. Raises OSError, ValueError, TypeError, paramiko's errors."""
        # PKey.from_path reads and checks a key twice: for RSA of 3,072 bits, as gcloud makes it, a quarter of a second.
        if not Path(f"{path}-cert.pub").exists():
            with contextlib.suppress(paramiko.SSHException):
                return paramiko.RSAKey.from_private_key_file(path)
        return paramiko.PKey.from_path(path)

    def _known_hosts(self, path: str) -> HostKeys:
        """Returns the host keys in a file, read again when it was modified; none for a missing file. Raises
        HostKeyUnknown for a damaged one, of which gcloud's ssh uses the other lines."""
        with self._reading:
            version = path, os.stat(path).st_mtime if Path(path).exists() else 0.0
            if version not in self._host_keys:
                host_keys = HostKeys()
                if version[1]:
                    try:
                        host_keys.load(path)
                    except (InvalidHostKey, ValueError, OverflowError) as error:
                        raise HostKeyUnknown(f"{path}: remove the damaged line: {error!s:.200}") from error
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
        """Runs a command line with the input `stdin` (None: empty). Returns exit code, output, error output. All
        three have surrogates for bytes that are not UTF-8. Raises TimeoutError after `timeout` seconds (a second later
        while output comes), and ConnectionFailed: the command may have run, and may still run."""
        deadline = time.monotonic() + timeout
        with _translate_failures(), self._open_channel(timeout) as channel:
            channel.exec_command(command)
            if stdin is not None:
                channel.sendall(stdin.encode(errors="surrogateescape"))
            channel.shutdown_write()
            out, err = [b"".join(_receive(channel, read, deadline)) for read in (channel.recv, channel.recv_stderr)]
            code = _wait_for_exit_code(channel, deadline)
        return code, out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape")

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        """Runs a command line, whose standard input stays open, and passes each line of its output and error output to
        `on_line` as it comes, with U+FFFD for bytes that are not UTF-8. Returns its exit code. Raises as `run`, and
        what `on_line` raises, which ends the channel."""
        deadline = time.monotonic() + timeout
        # `on_line` is called outside `_translate_failures`: an OSError of the terminal or the disk is the caller's.
        with self._open_channel(timeout) as channel:
            with _translate_failures():
                channel.set_combine_stderr(True)
                channel.exec_command(command)
            for line in _lines(_receive(channel, channel.recv, deadline)):
                on_line(line.decode(errors="replace").removesuffix("\r"))
            return _wait_for_exit_code(channel, deadline)

    @contextlib.contextmanager
    def _open_channel(self, timeout: float) -> Iterator[paramiko.Channel]:
        """Opens a channel for one command, in `timeout` seconds or, if less, 10, and closes it after the block. Raises
        ConnectionFailed, TimeoutError; a wait in the block for more than `timeout` raises TimeoutError."""
        if (transport := self._connection.client.get_transport()) is None:
            raise ConnectionFailed("another thread closed the connection")
        with _translate_failures():
            channel = transport.open_session(timeout=min(timeout, _CHANNEL_SECONDS))
        channel.settimeout(timeout)
        try:
            yield channel
        finally:
            with _translate_failures():
                channel.close()

    def close(self) -> None:
        """Closes the connection, also a broken one; commands that run on it fail."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException, AttributeError):  # it may be broken
            # Shut down first: close() waits for the transport's thread.
            self._connection.client.get_transport().sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.close()


@contextlib.contextmanager
def _translate_failures() -> Iterator[None]:
    """Turns errors of paramiko and sockets in its block into ConnectionFailed; lets TimeoutError pass."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise ConnectionFailed(f"can't be reached: {error}") from error
    except (paramiko.SSHException, EOFError) as error:
        text = str(error) or type(error).__name__
        raise ConnectionFailed(text, refused=isinstance(error, _REFUSALS)) from error


def _receive(channel: paramiko.Channel, read: Callable[[int], bytes], deadline: float) -> Iterator[bytes]:
    """Yields what a channel receives until its end. Raises ConnectionFailed; TimeoutError if it does not end by the
    deadline (monotonic clock): when nothing comes for 10 ms after it, or something still comes a second later."""
    while True:
        channel.settimeout(max(0.01, deadline - time.monotonic()))
        with _translate_failures():
            data = read(1 << 16)
        if not data:
            return
        yield data
        if time.monotonic() > deadline + 1:
            raise TimeoutError


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of an output that arrives in pieces, without their ends; the last one may have had none."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _wait_for_exit_code(channel: paramiko.Channel, deadline: float) -> int:
    """Returns the exit code of the channel's command. Raises TimeoutError after the deadline (monotonic clock), and
    ConnectionFailed if the channel closed without one."""
    if not channel.status_event.wait(max(0.01, deadline - time.monotonic())):
        raise TimeoutError
    if channel.exit_status == -1:
        raise ConnectionFailed("the connection closed before the command ended")
    return int(channel.exit_status)
