"""Claims about the findings of `tpu-train check`: which compilation is expected, which is a finding, and its line."""

from training.lint import HOST, PROGRAM, SHAPE, VALUE, LintFinding, StepChecker, StepTrace, TracedOperation

FOUR, FIVE = {"x": (4, 8)}, {"x": (5, 8)}


def step(compiled: int = 0, *findings: LintFinding, numbers: tuple[int, ...] = (1,), transfers: int = 0) -> StepTrace:
    rolls = [TracedOperation("roll", f"([4, 8], {number})", "m.py:2") for number in numbers]
    operations = [TracedOperation("addmm", "([4, 8])", "m.py:1"), *rolls]
    return StepTrace(list(findings), operations, compiled, transfers)


def check_steps(*steps: tuple[dict[str, tuple[int, ...]], StepTrace], expected: int = 1) -> list[LintFinding]:
    checker = StepChecker(expected)
    for number, (shapes, trace) in enumerate(steps):
        checker.add_step(number, shapes, trace)
    return checker.findings()


def test_the_first_step_of_each_announced_shape_may_compile() -> None:
    assert check_steps((FOUR, step(1)), (FOUR, step()), (FIVE, step(1)), (FIVE, step()), expected=2) == []


def test_a_changing_number_is_reported_once_with_its_line() -> None:
    [finding] = check_steps(*((FOUR, step(1, numbers=(number,))) for number in range(4)))
    assert (finding.rule, finding.place) == (PROGRAM, "m.py:2")
    assert "roll([4, 8], 1) after ([4, 8], 0)" in finding.message
    assert finding.message.endswith("(3 times)")


def test_a_recompilation_names_a_new_or_missing_operation_if_there_is_one() -> None:
    [finding] = check_steps((FOUR, step(1)), (FOUR, step(1, numbers=(1, 2))))
    assert "roll([4, 8], 2) where nothing was before; every step must do the same" in finding.message
    [finding] = check_steps((FOUR, step(1)), (FOUR, step(1, numbers=())))
    assert str(finding).startswith("m.py:2: another program: step 1 compiled again: roll is missing; every step")
    [finding] = check_steps((FOUR, step(1)), (FOUR, step(1)))
    assert (finding.rule, finding.place) == (PROGRAM, "")


def test_compilations_that_a_finding_explains_are_not_reported() -> None:
    for rule in (SHAPE, VALUE, HOST):
        earlier = LintFinding(rule, "m.py:3", "asked")
        [finding] = check_steps((FOUR, step(2, earlier)), (FOUR, step(1, earlier)))
        assert (finding.rule, finding.message) == (rule, "asked (2 times)")


def test_unexplained_transfers_are_reported() -> None:
    earlier = LintFinding(VALUE, "m.py:3", "asked")
    assert check_steps((FOUR, step(1, earlier, transfers=1))) == [earlier]
    assert [str(finding) for finding in check_steps((FOUR, step(1, transfers=2)))] == [
        "somewhere: value on the host: 2 transfer(s) to the host within a step"
    ]
