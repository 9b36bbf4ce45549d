#!/usr/bin/python3
"""The guest agent of an emulated TPU VM, the container's entry point: does what Google's agents do inside a VM.

At boot it adds the metadata server's address to the loopback interface and opens listeners in this host's own network
and file system: 169.254.169.254:80 (metadata), 127.0.0.1:4443 and :443 (Cloud Storage, plain and under Google's names)
and /var/run/docker.sock. It passes them to the emulator over a unix socket (SCM_RIGHTS), which accepts on them
directly: so the emulator knows each request's host, relays no byte, and listens on no outside network. When the
emulator restarts, the listeners are passed again; connections made meanwhile wait in the backlog.

Then it makes ssh host keys at the first boot and publishes them as guest attributes, starts sshd, runs
`startup-script`, and keeps a user with sudo and docker for each ssh key of the metadata.

The host may be killed at any moment and started again: each step of the boot may be repeated, and authorized_keys is
replaced by a rename.
"""

import contextlib
import grp
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

METADATA = "http://169.254.169.254/computeMetadata/v1/"
EMULATOR = "/.emulator/agent.sock"
DOCKER = "/var/run/docker.sock"
USER_NAME = re.compile(r"^[a-z_][a-z0-9_-]{0,31}$")
MARK = "# Added by Google"


def log(message):
    print(f"guest-agent: {message}", file=sys.stderr, flush=True)


def open_listeners():
    """Opens and returns the listeners for the emulator, in the order that it expects: metadata, storage, storage over
    TLS, engine."""
    subprocess.run(["ip", "address", "replace", "169.254.169.254/32", "dev", "lo"], check=True)
    metadata = socket.create_server(("169.254.169.254", 80), backlog=512)
    storage = socket.create_server(("127.0.0.1", 4443), backlog=512)
    secure_storage = socket.create_server(("127.0.0.1", 443), backlog=512)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(DOCKER)
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    engine.bind(DOCKER)
    os.chown(DOCKER, 0, grp.getgrnam("docker").gr_gid)
    os.chmod(DOCKER, 0o660)
    engine.listen(512)
    return metadata, storage, secure_storage, engine


def hand_over(listeners):
    """Passes the listeners to the emulator, and again whenever it restarts. Never returns."""
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
                control.connect(EMULATOR)
                socket.send_fds(control, [b"listeners"], [listener.fileno() for listener in listeners])
                while control.recv(1):  # until the emulator disconnects
                    pass
        except OSError:
            pass
        time.sleep(0.1)


def request_metadata(path, data=None, timeout=30):
    """Reads a value from the metadata server, or writes `data` to it; returns the response's text and ETag ("0" without
    one). Raises OSError, for a status other than 2xx HTTPError."""
    request = urllib.request.Request(
        METADATA + path, data=data, method="GET" if data is None else "PUT", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read().decode(), response.headers.get("ETag", "0")


def put_metadata(path, data):
    """Writes a value; logs each failure and retries until the metadata server accepts it."""
    while True:
        try:
            request_metadata(path, data)
            return
        except (OSError, ValueError) as error:
            log(f"{path}: {error}")
            time.sleep(0.3)


def make_host_keys():
    for kind in ("ed25519", "ecdsa"):
        path = f"/etc/ssh/ssh_host_{kind}_key"
        if not os.path.exists(path):
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)


def start_sshd():
    """Starts sshd and returns its process once it accepts connections. Ends this process if sshd ends before."""
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    process = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e"])
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", 22), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.02)
    raise SystemExit(f"sshd ended with {process.returncode}")


def publish_host_keys():
    """Writes the public ssh host keys and the host's name into the guest attributes; blocks until they are accepted."""
    # gcloud reads the name when it connects through IAP.
    put_metadata("instance/guest-attributes/tpu/hostname", socket.gethostname().encode())
    for kind in ("ecdsa", "ed25519"):
        with open(f"/etc/ssh/ssh_host_{kind}_key.pub") as file:
            name, value = file.read().split()[:2]
        put_metadata(f"instance/guest-attributes/hostkeys/{name}", value.encode())


