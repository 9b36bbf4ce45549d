"""The tf.data input gives the integers of the numpy batches, for every layout, number of hosts, step and seed."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.nightly import others_at_night
from tests.packed_datasets import pack_rows
from tests.training.mutations import flip
from training.data.formats import tfrecord
from training.data.formats.dataset import Dataset
from training.data.formats.tfrecord import Corrupt
from training.data.loading import batches as numpy_batches
from training.data.loading.record_source import HostSlice
from training.data.prepare import labelled_rows
from training.data.prepare.dataset_writer import DatasetPlan, write_mixture
from training.data.prepare.labelled_rows import ClassLabels, FloatLabels, LabelKind, LabelSets, TokenLabels
from training.data.sampling import order
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.tf import batches as tf_batches
from training.data.tf import record_source as tf_source
from training.data.tf import sampling as tf_sampling
from training.data.tf.record_source import translate_errors
from training.errors import BadInput, TrainError

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=40_000)
CLASSES = ClassLabels(("0", "1", "2"))
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # an example builds a pipeline: shrinking would take minutes
LAYOUTS = ("compact", "recipe")


def ids(count: int, length: int = 12) -> Any:
    return np.random.default_rng(0).integers(5, TOKENS.vocabulary, (count, length)).astype(np.int32)


def make(folder: Path | str, count: int, layout: str = "compact", per_shard: int = 70) -> Dataset:
    return pack_rows(folder, DatasetPlan("train", 12, "t", TOKENS.vocabulary, per_shard, layout), ids(count))


@functools.cache
def kept(count: int, layout: str) -> Dataset:
    """The same folder for every example of hypothesis."""
    return make(tempfile.mkdtemp(), count, layout)


@functools.cache
def labelled(counts: tuple[int, ...], labels: LabelKind = CLASSES, has_pairs: bool = False) -> Dataset:
    """Rows of the lengths 4, 8 and 16, so many of each. Their labels are 0, 1 or 2, as class numbers or as floats, or
    several of them: of every second token, or of the whole row. A row may be two texts."""
    rng = np.random.default_rng(1)
    texts = [
        (rng.integers(5, 90, length).tolist(), [str(number) for number in rng.integers(3, size=length // 2)])
        for length, count in zip((4, 8, 16), counts, strict=True)
        for _ in range(count)
    ]
    plan = DatasetPlan("train", 16, "t", TOKENS.vocabulary, 40)

    def encode(numbers: list[str]) -> list[Any]:
        rows = [np.array(texts[int(number)][0], np.int32) for number in numbers]
        if has_pairs:
            return [np.stack([row, np.arange(len(row)) > row[0] % len(row)]) for row in rows]
        if labels.rows != "token-labelled":
            return rows
        places = [np.arange(len(row)) for row in rows]
        return [np.stack([row, np.where(place % 2, -1, place // 2)]) for row, place in zip(rows, places, strict=True)]

    def rows() -> Iterator[tuple[str, Any]]:
        for number, (_, label) in enumerate(texts):
            yield str(number), label if labels.is_list else label[0]

    write, lengths = labelled_rows.write_labelled_rows, (4, 8, 16)
    return write(tempfile.mkdtemp(), plan, lengths, labels, rows, encode, TOKENS.pad, has_pairs=has_pairs).dataset


def assert_same(ours: Any, theirs: dict[str, Any]) -> None:
    for name, values in vars(ours).items():
        assert values.dtype == theirs[name].dtype, name
        assert np.array_equal(values, theirs[name]), name


def assert_same_batches(ours: Any, theirs: tf.data.Dataset, start: int) -> None:
    """Those of a source of ours, closed then, and of TensorFlow's, which begins at `start`."""
    for number, batch in enumerate(theirs.as_numpy_iterator(), start):
        assert_same(ours.batch(number), batch)
    ours.close()


@settings(max_examples=150)
@given(
    st.integers(1, 3000),
    st.integers(1, 100),
    st.integers(1, 50),
    st.integers(0, 2**31 - 1),
    st.integers(0, 5),
    st.integers(0, 20),
)
def test_windows_are_those_of_numpy(records: int, batch: int, block: int, seed: int, epoch: int, number: int) -> None:
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    ours = order.TrainingOrder(records, block, divisors[seed % len(divisors)], seed % 3 + 1, seed, batch)
    number %= ours.windows
    which = tf.constant(epoch, tf.int64), tf.constant(number, tf.int64)
    theirs = tf_sampling.window(ours, tf_sampling.block_permutation(ours, which[0]), *which)
    assert np.array_equal(ours.window(epoch, number), theirs.numpy())
    assert [int(bound) for bound in tf_sampling.bounds(ours, *which)] == list(ours.bounds(epoch, number))


