"""Copies of weights and pool are seen in a compiled program, wherever they hide, and nothing else
is taken for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxkv
from jaxkv.tools.chips import ENVIRONMENT
from jaxkv.tools.hlo import Collective, Copy, read_program

POOL, WEIGHT = "kv.stores[0].pages", "weights['layers']['q']"
SLICES = {POOL: 2 * 512, WEIGHT: 256}
HEAD = """HloModule jit_step, is_scheduled=true

%moves (p.1: bf16[4,16,16], i.1: s32[]) -> bf16[1,16,16] {
  %p.1 = bf16[4,16,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i.1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %cut = bf16[1,16,16]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p.1, %i.1, %zero, %zero), dynamic_slice_sizes={1,16,16}
}

%computes (p.2: bf16[4,16,16], x.2: bf16[16,16]) -> f32[16,16] {
  %p.2 = bf16[4,16,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x.2 = bf16[16,16]{1,0:T(8,128)(2,1)} parameter(1)
  %cut.2 = bf16[1,16,16]{2,1,0:T(8,128)(2,1)} slice(%p.2), slice={[0:1], [0:16], [0:16]}
  %flat = bf16[16,16]{1,0:T(8,128)(2,1)} bitcast(%cut.2)
  ROOT %dot = f32[16,16]{1,0:T(8,128)} convolution(%x.2, %flat), dim_labels=bf_oi->bf
}

%updates (p.3: bf16[8,4,8,16], u.3: bf16[1,4,8,16], i.3: s32[]) -> bf16[8,4,8,16] {
  %p.3 = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %u.3 = bf16[1,4,8,16]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %i.3 = s32[]{:T(128)} parameter(2)
  %put = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p.3, %u.3, %i.3, %i.3, %i.3, /*index=5*/%i.3)
  ROOT %same = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} bitcast(%put)
}

%elsewhere (p.4: bf16[8,4,8,16]) -> bf16[8,4,8,16] {
  %p.4 = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %turned = bf16[8,4,8,16]{3,1,2,0:T(8,128)(2,1)} copy(%p.4)
}

%ahead (p.6: bf16[8,4,8,16]) -> bf16[8,4,8,16] {
  %p.6 = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %early = bf16[8,4,8,16]{3,1,2,0:T(8,128)(2,1)S(1)} copy(%p.6)
}