def parse_keys(attributes):
    """Parses values of `ssh-keys` (lines of "user:key"); returns each user's keys that have not expired."""
    users = {}
    for line in "\n".join(attributes).splitlines():
        user, separator, key = line.strip().partition(":")
        if not separator or not USER_NAME.match(user):
            continue
        if " google-ssh " in key:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                expires = json.loads(key.split(" google-ssh ", 1)[1])["expireOn"]
                if datetime.strptime(expires, "%Y-%m-%dT%H:%M:%S%z") < datetime.now(UTC):
                    continue
        users.setdefault(user, []).append(key)
    return users


def apply_keys(users, before):
    """Creates missing users and gives all exactly these keys; users only in `before` lose theirs."""
    for user, keys in users.items():
        try:
            account = pwd.getpwnam(user)
        except KeyError:
            # No password matches "*"; with "!" sshd would treat the account as locked.
            command = ["useradd", "--create-home", "--shell", "/bin/bash", "--password", "*"]
            command += ["--groups", "docker,google-sudoers", user]
            subprocess.run(command, check=True)
            account = pwd.getpwnam(user)
        write_keys(account, keys)
    for user in set(before) - set(users):
        with contextlib.suppress(KeyError):
            write_keys(pwd.getpwnam(user), [])


def write_keys(account, keys):
    """Replaces the keys from the metadata and keeps those that the user added."""
    folder = os.path.join(account.pw_dir, ".ssh")
    path = os.path.join(folder, "authorized_keys")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    own = []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        lines = file.read().splitlines()
        own = [line for i, line in enumerate(lines) if line != MARK and (i == 0 or lines[i - 1] != MARK)]
    with open(path + ".new", "w") as file:
        file.write("".join(line + "\n" for line in own) + "".join(f"{MARK}\n{key}\n" for key in keys))
    os.chmod(path + ".new", 0o600)
    for name in (folder, path + ".new"):
        os.chown(name, account.pw_uid, account.pw_gid)
    os.rename(path + ".new", path)


def follow_metadata():
    """Keeps the users' keys equal to the metadata's; never returns. Expired keys go at a change or after a minute."""
    etag, before = "0", {}
    while True:
        try:
            text, etag = request_metadata(
                f"?recursive=true&wait_for_change=true&timeout_sec=60&last_etag={etag}", timeout=90
            )
            value = json.loads(text)
            sources = [value["instance"]["attributes"]]
            if sources[0].get("block-project-ssh-keys", "").lower() != "true":
                sources.append(value["project"]["attributes"])
            users = parse_keys([source.get("ssh-keys", "") for source in sources])
            apply_keys(users, before)
            before = users
        except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
            log(f"following the metadata: {error}")
            time.sleep(0.5)


def run_startup_script():
    """Runs the metadata's startup-script, if there is one, with its output in /var/log/startup-script.log, and waits
    for its end."""
    try:
        script, _ = request_metadata("instance/attributes/startup-script")
    except urllib.error.HTTPError:
        return
    path = "/root/.startup-script"
    with open(path, "w") as file:
        file.write(script if script.startswith("#!") else "#!/bin/bash\n" + script)
    os.chmod(path, 0o700)
    # gcloud's own variable for the address of the Cloud TPU API, which has a public name on Google's network.
    environment = {**os.environ, "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": "http://169.254.169.254/"}
    with open("/var/log/startup-script.log", "ab") as sink:
        ended = subprocess.run([path], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd="/", env=environment)
    log(f"startup-script ended with {ended.returncode}")


def main():
    """Boots the host and runs until sshd ends or SIGTERM arrives."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listeners = open_listeners()
    threading.Thread(target=hand_over, args=(listeners,), daemon=True).start()
    make_host_keys()
    sshd = start_sshd()
    publish_host_keys()
    threading.Thread(target=run_startup_script, daemon=True).start()
    threading.Thread(target=follow_metadata, daemon=True).start()
    try:
        sys.exit(sshd.wait())
    finally:
        if sshd.poll() is None:
            sshd.terminate()


if __name__ == "__main__":
    main()
