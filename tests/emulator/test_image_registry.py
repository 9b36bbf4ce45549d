"""The registry without bytes: hosts can run what was pushed, under the names it was pushed as, and nothing else."""

import json

from launcher.emulator.vm import image_registry as registry

REPOSITORY = "us-central2-docker.pkg.dev/p/repo/image"
IMAGE = "sha256:" + "1" * 64


def test_names_of_googles_registries_are_recognised_and_others_are_the_engines() -> None:
    for name in (REPOSITORY, "gcr.io/p/i:t", "eu.gcr.io/p/i@sha256:1", "europe-docker.pkg.dev/a/b/c"):
        assert registry.is_registry(name)
    for name in ("debian:bookworm-slim", "docker.io/library/x", "notgcr.io/p/i", "gcr.io.evil.com/i", "gcr.io"):
        assert not registry.is_registry(name)


def test_a_pushed_image_is_found_by_tag_and_by_digest_and_stays_when_the_tag_moves() -> None:
    pushed: dict[str, dict[str, str]] = {}
    registry.enter(pushed, REPOSITORY, "latest", IMAGE)
    assert registry.resolve(pushed, REPOSITORY) == IMAGE
    assert registry.resolve(pushed, f"{REPOSITORY}:other") is None
    other = "sha256:" + "2" * 64
    registry.enter(pushed, REPOSITORY, "latest", other)
    assert registry.resolve(pushed, f"{REPOSITORY}:latest") == other
    assert registry.resolve(pushed, f"{REPOSITORY}@{IMAGE}") == IMAGE


def test_a_push_ends_with_the_digest_where_docker_reads_it() -> None:
    lines = [json.loads(line) for line in registry.push_progress(REPOSITORY, ["t"], IMAGE).splitlines()]
    assert lines[-1]["aux"] == {"Tag": "t", "Digest": IMAGE, "Size": 2000}
    assert f"t: digest: {IMAGE} size: 2000" in [line.get("status") for line in lines]


def test_inspect_lists_each_digest_once() -> None:
    image = {"Id": IMAGE, "RepoDigests": ["docker.io/x@sha256:3"]}
    pushed = {REPOSITORY: {"t": IMAGE, IMAGE: IMAGE}, "gcr.io/p/other": {"t": "sha256:2", "sha256:2": "sha256:2"}}
    shown = registry.with_digests(image, pushed)
    assert shown["RepoDigests"] == ["docker.io/x@sha256:3", f"{REPOSITORY}@{IMAGE}"]
    assert registry.with_digests(shown, pushed) == shown
