"""What is said of steps that were watched: which compilation is expected, which is a finding, and of which line."""

from __future__ import annotations

from training.lint.rules import HOST, PROGRAM, SHAPE, VALUE, Finding, Judge, Operation, Watched, merged

FOUR, FIVE = {"x": (4, 8)}, {"x": (5, 8)}


def step(compilations: int = 0, *findings: Finding, numbers: tuple[int, ...] = (1,), transfers: int = 0) -> Watched:
    operations = [
        Operation("addmm", "([4, 8])", "m.py:1"),
        *(Operation("roll", f"([4, 8], {each})", "m.py:2") for each in numbers),
    ]
    return Watched(list(findings), operations, compilations, transfers)


def judged(*steps: tuple[dict[str, tuple[int, ...]], Watched], expected: int = 1) -> list[Finding]:
    judge = Judge(expected)
    for number, (shapes, watched) in enumerate(steps):
        judge.see(number, shapes, watched)
    return judge.findings()


def test_the_first_step_of_each_announced_shape_may_compile() -> None:
    assert judged((FOUR, step(1)), (FOUR, step()), (FIVE, step(1)), (FIVE, step()), expected=2) == []


def test_a_shape_that_was_not_announced_is_named_after_the_one_before() -> None:
    [found] = judged((FOUR, step(1)), (FIVE, step(1, numbers=(9,))))
    assert (found.rule, found.place) == (PROGRAM, "m.py:2")
    assert "step 1 has a new shape: x [5, 8], after x [4, 8]" in found.message


def test_a_number_that_changes_is_named_with_its_line_once() -> None:
    [found] = judged(*((FOUR, step(1, numbers=(number,))) for number in range(4)))
    assert (found.rule, found.place) == (PROGRAM, "m.py:2")
    assert "roll([4, 8], 1) after ([4, 8], 0)" in found.message
    assert found.message.endswith("(3 times)")


def test_a_step_that_does_more_than_before_is_told_by_what_it_does_more() -> None:
    [found] = judged((FOUR, step(1)), (FOUR, step(1, numbers=(1, 2))))
    assert "roll([4, 8], 2) where nothing was before; every step must do the same" in found.message


def test_a_compilation_without_a_difference_is_told_too() -> None:
    [found] = judged((FOUR, step(1)), (FOUR, step(1)))
    assert (found.rule, found.place) == (PROGRAM, "")


def test_pieces_of_a_broken_step_are_no_findings_of_their_own() -> None:
    for rule in (SHAPE, VALUE, HOST):
        asked = Finding(rule, "m.py:3", "asked")
        [found] = judged((FOUR, step(2, asked)), (FOUR, step(1, asked)))
        assert (found.rule, found.message) == (rule, "asked (2 times)")


def test_transfers_that_no_line_explains_are_told() -> None:
    asked = Finding(VALUE, "m.py:3", "asked")
    assert judged((FOUR, step(1, asked, transfers=1))) == [asked]
    assert [str(each) for each in judged((FOUR, step(1, transfers=2)))] == [
        "somewhere: value on the host: 2 transfer(s) to the host within a step"
    ]


def test_what_breaks_a_rule_in_training_and_in_evaluation_is_told_once() -> None:
    first, other = Finding(VALUE, "m.py:3", "asked (4 times)"), Finding(SHAPE, "m.py:4", "masked")
    assert merged([first], [Finding(VALUE, "m.py:3", "asked (2 times)"), other]) == [first, other]
