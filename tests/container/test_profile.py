"""A profile of a trainer at work, by the profiler of torch_xla."""

from pathlib import Path

from tests.profiled_run import require_a_profile


def test_a_profile_names_steps_and_their_parts_and_changes_no_bit(tmp_path: Path) -> None:
    require_a_profile(tmp_path)
