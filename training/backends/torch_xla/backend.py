"""PyTorch/XLA: one process a host, on TPU and on CPU, behind `protocol.Backend`.

On TPU (and with CPU_NUM_DEVICES above 1) the process is a member of an SPMD program: arrays are sharded by rows over a
mesh of all devices of all hosts, the state is replicated, and the compiler adds the gradient sum. On a CPU there is one
device a process and no collective between processes (two processes would silently train apart), so the gradients of the
host batch come to the host, are added by gloo, and go back: two programs a step instead of one.

Few programs: everything that changes with the step (learning rate, bias corrections, the seed of dropout) reaches the
device as data, never as a constant, and the state is uploaded in one way whether it is fresh or restored. Weights and
moments are fp32; bf16 is autocast.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch_xla.utils.dlpack import to_dlpack

from training.backends.protocol import SUMS, Arrays, Asks, Outcome
from training.backends.torch_xla import counters as torch_counts
from training.backends.torch_xla.dropout import row_keys
from training.backends.torch_xla.model import SUMS_OF, build, own_parts
from training.checkpoint.safetensors_file import Damaged, TensorSpec
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.data.sampling.order import host_rows
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.models.hugging_face import ModelRequirements
from training.optim.schedule import adam_numbers, step_seed
from training.preflight.agreement import CheckedPrograms
from training.tasks.task import HostBatch, Task

_EXTRA = len(SUMS) + 2  # the sums and the asks travel behind the gradients
_ROW_KEYS = "row_keys"  # beside a batch's arrays: what dropout draws from


class TorchXla:
    """A model and its AdamW on the devices of this slice."""

    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        needs: ModelRequirements,
        token: str,
    ) -> None:
        self._config, self._train, self._cluster = config, config.train, cluster
        many = os.environ.get("PJRT_DEVICE") == "TPU" or int(os.environ.get("CPU_NUM_DEVICES") or 1) > 1
        self._spmd = many or xla_runtime.is_spmd()  # preflight says so, where there is one device
        if self._spmd and not xla_runtime.is_spmd():
            xla_runtime.use_spmd()
        self._device = torch_xla.device()
        self.devices = xla_runtime.global_runtime_device_count() if self._spmd else cluster.hosts
        self._mesh = spmd.Mesh(np.arange(self.devices), (self.devices,), ("data",)) if self._spmd else None
        self._exchange = None
        if cluster.hosts > 1 and not self._spmd:
            from training.backends.torch_xla.gloo import Exchange

            self._exchange = Exchange(cluster, rendezvous, token, config.rendezvous.seconds)
        self.in_flight = 0 if self._exchange else 2 if self._spmd else 1
        rendezvous.set_phase("building the model")
        self._network: Any = build(config.model, needs, dropout=self._train.dropout, seed=config.seed)
        self._noise = own_parts(self._network, self._train.remat, otherwise="attention" if self._spmd else "none")
        self._agreement = CheckedPrograms(os.environ, comparable=self._spmd, talks=cluster.is_first)
        self._sums = SUMS_OF[config.task]
        # By earlier runs in this process.
        self._compiled_before, self._counted_before, self._fallbacks_before = (
            torch_counts.compiled(),
            torch_counts.transfers(),
            torch_counts.fallbacks(),
        )
        self._copying = Snapshot()
        self._meant = 0  # transfers to the host that were asked for here
        self._name_state()
        self._moments = [
            {name: torch.zeros_like(value, requires_grad=False) for name, value in self._parameters.items()}
            for _ in range(2)
        ]
        self._uploaded = False

    def _name_state(self) -> None:
        self._parameters: dict[str, Tensor] = dict(self._network.named_parameters())  # tied ones once
        norms = {name for name, module in self._network.named_modules() if isinstance(module, torch.nn.LayerNorm)}
        self._decayed = {
            name for name in self._parameters if not name.endswith("bias") and name.rpartition(".")[0] not in norms
        }

    # --- steps

    def step(self, number: int, batch: Arrays, asks: Asks) -> _PendingStep:
        # Every tensor that is alive at a sync becomes an output of its program. So gradients live in no variable here.
        if not self._exchange:
            sums = self.traced_step(number, batch, asks)
            self._agreement.look("training", _shapes(batch), lambda: [*self.state().values(), sums])
            self._before_change()
            torch_xla.sync()
            return _PendingStep(self, sums)
        numbers = self._numbers(number)
        flat = self._flat(*self._gradients(number, batch, asks))
        torch_xla.sync()
        on_host = self.to_host(flat)
        self._exchange.sum(on_host)
        flat = on_host.to(self._device)
        self._apply(*self._unflat(flat), numbers)
        self._before_change()
        torch_xla.sync()
        return _PendingStep(self, on_host[-_EXTRA:])

    def traced_step(self, number: int, batch: Arrays, asks: Asks) -> Tensor:
        """A step that has not run: its sums, and the state becomes what the step makes of it. What a host without other
        hosts runs at the next sync."""
        numbers = self._numbers(number)
        return self._on_all(self._apply(*self._gradients(number, batch, asks), numbers))

    def _numbers(self, number: int) -> Tensor:
        """(3,) of the schedule, after putting the state on the devices and seeding PyTorch's generator, for networks
        that use it."""
        self._upload()
        xm.set_rng_state(step_seed(self._config.seed, number, 0 if self._spmd else self._cluster.worker), self._device)
        return self._replicated(np.array(adam_numbers(self._train, number), dtype=np.float32))

    def _gradients(self, number: int, batch: Arrays, asks: Asks) -> tuple[list[Tensor], Tensor]:
        """Of the summed loss over this host's rows (under SPMD: over all rows), with the sums and the asks: (5,)."""
        parameters = list(self._parameters.values())
        gradients: list[Tensor] = []
        sums = self._asks(asks)
        for piece in self._pieces(self._with_keys(number, batch)):
            if self._noise:
                self._noise.rows = piece.pop(_ROW_KEYS)
            with torch.autocast("xla", dtype=torch.bfloat16, enabled=self._train.precision == "bf16"):
                each, _ = self._sums(self._network, piece)  # counts that nobody reads are not computed
            # On autograd's own thread the results would stay alive a little longer than here, sometimes beyond the
            # sync: another program.
            with torch.autograd.set_multithreading_enabled(False):
                more = torch.autograd.grad(each[0], parameters, allow_unused=True, materialize_grads=True)
            gradients = [have + new for have, new in zip(gradients, more, strict=True)] if gradients else list(more)
            sums = torch.cat([sums[: len(SUMS)] + each.detach(), sums[len(SUMS) :]])
        return gradients, sums

    def _with_keys(self, number: int, batch: Arrays) -> Arrays:
        """With a number for each of this host's rows of the global batch, for dropout."""
        if not self._noise:
            return batch
        count = len(next(iter(batch.values()))) * self._cluster.hosts
        return {
            **batch,
            _ROW_KEYS: row_keys(
                self._config.seed, number, *host_rows(count, self._cluster.worker, self._cluster.hosts)
            ),
        }

    def _flat(self, gradients: list[Tensor], sums: Tensor) -> Tensor:
        """(all parameters + 5,): what hosts add up."""
        return torch.cat([*(gradient.reshape(-1) for gradient in gradients), sums])

    def _unflat(self, flat: Tensor) -> tuple[list[Tensor], Tensor]:
        parameters = list(self._parameters.values())
        *pieces, sums = flat.split([*(value.numel() for value in parameters), _EXTRA])
        return [piece.view_as(value) for piece, value in zip(pieces, parameters, strict=True)], sums

    def _apply(self, gradients: list[Tensor], sums: Tensor, numbers: Tensor) -> Tensor:
        """AdamW (https://arxiv.org/abs/1711.05101) on gradients of the summed loss. Returns the sums."""
        train = self._train
        weight = sums[SUMS.index("weight")]
        with torch.no_grad():
            rate, correction1, correction2 = numbers.unbind()
            scale = 1 / weight.clamp(min=1e-6)
            if train.clip_norm is not None:
                norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt() * scale
                scale = scale * (train.clip_norm / (norm + 1e-6)).clamp(max=1)
            first, second = self._moments
            for (name, value), gradient in zip(self._parameters.items(), gradients, strict=True):
                gradient = gradient * scale
                first[name].mul_(train.adam_beta1).add_(gradient, alpha=1 - train.adam_beta1)
                second[name].mul_(train.adam_beta2).addcmul_(gradient, gradient, value=1 - train.adam_beta2)
                update = (first[name] / correction1) / ((second[name] / correction2).sqrt() + train.adam_epsilon)
                if name in self._decayed:
                    update = update + train.weight_decay * value
                value.sub_(rate * update)
        return sums

    def evaluate(self, batch: Arrays, asks: Asks) -> _PendingStep:
        sums = self.traced_evaluation(batch, asks)
        self._agreement.look("evaluation", _shapes(batch), lambda: [sums])
        torch_xla.sync()
        if self._exchange:
            sums = self.to_host(sums)
            self._exchange.sum(sums)
        return _PendingStep(self, sums)

    def traced_evaluation(self, batch: Arrays, asks: Asks) -> Tensor:
        """The sums and counts of an evaluation that has not run."""
        self._upload()
        self._network.eval()
        with torch.no_grad(), torch.autocast("xla", dtype=torch.bfloat16, enabled=self._train.precision == "bf16"):
            sums, counts = self._sums(self._network, self._rows(batch))
        self._network.train()
        asked = self._asks(asks)
        further = [] if counts is None else [counts.flatten()]
        return self._on_all(torch.cat([asked[: len(SUMS)] + sums, asked[len(SUMS) :], *further]))

    # --- arrays to devices

    def feed(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        return task.batches(start)

    def _pieces(self, batch: Arrays) -> list[dict[str, Tensor]]:
        """The rows of each gradient accumulation, in order."""
        count = self._train.gradient_accumulation
        return [
            self._rows({name: np.array_split(array, count)[index] for name, array in batch.items()})
            for index in range(count)
        ]

    def _rows(self, batch: Arrays) -> dict[str, Tensor]:
        """Arrays (rows, ...) of this host, sharded by rows over all devices of all hosts."""
        return {name: self._send(array, ("data", *[None] * (array.ndim - 1))) for name, array in batch.items()}

    def _replicated(self, array: np.ndarray) -> Tensor:
        return self._send(array, (None,) * array.ndim)

    def _asks(self, asks: Asks) -> Tensor:
        """(5,): zeros for the sums, then over all hosts the number that ask for each thing."""
        rows = np.zeros((self.devices // self._cluster.hosts, _EXTRA), dtype=np.float32)
        rows[0, len(SUMS) :] = [asks.stop, asks.save]
        return self._send(rows, ("data", None)).sum(0)

    def _send(self, array: np.ndarray, axes: tuple[str | None, ...]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if not self._mesh:
            return tensor.to(self._device)
        spec = spmd.ShardingSpec(self._mesh, axes, minibatch=self._cluster.hosts > 1 and axes[0] == "data")
        return cast(Tensor, xm.send_cpu_data_to_device([tensor], self._device, input_sharding=spec)[0])

    def _on_all(self, sums: Tensor) -> Tensor:
        """Every host reads the sums, so every device must have all of them; left alone, the compiler may shard them."""
        if self._mesh:
            spmd.mark_sharding(sums, self._mesh, (None,))
        return sums

    # --- state

    def to_host(self, value: Tensor) -> Tensor:
        """A copy that is meant, and counted as such."""
        self._meant += value.device.type == "xla"
        return value.cpu()

    def layout(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec("F32", tuple(value.shape), value.numel() * 4) for name, value in self.state().items()}

    def copy(self, places: Mapping[str, memoryview]) -> Snapshot:
        state = self.state()
        if self._uploaded:
            xm.wait_device_ops()
        wanted = ((np.frombuffer(place, np.float32), state[name].detach()) for name, place in places.items())
        if self._uploaded and not self._mesh and os.environ["PJRT_DEVICE"] == "CPU":
            # A single CPU device shows its memory, which stays as it is until the next program that changes it:
            # `_before_change` comes first.
            self._copying = Snapshot(
                (place, from_dlpack(to_dlpack(value)).numpy().reshape(-1)) for place, value in wanted
            )
        else:
            # Tensor after tensor, since each takes fresh memory on its way.
            for place, value in wanted:
                place[:] = self.to_host(value).numpy().reshape(-1)
            self._copying = Snapshot()
        return self._copying

    def _before_change(self) -> None:
        """Right before a program overwrites the state: what is being copied must be copied, and nobody may look at that
        memory any more (PJRT would give the program another, with a copy of the state in it)."""
        self._copying.wait_before_mutation()

    def accept(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        assert not self._uploaded, "restore before the first step"
        state, layout = self.state(), self.layout()
        for name, (info, data) in tensors.items():
            if layout.get(name) != info:
                raise Damaged(f"tensor {name} is {info.dtype} {list(info.shape)}, which has no place in this model")
            # By numpy: a copy by torch waits for all of its threads, each of which may have to wait for a busy
            # processor.
            state[name].detach().numpy()[...] = np.frombuffer(data, np.float32).reshape(info.shape)

    def state(self) -> dict[str, Tensor]:
        groups = (("model", self._parameters), ("adam_m", self._moments[0]), ("adam_v", self._moments[1]))
        return {f"{group}/{name}": value for group, values in groups for name, value in values.items()}

    def network(self) -> Any:
        """The model, on the devices: for whoever looks at its programs."""
        self._upload()
        return self._network

    def _upload(self) -> None:
        if self._uploaded:
            return
        self._network.to(self._device)
        self._network.tie_weights()  # moving to XLA makes two of a tied weight
        self._name_state()
        if self._noise:
            self._noise.table = self._replicated(self._noise.table.numpy())
        self._moments = [{name: value.to(self._device) for name, value in group.items()} for group in self._moments]
        if self._mesh:
            # Said before the first step; else its outputs say it, and the second step is another program.
            for value in self.state().values():
                spmd.mark_sharding(value, self._mesh, (None,) * value.ndim)
        self._uploaded = True

    def compilations(self) -> tuple[int, float]:
        (count, seconds), (before, seconds_before) = torch_counts.compiled(), self._compiled_before
        return count - before, seconds - seconds_before

    def counters(self) -> dict[str, int]:
        now = torch_counts.transfers()
        found = {name: now[name] - self._counted_before[name] for name in now}
        return {**found, "device_to_host_syncs": found["device_to_host_transfers"] - self._meant}

    def fallbacks(self) -> list[str]:
        # Reading a number (an outcome) is counted as one, but is meant.
        now, before = torch_counts.fallbacks(), self._fallbacks_before
        return sorted(name for name in now if now[name] > before.get(name, 0) and name != "aten::_local_scalar_dense")

    def preflight(self) -> str | None:
        return self._agreement.summary()

    def close(self) -> None:
        self._exchange = None


def _shapes(batch: Arrays) -> list[tuple[int, ...]]:
    return [array.shape for array in batch.values()]


class _PendingStep:
    def __init__(self, backend: TorchXla, sums: Tensor) -> None:
        self._backend, self._sums = backend, sums

    def outcome(self) -> Outcome:
        values = self._backend.to_host(self._sums).tolist()
        stop, save = values[len(SUMS) : _EXTRA]
        counts = np.array(values[_EXTRA:]) if len(values) > _EXTRA else None
        return Outcome(dict(zip(SUMS, values, strict=False)), Asks(stop > 0, save > 0), counts)
