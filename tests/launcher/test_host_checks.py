"""Claims about the look at all hosts before a start."""

import subprocess

import pytest

from launcher.tpu_vm.host_checks import Facts, parse, problems, script, table

GOOD = {
    "worker": "0",
    "time": "1000",
    "engine": "20.10",
    "image": "sha256:ab",
    "runs": "",
    "free_kb": "99999999",
    "holders": "",
    "done": "yes",
}


def facts(index: int = 0, **changes: str) -> Facts:
    return Facts(index, {**GOOD, "worker": str(index), **changes}, asked=999.5, answered=1001.0)


def test_good_hosts_have_no_problems() -> None:
    assert problems([facts(0), facts(1)], 2, image_bytes=10**10) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": ""}, "engine does not answer"),
        ({"runs": "other-1"}, "run other-1 is on this host"),
        ({"worker": "3"}, "says worker 3"),
        ({"holders": "4711:python3 4712:my_job"}, "held by python3 (process 4711), my_job (process 4712)"),
        ({"image": "", "free_kb": "1000"}, "the image needs"),
        ({"done": ""}, "did not answer the checks"),
    ],
)
def test_what_would_make_the_run_fail_is_fatal_and_names_host_and_fix(changes: dict[str, str], expected: str) -> None:
    found = problems([facts(0), facts(1, **changes)], 2, image_bytes=10**10)
    assert len(found) == 1
    assert found[0].fatal
    assert found[0].worker == 1
    assert expected in found[0].what
    assert "host 1" in table(found)
    assert "fix: " in table(found)


def test_a_wrong_clock_is_told_but_does_not_stop() -> None:
    found = problems([facts(0, time="4600")], 1)
    assert [problem.fatal for problem in found] == [False]
    assert "clock" in found[0].what


def test_a_full_disk_does_not_matter_where_the_image_is_already() -> None:
    assert problems([facts(0, free_kb="1")], 1, image_bytes=10**10) == []


def test_a_missing_host_is_a_problem_of_the_slice() -> None:
    assert problems([facts(0)], 2)[0].worker == -1


def test_the_script_is_valid_shell_and_its_facts_are_read_back() -> None:
    text = script("repo@sha256:ab", "run'1", "tpu-launch.run")
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    read = parse("noise\ntpu-launch-fact worker 1\ntpu-launch-fact runs \ntpu-launch-fact holders 1:a 2:b \n")
    assert read == {"worker": "1", "runs": "", "holders": "1:a 2:b"}
