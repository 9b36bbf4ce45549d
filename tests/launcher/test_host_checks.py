"""Claims about the look at all hosts before a start."""

import time

import pytest

from launcher.findings import format_findings
from launcher.tpu_vm.host_checks import HostFacts, check_script, judge_hosts, parse_facts
from launcher.tpu_vm.host_scripts import HUGE_PAGES
from tests.launcher.script_host import ScriptHost

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


def facts(index: int = 0, **changes: str) -> HostFacts:
    return HostFacts(index, {**GOOD, "worker": str(index), **changes}, begin=999.5, end=1001.0)


def test_good_hosts_have_no_problems() -> None:
    assert judge_hosts([facts(0), facts(1)], 2, image_bytes=10**10) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": ""}, "engine does not answer"),
        ({"runs": "other-1"}, "run other-1 is on this host"),
        ({"worker": "3"}, "says worker 3"),
        ({"holders": "4711:python3 4712:my_job"}, "held by python3 (process 4711), my_job (process 4712)"),
        ({"image": "", "free_kb": "1000"}, "the image needs"),
        ({"done": ""}, "did not run the checks"),
    ],
)
def test_what_would_make_the_run_fail_is_fatal_and_names_host_and_fix(changes: dict[str, str], expected: str) -> None:
    found = judge_hosts([facts(0), facts(1, **changes)], 2, image_bytes=10**10)
    assert len(found) == 1
    assert found[0].fatal
    assert found[0].where == "host 1"
    assert expected in found[0].message
    assert "host 1" in format_findings(found)
    assert "fix: " in format_findings(found)


def test_a_wrong_clock_is_told_but_does_not_stop() -> None:
    found = judge_hosts([facts(0, time="4600")], 1)
    assert [finding.fatal for finding in found] == [False]
    assert "clock" in found[0].message


def test_a_full_disk_does_not_matter_where_the_image_is_already() -> None:
    assert judge_hosts([facts(0, free_kb="1")], 1, image_bytes=10**10) == []


def test_a_missing_host_is_a_problem_of_the_slice() -> None:
    assert judge_hosts([facts(0)], 2)[0].where == "slice"


def test_the_facts_that_the_script_prints_are_read_back() -> None:
    facts = parse_facts("noise\ntpu-launch-fact worker 1\ntpu-launch-fact runs \ntpu-launch-fact holders 1:a 2:b \n")
    assert facts == {"worker": "1", "runs": "", "holders": "1:a 2:b"}


def test_a_host_prints_its_facts_and_other_runs_than_this_one(host: ScriptHost, shell: str) -> None:
    host.answer("image inspect", "echo sha256:ab")
    host.answer("ps", 'printf "run\'1\\nother-1\\nother-2\\n"')
    values = parse_facts(host.run(check_script("repo@sha256:ab", "run'1", "v4-8"), shell))
    assert (values["worker"], values["engine"], values["image"]) == ("3", "up", "sha256:ab")
    assert values["runs"] == "other-1 other-2"
    assert host.verbs == ["image", "ps"], "its engine shows that it is up by having the image"
    assert values["done"] == "yes"
    (finding,) = judge_hosts([HostFacts(3, {**values, "holders": ""}, time.time(), time.time())], 1)
    assert finding.occupied_by == "other-1"


def test_a_host_without_the_image_says_whether_its_engine_is_up_and_what_room_there_is(
    host: ScriptHost, shell: str
) -> None:
    host.answer("info", "echo 20.10 /")
    values = parse_facts(host.run(check_script("repo@sha256:ab", "run-1", "v4-8"), shell))
    assert (values["engine"], values["image"]) == ("20.10", "")
    assert values["free_kb"].isdigit()
    host.answer("info", "exit 1")
    values = parse_facts(host.run(check_script("repo@sha256:ab", "run-1", "v4-8"), shell))
    (finding,) = judge_hosts([HostFacts(3, {**values, "holders": ""}, time.time(), time.time())], 1)
    assert "its container engine does not answer" in finding.message


@pytest.mark.parametrize(
    ("setting", "writable", "told"),
    [
        ("[always] madvise never", False, False),
        ("always [madvise] never", True, False),
        ("madvise [never]", False, True),
    ],
)
def test_huge_pages_that_can_not_be_switched_on_are_told(
    host: ScriptHost, shell: str, setting: str, *, writable: bool, told: bool
) -> None:
    path = host.folder / "pages"
    path.write_text(setting + "\n")
    if not writable:
        host.replace("sudo", "exit 1")
    script = check_script("repo@sha256:ab", "run-1", "v5litepod-8").replace(HUGE_PAGES, str(path))
    values = parse_facts(host.run(script, shell))
    assert values["done"] == "yes"
    assert path.read_text() == setting + "\n", "a check changes nothing"
    findings = judge_hosts([facts(3, huge_pages_kept=values.get("huge_pages_kept", ""))], 1)
    assert [finding.fatal for finding in findings] == [False] * told
    assert all(setting in finding.message for finding in findings)
