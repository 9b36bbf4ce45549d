"""Private names of torch_xla in `internals` still do what the trainer needs. Each test says what a change breaks."""

import os

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics

from tests.processes import run_python
from training.backends.torch_xla import internals


@pytest.fixture
def pair() -> list[torch.Tensor]:
    """Two vectors on the device, computed."""
    sent = internals.upload([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])], torch_xla.device(), None)
    xm.wait_device_ops()
    return sent


def test_upload_and_download(pair: list[torch.Tensor]) -> None:
    """Else no batch reaches the devices and no checkpoint leaves them; a snapshot counts as one transfer."""
    assert [tensor.device.type for tensor in pair] == ["xla", "xla"]
    before = xla_metrics.metric_data("TransferFromDeviceTime")
    assert [copy.tolist() for copy in internals.download(pair)] == [[1.0, 2.0], [10.0, 20.0]]
    assert xla_metrics.metric_data("TransferFromDeviceTime")[0] == (before[0] if before else 0) + 1


def test_handles_tell_buffers_apart(pair: list[torch.Tensor]) -> None:
    """Else the step cache gives a program the wrong arguments."""
    first, second = pair
    assert internals.handles([first, second, first.detach()]) == internals.handles([first, second, first])
    assert len(set(internals.handles(pair))) == 2


def test_arguments_of_a_program_in_order(pair: list[torch.Tensor]) -> None:
    """Else the step cache takes state and inputs for constants, and preflight donates the wrong arguments."""
    first, second = pair
    arguments = internals.arguments_of([first * second])
    assert sorted(internals.handles(arguments)) == sorted(internals.handles(pair))


def test_uncomputed_tensors_are_told_from_computed_ones(pair: list[torch.Tensor]) -> None:
    """Else the step cache does not know which buffers of the state a step changes."""
    changed, kept = pair
    changed.add_(1)
    assert list(internals.uncomputed([changed, kept])) == [True, False]


def test_a_program_is_compiled_once_and_started_with_other_arguments(pair: list[torch.Tensor]) -> None:
    """Else cached steps do not run, or run something else."""
    first, second = pair
    traced = first - second
    program = internals.compile_program([traced])
    assert internals.compile_program([second - first]) != b""
    arguments = internals.arguments_of([traced])
    [result] = internals.start_program(program, arguments)
    assert result.cpu().tolist() == [-9.0, -18.0]
    [swapped] = internals.start_program(program, arguments[::-1])
    assert swapped.cpu().tolist() == [9.0, 18.0]
    assert first.cpu().tolist() == [1.0, 2.0], "without donation arguments stay"


def test_what_a_started_program_makes_has_a_handle_before_it_has_ended(pair: list[torch.Tensor]) -> None:
    """Else a step that is traced while another runs takes the state for constants."""
    traced = pair[0] - pair[1]
    arguments = internals.arguments_of([traced])
    results = internals.start_program(internals.compile_program([traced]), arguments)
    internals.wait_for_starts(results)
    assert internals.arguments_of([results[0] + 1])
    assert set(internals.handles(results)).isdisjoint(internals.handles(arguments))


def test_a_donated_argument_is_gone(pair: list[torch.Tensor]) -> None:
    """Else a step needs the memory of its state twice."""
    first, _ = pair
    alias = first.detach()
    traced = first * 3
    [argument] = [value for value in internals.arguments_of([traced]) if value.ndim == 1]
    internals.donate(argument)
    [result] = internals.start_program(internals.compile_program([traced]), internals.arguments_of([traced]))
    assert result.cpu().tolist() == [3.0, 6.0]
    with pytest.raises(RuntimeError, match="Trying to access XLA data"):
        alias.cpu()


def test_programs_read_the_seed_from_this_tensor() -> None:
    """Else a cached step of a network that uses the generator draws the same numbers each time."""
    assert int(internals.seed_tensor(7, torch_xla.device()).cpu()) == 7


def test_numbers_become_constants_of_the_program(pair: list[torch.Tensor]) -> None:
    """Else each dropout has seven arguments more, and starting a step takes longer."""
    first, _ = pair
    assert len(internals.arguments_of([first * 3.75])) == 2
    with internals.numbers_as_constants():
        assert len(internals.arguments_of([first * 4.75])) == 1