%body (s.5: (s32[], bf16[16,16], bf16[8,4,8,16], bf16[4,16,16])) -> (s32[], bf16[16,16], bf16[8,4,8,16]) {
  %s.5 = (s32[]{:T(128)}, bf16[16,16]{1,0}, bf16[8,4,8,16]{3,2,1,0}, /*index=3*/bf16[4,16,16]{2,1,0}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%s.5), index=0
  %x = bf16[16,16]{1,0} get-tuple-element(%s.5), index=1
  %pages = bf16[8,4,8,16]{3,2,1,0} get-tuple-element(%s.5), index=2
  %w = bf16[4,16,16]{2,1,0} get-tuple-element(%s.5), index=3
  BODY
  %sum = bf16[16,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%adds
  ROOT %out.5 = (s32[], bf16[16,16], bf16[8,4,8,16], bf16[4,16,16]) tuple(%n, %sum, %pages, %w)
}

ENTRY %main (a: bf16[4,16,16], b: bf16[8,4,8,16], c: bf16[16,16], n.1: s32[]) -> bf16[8,4,8,16] {
  %a = bf16[4,16,16]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights[\\'layers\\'][\\'q\\']"}
  %b = bf16[8,4,8,16]{3,2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="kv.stores[0].pages"}
  %c = bf16[16,16]{1,0} parameter(2), metadata={op_name="x"}
  %n.1 = s32[]{:T(128)} parameter(3), metadata={op_name="n"}
  ENTRY_LINES
  %in = (s32[], bf16[16,16], bf16[8,4,8,16], bf16[4,16,16]) tuple(%n.1, %c, %b, %a)
  %while.1 = (s32[], bf16[16,16], bf16[8,4,8,16], bf16[4,16,16]) while(%in), condition=%holds, body=%body, METADATA
  ROOT %result = bf16[8,4,8,16]{3,2,1,0} get-tuple-element(%while.1), index=2
}
"""


def read(
    *, body: str = "", entry: str = "", loop: str = "jit(step)/layers/while"
) -> tuple[list[Copy], list[Collective]]:
    text = HEAD.replace("ENTRY_LINES", entry).replace("BODY", body)
    return read_program(text.replace("METADATA", f'metadata={{op_name="{loop}"}}'), slices=SLICES)


@pytest.mark.parametrize(
    ("where", "line", "argument", "nbytes"),
    [
        ("entry", "%k = bf16[8,4,8,16]{3,1,2,0:T(8,128)(2,1)} copy(%b)", POOL, 8192),
        ("body", "%k = bf16[8,4,8,16]{3,1,2,0:T(8,128)(2,1)} copy(%pages)", POOL, 8192),
        ("body", "%k = bf16[4,4,8,16]{3,2,1,0} slice(%pages), slice={[0:4]}", POOL, 4096),
        (
            "body",
            "%k = (bf16[8,4,8,16]{0}, bf16[8,4,8,16]{0}, u32[]{:S(2)}) copy-start(%pages)",
            POOL,
            8192,
        ),
        (
            "body",
            "%k = bf16[1,16,16]{2,1,0:T(8,128)(2,1)} fusion(%w, %n), kind=kLoop, calls=%moves",
            WEIGHT,
            512,
        ),
        ("body", "%k = f32[4,16,16]{1,2,0} transpose(%w), dimensions={0,2,1}", WEIGHT, 4096),
        (
            "body",
            (
                "%k = ((bf16[8,4,8,16]{0}), bf16[8,4,8,16]{0}, u32[]{:S(8)}) call-start(%pages), "
                "to_apply=%elsewhere"
            ),
            POOL,
            8192,
        ),
    ],
)
def test_a_copy_as_large_as_a_layers_part_is_found(where, line, argument, nbytes):
    (copy,), _ = read(**{where: line})
    depth = {"entry": 0, "body": 1}[where]
    assert (copy.argument, copy.nbytes, copy.depth) == (argument, nbytes, depth)


@pytest.mark.parametrize(
    "line",
    [
        "%k = bf16[16,16]{0,1:T(8,128)(2,1)} copy(%x)",  # an activation as large as a weight
        "%k = f32[16,16]{1,0} fusion(%w, %x), kind=kOutput, calls=%computes",
        (
            "%k = ((bf16[8,4,8,16]{0}), bf16[8,4,8,16]{0:S(1)}, u32[]{:S(8)}) call-start(%pages), "
            "to_apply=%ahead"
        ),
        "%k = (bf16[4,16,16]{2,1,0:S(1)}, bf16[4,16,16]{2,1,0}, u32[]{:S(2)}) copy-start(%w)",
        "%k = (bf16[4,16,16]{2,1,0}, bf16[4,16,16]{2,1,0:S(1)}, u32[]{:S(2)}) copy-start(%w)",  # and out again
        "%k = bf16[4,8,16]{2,1,0} slice(%w), slice={[0:1], [0:8], [0:16]}".replace(
            "4,8,16", "1,8,16"
        ),  # half of one
        "%k = bf16[8,4,8,16]{3,2,1,0} fusion(%pages, %pages, %n), kind=kLoop, calls=%updates",  # in place
        (
            "%k = (f32[2]{0}, bf16[8,4,8,16]{0}) custom-call(%n, %pages), "
            "output_to_operand_aliasing={{1}: (1, {})}"
        ),
    ],
)
def test_what_is_no_copy_is_not_reported(line):
    assert read(body=line)[0] == []


def test_a_weight_copied_to_vmem_by_the_layer_loop_before_it_is_used_is_found():
    line = "%k = bf16[1,16,16]{2,1,0:T(8,128)(2,1)S(1)} fusion(%w, %n), kind=kLoop, calls=%moves"
    assert read(body=line)[0] == [
        Copy(argument=WEIGHT, instruction="k", nbytes=512, depth=1, into_vmem=True)
    ]
    assert read(body=line, loop="jit(loop)/while")[0] == []


@pytest.mark.parametrize(
    "through",
    [
        """%k = (f32[2]{0}, bf16[8,4,8,16]{0}) custom-call(%n, %pages), output_to_operand_aliasing={{1}: (1, {})}
  %l = bf16[8,4,8,16]{3,2,1,0} get-tuple-element(%k), index=1
  %m = bf16[256,16]{1,0} bitcast(%l)
  %o = bf16[256,16]{0,1} copy(%m)""",
        """%m = bf16[8,4,8,16]{3,2,1,0} fusion(%pages, %pages, %n), kind=kLoop, calls=%updates
  %o = bf16[8,4,8,16]{3,1,2,0} copy(%m)""",
        """%o = bf16[8,4,8,16]{3,1,2,0} copy(%pages)
  %m = bf16[8,4,8,16]{3,1,2,0} fusion(%o, %pages, %n), kind=kLoop, calls=%updates""",
    ],
    ids=["behind a kernel", "after an update", "before an update"],
)
def test_a_copy_is_reported_once_whatever_is_done_in_place_beside_it(through):
    (copy,), _ = read(body=through)
    assert (copy.argument, copy.instruction) == (POOL, "o")


def test_collectives_are_counted_per_layer_and_outside():
    _, collectives = read(
        entry="%g = bf16[16,32]{1,0} all-gather(%c), channel_id=2, dimensions={1}"
    )
    assert collectives == [
        Collective(kind="all-gather", per_layer=False, count=1, nbytes=1024),
        Collective(kind="all-reduce", per_layer=True, count=1, nbytes=512),
    ]


def test_a_loop_inside_the_one_over_layers_or_around_it_is_not_it():
    for loop in ("jit(step)/layers/while/body/while", "jit(loop)/while"):
        assert [one.per_layer for one in read(loop=loop)[1]] == [False]


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import SingleDeviceSharding
from jaxkv.tools.chips import parse_target
from jaxkv.tools.hlo import read_program

place = SingleDeviceSharding(parse_target("v5e").devices()[0])
abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
LAYERS, PAGES = 4, 8192  # 1 GiB: a pool that fits into VMEM is taken there, not copied

def sliced(x, pages, w):
    def layer(x, each):
        mine, matrix = each
        x = x @ matrix
        mine = mine.at[0].set(x.reshape(2, 64, 128))
        return x + mine[1].reshape(x.shape), mine
    return jax.lax.scan(layer, x, (pages.reshape(LAYERS, PAGES, 2, 64, 128), w))

def carried(x, pages, w):
    def layer(i, carry):
        x, pages = carry
        x = x @ w[i]
        pages = jax.lax.dynamic_update_slice(pages, x.reshape(1, 2, 64, 128), (i * PAGES, 0, 0, 0))
        read = jax.lax.dynamic_slice(pages, (i * PAGES + 1, 0, 0, 0), (1, 2, 64, 128))
        return x + read.reshape(x.shape), pages
    return jax.lax.fori_loop(0, LAYERS, layer, (x, pages))

inputs = abstract(8, 2048), abstract(LAYERS * PAGES, 2, 64, 128), abstract(LAYERS, 2048, 2048)
slices = {"pages": PAGES * 2 * 64 * 128, "w": 2048 * 2048}
for function in (sliced, carried):
    text = jax.jit(function, donate_argnums=1).lower(*inputs).compile().as_text()
    print(json.dumps([copy.argument for copy in read_program(text, slices=slices)[0]]))
"""


@pytest.mark.skipif(
    find_spec("libtpu") is None, reason='libtpu is missing: pip install "jaxkv[tpu]"'
)
def test_a_real_program_that_scans_over_the_pool_copies_it_and_one_that_carries_it_does_not():
    path = os.pathsep.join(
        filter(None, [str(Path(jaxkv.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    scanned, carried = map(json.loads, done.stdout.splitlines())
    assert "pages" in scanned
    assert carried == []