@settings(max_examples=5, phases=PHASES)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([5, 130, 1000]),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 16),
    st.sampled_from([0, 1, 77, 10**6]),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
def test_equal_to_numpy(layout: str, records: int, hosts: int, rows: int, start: int, seed: int, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:  # several windows an epoch
            patch.setattr(order, "WINDOW_BLOCKS", 3)
            patch.setattr(order, "MIN_BLOCK", 8)
            patch.setattr(order, "BLOCK_BYTES", 400)
        host_slice = HostSlice(TOKENS, rows * hosts, seed % hosts, hosts)
        masking = Masking(20)
        dataset = kept(records, layout)
        ours = numpy_batches.MlmBatches(dataset, host_slice, masking, seed)
        assert_same_batches(ours, tf_batches.mlm_batches(dataset, host_slice, masking, seed, start).take(8), start)


def test_a_mixture_is_read_as_numpy_reads_it(tmp_path: Path) -> None:
    parts = {make(tmp_path / str(count), count).url: times for count, times in ((130, 2), (75, 1))}
    mixed = write_mixture(str(tmp_path / "mixed"), parts)
    host_slice = HostSlice(TOKENS, 24, 1, 2)
    ours = numpy_batches.MlmBatches(mixed, host_slice, Masking(), 3)
    theirs = tf_batches.mlm_batches(mixed, host_slice, Masking(), 3, 5).take(20)
    assert_same_batches(ours, theirs, 5)  # into the second epoch


def test_the_blocks_are_permuted_once_an_epoch_for_all_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[int] = []
    permute = tf_sampling.block_permutation

    def permute_and_note(shuffled: Any, epoch: Any) -> Any:
        def note(epoch: Any) -> Any:
            epochs.append(int(epoch))
            return permute(shuffled, epoch)

        return tf.ensure_shape(tf.py_function(note, [epoch], tf.int64), (shuffled.blocks,))

    monkeypatch.setattr(tf_batches, "block_permutation", permute_and_note)
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 4)
    monkeypatch.setattr(order, "MIN_BLOCK", 8)
    monkeypatch.setattr(order, "BLOCK_BYTES", 400)
    host_slice = HostSlice(TOKENS, 10)
    batches = tf_batches.mlm_batches(kept(1000, "compact"), host_slice, Masking(), 3, 150).take(120).as_numpy_iterator()
    assert sum(1 for _ in batches) == 120
    assert epochs in ([1, 2], [1, 2, 3])  # the last one: of what is read ahead


@settings(max_examples=3, phases=PHASES)
@given(st.sampled_from(LAYOUTS), st.sampled_from([5, 130]), st.sampled_from([1, 2, 3]), st.integers(1, 20))
def test_evaluation_is_that_of_numpy(layout: str, records: int, hosts: int, rows: int) -> None:
    for host in range(hosts):
        host_slice = HostSlice(TOKENS, rows * hosts, host, hosts)
        given = kept(records, layout), host_slice, Masking()
        theirs = list(tf_batches.mlm_evaluation(*given).as_numpy_iterator())
        for ours, tf_batch in zip(numpy_batches.mlm_evaluation(*given), theirs, strict=True):
            assert_same(ours, tf_batch)


@settings(max_examples=3, phases=PHASES)
@given(
    st.sampled_from([(50, 90, 30), (2, 60, 0), (3, 4, 5)]),
    st.sampled_from([1, 2]),
    st.integers(1, 10),
    st.sampled_from([0, 1, 13, 10**6]),
    st.integers(0, 2**31 - 1),
    st.sampled_from(
        [
            (CLASSES, False), (CLASSES, True), (FloatLabels(), False), (LabelSets(("0", "1", "2")), False),
            (TokenLabels(("0", "1", "2")), False),
        ]
    ),
)  # fmt: skip
def test_labelled_batches_are_those_of_numpy(
    counts: tuple[int, ...], hosts: int, rows: int, start: int, seed: int, kind: tuple[LabelKind, bool]
) -> None:
    dataset = labelled(counts, *kind)
    host_slice = HostSlice(TOKENS, rows * hosts, seed % hosts, hosts)
    ours = numpy_batches.LabelledBatches(dataset, host_slice, seed)
    assert_same_batches(ours, tf_batches.labelled_batches(dataset, host_slice, seed, start).take(8), start)
    theirs = list(tf_batches.labelled_evaluation(dataset, host_slice).as_numpy_iterator())
    for batch, tf_batch in zip(numpy_batches.labelled_evaluation(dataset, host_slice), theirs, strict=True):
        assert_same(batch, tf_batch)


