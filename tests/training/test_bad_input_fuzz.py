"""Whatever a user, another program or a broken disk gives as input is read, or refused by a message with its place.

20,000 inputs by default; TPU_LAUNCH_FUZZ=N takes another number and TPU_LAUNCH_FUZZ_SEED=S another seed. A failure
names its input: `TPU_LAUNCH_FUZZ_CASE=CSV/0/17` makes that one alone.
"""

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.training.bad_input.subjects import SUBJECTS, Subject

INPUTS = int(os.environ.get("TPU_LAUNCH_FUZZ", "20000"))
SEED = int(os.environ.get("TPU_LAUNCH_FUZZ_SEED", "0"))
ONE = os.environ.get("TPU_LAUNCH_FUZZ_CASE", "")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_bad_input_is_told_with_its_place(subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = INPUTS * subject.weight // sum(other.weight for other in SUBJECTS)
    cases = [f"{subject.name}/{SEED}/{number}" for number in range(count)]
    if ONE:
        cases = [ONE] if ONE.startswith(f"{subject.name}/") else []
    outcomes: Counter[bool] = Counter()
    began = time.process_time()
    for case in cases:
        try:
            outcomes[subject.read(tmp_path, Random(case))] += 1
        except Exception as error:
            pytest.fail(f"TPU_LAUNCH_FUZZ_CASE='{case}': {type(error).__name__}: {error!s:.1000}")
    counts = f"{len(cases)} inputs, {outcomes[False]} refused with their place, {outcomes[True]} read"
    with capsys.disabled():
        print(f"\n{subject.name}: {counts}, {time.process_time() - began:.1f} s", end="")
    assert ONE or min(outcomes[True], outcomes[False]) > count / 100, "the grammar makes only one kind of input"