def test_a_loop_runs_its_step_over_slices_in_both_directions() -> None:
    """Else the layers of a decoder do not run as a scan. A counter of 64 bits would take the TPU time."""
    [stacked] = internals.upload([torch.tensor([[1.0], [2.0], [3.0]])], torch_xla.device(), None)
    for turned, results in ((0, [[0.0], [2.0], [8.0]]), (1, [[0.0], [6.0], [16.0]])):
        [first] = internals.upload([torch.zeros(1)], torch_xla.device(), None)
        [last], [seen] = internals.loop_over(
            lambda carry, slices: ([2 * (carry[0] + slices[0])], [carry[0] * 1]), [first], [stacked], turned
        )
        assert "(s64[], " not in internals.program_text([last, seen])
        assert seen.cpu().tolist() == results
        assert last.cpu().tolist() == [2 * (results[-1][0] + (1.0 if turned else 3.0))]


def test_the_text_of_a_program_names_scopes(pair: list[torch.Tensor]) -> None:
    """Else preflight can't compile the step, compare it with the run's, or say which module takes memory."""
    first, _ = pair
    with internals.operation_metadata():
        scope = internals.push_scope("my_module")
        traced = first * first
        del scope
        assert internals.program_text([traced]).startswith("HloModule")
        assert b"my_module" in internals.program_proto([traced])
    assert b"my_module" not in internals.program_proto([first + first])


def test_an_event_of_a_profile_changes_no_program(pair: list[torch.Tensor]) -> None:
    """Else `tpu-launch profile` shows no steps, or makes the step another program."""
    first, _ = pair
    plain = internals.program_text([first * 2])
    with internals.trace_event("step", step_num=1):
        assert internals.program_text([first * 2]) == plain


SIMULATED = """
import numpy, torch, torch_xla.distributed.spmd as spmd, torch_xla.runtime
from training.backends.torch_xla import internals
internals.simulate_devices(4)
from training.backends.torch_xla.sharding import DataParallel
from training.distributed.cluster import Cluster
assert torch_xla.runtime.global_runtime_device_count() == 4
mesh = spmd.Mesh(numpy.arange(4), (4,), ("data",))
whole, rows = (torch.ones(8, 2, device=torch_xla.device()) for _ in range(2))
internals.declare_sharding(whole, mesh.get_op_sharding((None, None)))
internals.declare_sharding(rows, mesh.get_op_sharding(("data", None)))
print(internals.read_shardings([whole, rows]))
devices = DataParallel(Cluster(0, ("localhost",)))
part = devices.enter_rows(torch.zeros(8, 3).to(devices.device))
print(list(part.shape), list(devices.leave_rows(part * 2, (8, 3)).shape))
"""


def test_shardings_are_read_back_and_rows_split_by_hand_for_devices_that_are_simulated() -> None:
    """Else preflight does not trace for a slice, a split state is not refused (hosts would wait forever), and a Pallas
    kernel gets the rows of all devices."""
    assert run_python("-c", SIMULATED).splitlines() == ["['{replicated}', '{devices=[4,1]0,1,2,3}']", "[2, 3] [8, 3]"]


def test_a_placeholder_is_an_argument_of_a_program_and_has_a_handle(pair: list[torch.Tensor]) -> None:
    """Else preflight can't trace a model without its weights, or donates the wrong arguments."""
    empty = internals.placeholder((2,))
    arguments = internals.arguments_of([empty * pair[0]])
    assert sorted(internals.handles(arguments)) == sorted(internals.handles([empty, pair[0]]))
    assert "f32[2]" in internals.program_text([empty * pair[0]])


def test_devices_of_this_host_have_names_that_memory_is_asked_by() -> None:
    """Else the device check asks every host for the memory of host 0's first device."""
    assert internals.local_devices() == ["CPU:0"]


def test_a_function_of_jax_runs_inside_a_program(pair: list[torch.Tensor]) -> None:
    """Else long rows have no Pallas kernel."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX loads libtpu, which sets variables for later processes
    shape = pytest.importorskip("jax").ShapeDtypeStruct((2,), "float32")
    function = internals.call_lowered(lambda a, b: (a - b,), [shape, shape], "cpu", "minus")
    assert [value.tolist() for value in function(pair)] == [[-9.0, -18.0]]
