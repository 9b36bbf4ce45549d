"""Claims about the repository of images; tests/rehearsal/test_fault_matrix.py makes it with the real gcloud."""

import pytest

from launcher.images import artifact_registry as registries


@pytest.mark.parametrize(
    "image", ["repository/image", "repository/deeper/image:tag", "repository/image@sha256:00", "repository"]
)
def test_location_project_and_name_are_read_from_an_images_name(image: str) -> None:
    found = registries.parse(f"us-central2-docker.pkg.dev/my-project/{image}")
    assert found == registries.Repository("us-central2", "my-project", "repository")


@pytest.mark.parametrize(
    "name",
    ["gcr.io/p/image", "docker.io/library/debian", "us-docker.pkg.dev.evil.example/p/r/i", "us-docker.pkg.dev/p"],
)
def test_other_registries_are_left_alone(name: str) -> None:
    assert registries.parse(name) is None
    assert "create it in that registry" in registries.advice(name)


def test_advice_for_a_missing_repository_is_the_command_that_creates_it_privately() -> None:
    found = registries.parse("us-central2-docker.pkg.dev/p/r/i:t")
    command = " ".join(found.create_command)
    assert command.startswith(
        "gcloud artifacts repositories create r --project=p --location=us-central2 --quiet --repository-format=docker"
    )
    assert "allUsers" not in command
    assert "gcloud artifacts repositories create r" in registries.advice("us-central2-docker.pkg.dev/p/r/i:t")
