"""Claims about the table of accelerators: where sizes are offered, and that a generation is one entry."""

import dataclasses

import pytest

from training.accelerators import ACCELERATORS, GENERATIONS, Accelerator, Api, GkeNodes, Offer, accelerator, gke_nodes


@pytest.mark.parametrize(
    ("name", "zones"),
    [
        ("v2-8", ("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c")),
        ("v2-32", ("us-central1-a", "europe-west4-a")),
        ("v3-8", ("us-central1-a", "us-central1-b", "europe-west4-a")),
        ("v3-32", ("europe-west4-a",)),
        ("v4-4096", ("us-central2-b",)),
    ],
)
def test_zones_go_by_size(name: str, zones: tuple[str, ...]) -> None:
    assert accelerator(name).zones() == zones


def test_every_size_is_offered_somewhere_and_gke_offers_those_that_have_nodes() -> None:
    for slice_ in ACCELERATORS.values():
        assert slice_.zones(Api.CLOUD_TPU)
        assert bool(slice_.zones(Api.GKE)) == (slice_.generation.gke is not None)


def test_a_generation_without_the_cloud_tpu_api_is_one_entry() -> None:
    nodes = GkeNodes("tpu7x", "tpu7x-standard-{chips}t")
    offers = (Offer(("us-central1-c",), (Api.GKE, Api.COMPUTE_ENGINE)),)
    v7x = dataclasses.replace(GENERATIONS[-1], name="v7x", prefix="tpu7x", offers=offers, gke=nodes)
    slice_ = Accelerator("tpu7x-16", v7x, (2, 2, 2), 2, 4)
    assert (slice_.zones(Api.CLOUD_TPU), slice_.zones(Api.GKE)) == ((), ("us-central1-c",))
    assert gke_nodes(slice_).machine_type == "tpu7x-standard-4t"
