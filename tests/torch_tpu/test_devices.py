"""`tpu-train check-devices` with TorchTPU: four processes on a virtual v4-8 try their chips, and one reports."""

from tests.processes import run_python
from training.device_check import find_problems, parse_facts


def test_a_host_reports_the_chips_of_all_its_processes_once() -> None:
    printed = run_python("-m", "training.cli", "check-devices", "--backend", "torch-tpu", seconds=500)
    facts = parse_facts(printed.splitlines())
    seen = {name: facts[name] for name in ("devices", "devices_expected", "slice_devices", "wrong_products", "sum")}
    assert seen == {"devices": 4, "devices_expected": 4, "slice_devices": 4, "wrong_products": 0, "sum": 4.0}
    assert find_problems(facts, hosts=1, accelerator_type="v4-8") == []
    assert printed.count('check-devices {"sum"') == 1
