"""The soak: a short one goes through with nothing left behind, and a breach is named."""

import jax
import pytest

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def soak(script):
    return script("soak").Soak(seed=1, rows=4, step_tokens=16)


@pytest.mark.slow
def test_a_short_soak_ends_clean_and_a_breach_is_named(soak):
    soak.run(3.0)
    figures, bad = soak.finish(max_growth_mib=1e6)
    assert bad == []
    assert not soak.engine.has_work
    assert figures["pages in use"] == 0
    assert figures["arrived"] >= figures["finished"] > 0
    soak.warm["programs"] -= 1
    _, bad = soak.finish(max_growth_mib=-1e6)
    assert [line.split(":")[0] for line in bad] == ["new programs", "largest growth in MiB since"]


def test_what_jax_compiles_is_counted(soak):
    before = soak.compilations.num_seen
    jax.jit(lambda x: x + before)(1)
    assert soak.compilations.num_seen > before
