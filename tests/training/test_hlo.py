"""Reading a compiled program: what devices exchange, and where an operation comes from. The texts are libtpu's."""

from training.preflight.hlo import estimate_cycles, find_collectives, find_origin, share_of_loops


def test_places_are_the_models_own_names() -> None:
    metadata = 'metadata={{op_name="{}" source_file="{}" source_line=1}}'
    forward = metadata.format("bert.1/bert.pooler.2/bert.pooler.dense.1/aten__mm", "/x/linear.py")
    backward = metadata.format("gradient of bert.pooler.dense.7/aten__mm", "/torch/autograd/graph.py")
    update = metadata.format("gradient of bert.embeddings.7/aten__addcmul", "/x/torch_xla.py")
    assert find_origin(forward) == "bert.pooler.dense: mm"
    assert find_origin(backward) == "gradient of bert.pooler.dense: mm"
    assert find_origin(update) == "optimizer: addcmul"
    assert find_origin("no metadata") == ""


def test_collectives_are_counted_in_elements_and_bytes() -> None:
    text = """\
  %a.1 = (bf16[100,10]{1,0:T(8,128)(2,1)}, f32[7]{0:T(256)}) all-reduce(%x, %y), replica_groups={}
  %g.1 = (f32[1,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%z), dimensions={0}
  %g.2 = f32[8,4]{1,0} all-gather-done(%g.1)
  %f.1 = f32[8,4]{1,0} fusion(%g.2), calls=%all-reduce-like
"""
    reduce, gather = find_collectives(text)
    assert (reduce.kind, reduce.count, reduce.elements, reduce.bytes) == ("all-reduce", 1, 1007, 2028)
    assert dict(reduce.dtypes) == {"bf16": 1000, "f32": 7}
    assert (gather.kind, gather.count, gather.elements, gather.bytes) == ("all-gather", 1, 32, 128)


LOOP = """\
%all-reduce-scatter.1 (p: f32[8,4]) -> f32[1,4] {
  %r = f32[8,4]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add
}

%body (p: (f32[1,4])) -> (f32[1,4]) {
  %gather = f32[8,4]{1,0} all-gather(%p), dimensions={0}
  %work = f32[8,4]{1,0} fusion(%gather), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %scatter = f32[1,4]{1,0} fusion(%work), kind=kCustom, calls=%all-reduce-scatter.1
}

%unused (p: f32[4]) -> f32[4] {
  %lost = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1000"}
}

%test (p: (f32[1,4])) -> pred[] {
  %zero = u32[] constant(0)
  %limit = u32[] constant(3)
}

ENTRY %main (p: f32[1,4]) -> f32[1,4] {
  %before = f32[1,4]{1,0} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
  %unknown = f32[1,4]{1,0} fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"9223372036854775807"}
  %sent = (f32[1,4]{1,0}, f32[1,4]{1,0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
  %loop = (f32[1,4]{1,0}) while(%before), condition=%test, body=%body, \
backend_config={"known_trip_count":{"n":"32"}}
  %counted = (f32[1,4]{1,0}) while(%loop), condition=%test, body=%body
}
"""


def test_what_a_loop_does_counts_as_often_as_it_runs() -> None:
    assert estimate_cycles(LOOP) == 7 + (32 + 3) * 100
    assert (share_of_loops(LOOP), share_of_loops("ENTRY %m () -> f32[] {\n}\n")) == ((7 + 35 * 100) / 207, 1)
    gather, scatter, permutation = find_collectives(LOOP)
    assert (permutation.kind, permutation.bytes) == ("collective-permute", 16)
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 35, 35 * 128)
    assert (scatter.kind, scatter.count) == ("reduce-scatter", 35)