@pytest.mark.parametrize("layout", others_at_night(LAYOUTS, ("recipe",)))
def test_a_damaged_record_is_an_error_or_replaced_as_by_numpy(tmp_path: Path, layout: str) -> None:
    dataset = make(tmp_path, 130, layout)
    shard = dataset.shards[1]
    # Inside a record: after a broken header, records of varying size are lost.
    flip(tmp_path / shard.name, shard.bytes // 2 + 20)
    host_slice = HostSlice(TOKENS, 130)
    with pytest.raises(Corrupt) as ours:
        numpy_batches.MlmBatches(dataset, host_slice, Masking(), 0).batch(0)
    with pytest.raises(Corrupt) as theirs, translate_errors(dataset):
        next(iter(tf_batches.mlm_batches(dataset, host_slice, Masking(), 0)))
    for part in ("shard", "record", "offset"):
        assert getattr(theirs.value, part) == getattr(ours.value, part)

    host_slice = HostSlice(TOKENS, 130, on_corrupt="skip")
    numpy = numpy_batches.MlmBatches(dataset, host_slice, Masking(), 0)
    tf_batch = next(tf_batches.mlm_batches(dataset, host_slice, Masking(), 0).as_numpy_iterator())
    assert_same(numpy.batch(0), tf_batch)
    assert tf_batch["replaced"].sum() > 0


@pytest.mark.nightly
def test_blocks_without_a_good_record_are_replaced_as_by_numpy(tmp_path: Path) -> None:
    dataset = make(tmp_path, 300, per_shard=64)  # a shard is a block
    for shard in dataset.shards:
        (tmp_path / shard.name).write_bytes(bytes(shard.bytes))
    host_slice = HostSlice(TOKENS, 300, on_corrupt="skip")
    with pytest.raises(Corrupt, match="because the dataset has no good record"), translate_errors(dataset):
        next(iter(tf_batches.mlm_batches(dataset, host_slice, Masking(), 0)))

    dataset = make(tmp_path / "mended", 300, per_shard=64)
    for shard in (dataset.shards[0], dataset.shards[-1]):
        (tmp_path / "mended" / shard.name).write_bytes(bytes(shard.bytes))
    numpy = numpy_batches.MlmBatches(dataset, host_slice, Masking(), 0)
    tf_batch = next(tf_batches.mlm_batches(dataset, host_slice, Masking(), 0).as_numpy_iterator())
    assert_same(numpy.batch(0), tf_batch)
    assert tf_batch["replaced"].sum() >= 64


def test_every_bit_of_a_record_is_checked(tmp_path: Path) -> None:
    dataset = make(tmp_path, 1)
    path = tmp_path / dataset.shards[0].name
    good = path.read_bytes()
    source = tf_source.open_source(dataset, vocabulary=TOKENS.vocabulary, on_corrupt="stop")
    read = tf.function(lambda: source.read(tf.constant(0, tf.int64), tf.constant(1, tf.int64)))
    assert np.array_equal(read()["input_ids"].numpy(), ids(1))
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << place % 8)]) + good[place + 1 :])
        with pytest.raises(Corrupt, match="record 0 at byte 0"), translate_errors(dataset):
            read()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    dataset = make(tmp_path, 20)
    batches = tf_batches.mlm_batches(dataset, HostSlice(TOKENS, 4), Masking(), 0)
    (tmp_path / dataset.shards[0].name).unlink()
    with pytest.raises(BadInput, match=dataset.shards[0].name), translate_errors(dataset):
        next(iter(batches))


@pytest.mark.parametrize("error", [tf.errors.NotFoundError, tf.errors.ResourceExhaustedError, tf.errors.AbortedError])
def test_errors_that_name_no_shard_pass_unchanged(tmp_path: Path, error: type[tf.errors.OpError]) -> None:
    """A step in flight may fail while the program waits for a batch."""
    dataset = make(tmp_path, 20)
    with pytest.raises(error), translate_errors(dataset):
        raise error(None, None, "the program of the step failed on a device")
    with pytest.raises(TrainError, match=dataset.shards[0].name), translate_errors(dataset):
        raise error(None, None, f"while it read {dataset.url}/{dataset.shards[0].name}")


def test_shards_of_public_layout_are_read_once_for_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(tmp_path, 20, "recipe")
    scans: list[str] = []
    scan = tfrecord.index
    monkeypatch.setattr(tfrecord, "index", lambda data, url: scans.append(url) or scan(data, url))
    for host in range(2):
        tf_batches.mlm_batches(dataset, HostSlice(TOKENS, 4, host, 2), Masking(), 0)
    assert len(scans) == len(dataset.shards)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    few = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)
    dataset = make(tmp_path, 20)
    source = tf_source.open_source(dataset, vocabulary=few.vocabulary, on_corrupt="stop")
    with pytest.raises(BadInput, match="a token id that the tokenizer"), translate_errors(dataset):
        tf.function(source.read)(tf.constant(0, tf.int64), tf.constant(20, tf.int64))
