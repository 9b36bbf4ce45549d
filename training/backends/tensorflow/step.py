"""The whole training step in one view: forward, loss, backward, accumulation, clipping, learning rate, optimizer.

The functions named `..._program` are traced once for each shape of rows. Everything that changes with the step
(learning rate, the optimizer's scalars, the seed of dropout) reaches them as data. Weights and the optimizer's state
are fp32; bf16 is Keras' mixed_bfloat16 policy.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow.model import KerasNetwork
from training.backends.tensorflow.replicas import Replicas
from training.batch import SUMS, UPDATE
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.optim.schedule import learning_rate, step_seed

# (network, rows, training) -> the sums (3,) of training.batch.SUMS, and an evaluation's counts or None.
TaskSums = Callable[[Any, Mapping[str, Any], bool], tuple[Any, Any]]


class TensorFlowStep:
    """The step of one run, as operations on its variables."""

    def __init__(
        self, config: TrainerConfig, cluster: Cluster, network: KerasNetwork, optimizer: Any, replicas: Replicas,
        task_sums: TaskSums,
    ) -> None:  # fmt: skip
        self._config, self._train, self._cluster = config, config.train, cluster
        self._network, self._optimizer, self._replicas, self._task_sums = network, optimizer, replicas, task_sums

    def scalar_values(self, number: int) -> tuple[int, tuple[float, ...]]:
        """Returns (the seed of dropout on this host, (learning rate, the optimizer's scalars)) of step `number`."""
        scalars = (learning_rate(self._train, number), *self._optimizer.step_scalars(number))
        return step_seed(self._config.seed, number, self._cluster.worker), scalars

    def scalars(self, number: int) -> tuple[Any, Any]:
        """Returns `scalar_values` as an int32 and a float32 tensor."""
        seed, scalars = self.scalar_values(number)
        return tf.constant(seed, tf.int32), tf.constant(np.array(scalars, np.float32))

    def train_program(self, rows: Any, seed: Any, scalars: Any) -> Any:
        """Runs a step where this process drives all devices; `seed` and `scalars`: the results of `scalars`. Returns
        the sums and `update`'s result: (3 + 2,)."""

        def replica(rows: Any) -> Any:
            gradients, sums = self.gradients(rows, seed)
            return tf.concat([sums, self.update(gradients, sums, scalars)], 0)

        return self._replicas.run(replica, rows)

    def train_next_program(self, batches: Any, seed: Any, scalars: Any) -> Any:
        """Runs `train_program` on the next rows of the strategy's iterator."""
        return self.train_program(next(batches), seed, scalars)

    def train_several_program(self, batches: Any, seeds: Any, scalars: Any, due: Any) -> Any:
        """Runs `due` steps, one after the other, on the next rows of the strategy's iterator.

        `seeds` (n,) and `scalars` (n, m) are of each step. `due` is at most n, and a tensor, so that a shorter call is
        the same program. Returns (due, 3 + 2): the result of `train_program` for each step."""

        def one_step(index: Any, results: Any) -> tuple[Any, Any]:
            result = self.train_program(next(batches), seeds[index], scalars[index])
            return index + 1, results.write(index, result)

        results = tf.TensorArray(tf.float32, size=due, element_shape=[len(SUMS) + len(UPDATE)])
        _, results = tf.while_loop(
            lambda index, _: index < due, one_step, (tf.constant(0), results), parallel_iterations=1
        )
        return results.stack()

    def gradients_program(self, rows: Any, seed: Any) -> Any:
        """Returns the gradients and the sums of this host, to be summed over hosts: (all parameters + 3,)."""

        def replica(rows: Any) -> Any:
            gradients, sums = self.gradients(rows, seed)
            return tf.concat([*(tf.reshape(gradient, [-1]) for gradient in gradients), sums], 0)

        return self._replicas.run(replica, rows)

    def update_program(self, flat: Any, scalars: Any) -> Any:
        """Updates the state by `gradients_program`'s result summed over hosts. Returns as `update`: (2,)."""

        def replica() -> Any:
            variables = [parameter.variable for parameter in self._network.parameters]
            *pieces, sums = tf.split(flat, [*(variable.shape.num_elements() for variable in variables), len(SUMS)])
            gradients = [tf.reshape(piece, variable.shape) for piece, variable in zip(pieces, variables, strict=True)]
            return self.update(gradients, sums, scalars)

        return self._replicas.run(replica)

    def evaluation_program(self, rows: Any) -> Any:
        """Returns training.batch.SUMS and the task's counts over all replicas' rows: (3 + counts,)."""

        def replica(rows: Any) -> Any:
            sums, counts = self._task_sums(self._network.model, rows, False)
            flat = sums if counts is None else tf.concat([sums, tf.reshape(counts, [-1])], 0)
            return self._replicas.sum(flat)

        return self._replicas.run(replica, rows)

    def gradients(self, rows: Mapping[str, Any], seed: Any) -> tuple[list[Any], Any]:
        """Returns the gradients of the summed loss, dense and in the order of the network's parameters, and the sums
        (3,) of training.batch.SUMS, both summed over this process's replicas. Changes no parameter. `rows`: this
        replica's, a multiple of train.gradient_accumulation. Call it in a replica's context."""
        pieces = self._train.gradient_accumulation
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        variables = [parameter.variable for parameter in self._network.parameters]
        gradients: list[Any] = []
        total = tf.zeros([len(SUMS)])
        for number in range(pieces):
            # Run the pieces one after the other: concurrent ones would need memory for all.
            with tf.control_dependencies(gradients):
                piece = {name: _piece_rows(array, number, pieces) for name, array in rows.items()}
                self._network.seed = tf.stack([seed, tf.cast(replica, tf.int32) * pieces + number])
                with tf.GradientTape() as tape:
                    sums, _ = self._task_sums(self._network.model, piece, True)
                    loss = sums[SUMS.index("loss")]
                # Make them dense: the gradient of an embedding lookup is an IndexedSlices.
                new = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
                gradients = [old + added for old, added in zip(gradients, new, strict=True)] if gradients else new
                total += sums
        self._network.seed = None
        *gradients, total = self._replicas.sum([*gradients, total])
        return gradients, total

    def update(self, gradients: list[Any], sums: Any, scalars: Any) -> Any:
        """Updates the state by the clipped gradients of the mean loss; with train.on_nonfinite: skip, only if loss and
        norm are finite. `gradients`: of the loss in `sums`, both summed over replicas. Call it in a replica's context.
        `scalars`, (m,): the learning rate, then the optimizer's. Returns, (2,), the norm before clipping, and 1 if it
        skipped the update, else 0 (training.batch.UPDATE)."""
        scalars = tf.unstack(scalars)
        loss, weight = sums[SUMS.index("loss")], sums[SUMS.index("weight")]
        scale = 1 / tf.maximum(weight, 1e-6)  # from the gradient of the sum to that of the mean
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])) * scale
        if self._train.clip_norm is not None:
            scale = scale * tf.minimum(self._train.clip_norm / (norm + 1e-6), 1)
        if self._train.on_nonfinite == "stop":
            self._optimizer.update(gradients, scale, *scalars)
            return tf.stack([norm, tf.zeros_like(norm)])
        is_finite = tf.math.is_finite(norm) & tf.math.is_finite(loss / weight)
        before = [tf.identity(variable) for variable in self._state_variables()]
        self._optimizer.update(gradients, scale, *scalars)
        tf.distribute.get_replica_context().merge_call(self._restore_unless, args=(is_finite, before))
        return tf.stack([norm, tf.cast(~is_finite, norm.dtype)])

    def _restore_unless(self, strategy: Any, is_finite: Any, before: list[Any]) -> None:
        """Sets the state back to the values in `before` unless the update `is_finite`."""

        def select(variable: Any, old: Any, is_finite: Any) -> None:
            variable.assign(tf.where(is_finite, variable, old))

        for variable, old in zip(self._state_variables(), before, strict=True):
            strategy.extended.update(variable, select, args=(old, is_finite))

    def _state_variables(self) -> list[Any]:
        """Returns the variables of the parameters, then those of the optimizer."""
        moments = [variable for group in self._optimizer.state().values() for variable in group]
        return [*(parameter.variable for parameter in self._network.parameters), *moments]


def _piece_rows(array: Any, number: int, pieces: int) -> Any:
    """Returns the rows of piece `number`, from 0, of `pieces` equal ones."""
    rows = array.shape[0] // pieces
    return array[number * rows : (number + 1) * rows]
