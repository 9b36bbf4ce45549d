"""The image's allocator: jemalloc, with which starting a step takes less than with glibc's."""

from pathlib import Path


def test_the_image_allocates_with_jemalloc() -> None:
    assert "/libjemalloc.so.2" in Path("/proc/self/maps").read_text()
