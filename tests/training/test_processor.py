"""A slow processor is reported to the user."""

from pathlib import Path

from training.backends.torch_xla.processor import describe_slow_products, read_flags

CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_1 {}\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\n"


def described(folder: Path, features: str) -> str | None:
    (folder / "cpuinfo").write_text(CPUINFO.format(features))
    return describe_slow_products(read_flags(folder / "cpuinfo"))


def test_a_processor_without_wide_instructions_is_slow(tmp_path: Path) -> None:
    assert described(tmp_path, "avx avx2 fma avx512f avx512bw avx512vl avx512dq") is None
    assert described(tmp_path, "avx avx2 fma avx512f") == described(tmp_path, "avx avx2 fma")
    assert described(tmp_path, "avx avx2 fma").startswith("this processor has AVX2 and no AVX-512: ")
    assert "has no AVX2: " in (described(tmp_path, "avx") or "")


def test_an_unknown_processor_is_not_reported(tmp_path: Path) -> None:
    assert describe_slow_products(read_flags(tmp_path / "absent")) is None
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert describe_slow_products(read_flags(tmp_path / "arm")) is None
