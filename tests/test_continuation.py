"""Continuations of a row in programs of a caller's own: mapped, scanned and differentiated, they
are what the model computes of the whole sequence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families import text_config
from jaxkv import functional as jk
from parity import reference_model, torch
from poison import nan_of
from tiny import make_checkpoint

__all__ = ["torch"]

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB, SIZE = 151, 8
PREFIX, NEW = 21, 6
TOLERANCE = 5e-6
"""Of the largest entry. Computed in float32, compared with float64 or in another order."""

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def prefilled(model: jk.Model) -> jk.State:
    """Row 1 has the prefix, row 0 something else, and all that neither holds is NaN."""
    kv = jk.empty(model, num_pages=12, page_size=SIZE, num_rows=2)
    kv = jax.tree.map(lambda x: jnp.full(x.shape, nan_of(np.dtype(x.dtype)), x.dtype), kv)
    return jk.prefill(model, kv, {0: ids(3, 5), 1: ids(1, PREFIX)})[0]


def close(got: jax.Array, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def loaded(directory: Path, variant: str) -> jk.Model:
    make_checkpoint(directory, text_config(variant))
    return jk.load(directory, dtype="float32", skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> jk.Model:
    """Gemma 2: windows, capped scores, scaled embeddings."""
    return loaded(tmp_path_factory.mktemp("model"), "gemma2")


@pytest.fixture(scope="module")
def kv(model) -> jk.State:
    return prefilled(model)


def score(model, kv, start, embedded, token_T):
    """The log-probability of tokens, each after the embedding [T, D] at its place."""
    _, logits_TV = jk.extend(model, kv, start, embedded)
    return jax.nn.log_softmax(logits_TV)[jnp.arange(NEW), token_T].sum()


with_gradient = jax.value_and_grad(score, argnums=3)
alone = jit(with_gradient)


def check_gradient(torch: Any, model: jk.Model, kv: jk.State, tolerance: float = TOLERANCE) -> None:
    tokens, start = ids(2, NEW + 1), jk.continuation(kv, 1, room=NEW)
    x = jk.embed(model, tokens[:-1])
    value, gradient = alone(model, kv, start, x, jnp.array(tokens[1:]))

    theirs = reference_model(torch, model.blueprint.options.model).double()
    with torch.enable_grad():
        lookup = theirs.get_input_embeddings()
        before = lookup(torch.tensor([ids(1, PREFIX)])).detach()
        # Some families scale what they look up in there.
        factor = (before[0, 0] / lookup.weight[ids(1, PREFIX)[0]]).mean().detach()
        own = torch.tensor(np.asarray(x, np.float64)[None], requires_grad=True)
        logits = theirs(inputs_embeds=torch.cat([before, own * factor], dim=1)).logits[0, PREFIX:]
        want = torch.log_softmax(logits, -1)[torch.arange(NEW), torch.tensor(tokens[1:])].sum()
        want.backward()
    assert own.grad.dtype == torch.float64
    assert float(value) == pytest.approx(want.item(), rel=TOLERANCE)
    close(gradient, own.grad[0].numpy(), tolerance)


def test_the_gradient_over_a_cached_prefix_is_that_of_transformers_in_float64(torch, model, kv):
    check_gradient(torch, model, kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [
        ("cohere2", TOLERANCE),
        ("gpt2", TOLERANCE),
        # Transformers in float32 is off by 5.4e-6 itself, as this is.
        ("minicpm3", 1e-5),
    ],
)
def test_the_gradient_of_other_families_is_that_of_transformers(
    torch, tmp_path, variant, tolerance
):
    model = loaded(tmp_path, variant)
    check_gradient(torch, model, prefilled(model), tolerance)


def test_scanned_steps_are_those_of_decode_and_consume_nothing(model, kv):
    @jit
    def greedy(model, kv, start, token):
        def one(carry, _):
            start, token = carry
            start, logits = jk.extend(model, kv, start, jk.embed(model, token[None]))
            return (start, logits[0].argmax()), (logits[0].argmax(), logits[0])

        return jax.lax.scan(one, (start, token), length=NEW)

    start = jk.continuation(kv, 1, room=NEW)
    (end, _), (token_T, logits_TV) = greedy(model, kv, start, jnp.int32(5))
    assert (int(start.length), int(end.length)) == (0, NEW)
    own = jax.tree.map(jnp.copy, kv)
    assert token_T.tolist() == jk.decode(model, own, {1: 5}, n=NEW)[1][0].tolist()
    # In two parts, of which the second begins behind the first.
    x, extend = jk.embed(model, [5, *token_T[:-1].tolist()]), jit(jk.extend)
    middle, first = extend(model, kv, start, x[: NEW // 2])
    end, last = extend(model, kv, middle, x[NEW // 2 :])
    close(jnp.concatenate([first, last]), logits_TV)
    # Where there is no room for them, nothing is made up.
    assert jnp.isnan(extend(model, kv, end, x[: NEW // 2])[1]).all()


def test_mapped_over_continuations_and_rows_each_is_as_it_is_alone(model, kv):
    token_BT = jnp.array([ids(4, NEW), ids(5, NEW), ids(5, NEW)])
    x_BTD = jax.vmap(partial(jk.embed, model))(token_BT)
    starts = [jk.continuation(kv, row, room=NEW) for row in (1, 1, 0)]
    all_of_them = jax.tree.map(lambda *x: jnp.stack(x), *starts)
    mapped = jit(jax.vmap(with_gradient, in_axes=(None, None, 0, 0, 0)))
    found = mapped(model, kv, all_of_them, x_BTD, token_BT)
    for i, start in enumerate(starts):
        want = alone(model, kv, start, x_BTD[i], token_BT[i])
        for got, expected in zip(found, want, strict=True):
            close(got[i], expected)


def test_what_is_refused_says_what_was_expected(model, kv):
    start = jk.continuation(kv, 1, room=4)
    x = jk.embed(model, ids(1, 5))
    several = replace(model, blueprint=replace(model.blueprint, placement=Two()))
    dead = jax.tree.map(jnp.copy, kv)
    jk.decode(model, dead, {1: 5}, n=1)
    refusals = [
        (ValueError, "row: expected an int from 0 to 1", lambda: jk.continuation(kv, 2, room=4)),
        (ValueError, "room: expected", lambda: jk.continuation(kv, 1, room=0)),
        (ValueError, "room: expected", lambda: jk.continuation(kv, 1, room=2.0)),
        (ValueError, r"from 1 to \d+, .* got 256", lambda: jk.continuation(kv, 1, room=256)),
        (ValueError, r"1 to 4 tokens, got \[5, 48\]", lambda: jk.extend(model, kv, start, x)),
        (ValueError, r"got \[0, 48\]", lambda: jk.extend(model, kv, start, x[:0])),
        (ValueError, r"\[T, 48\] .* got \[48\]", lambda: jk.extend(model, kv, start, x[0])),
        (ValueError, r"got \[4, 47\]", lambda: jk.extend(model, kv, start, x[:4, 1:])),
        (ValueError, r"got \[1, 2\]", lambda: jk.extend(model, kv, start, [[1.0, 2.0]])),
        (ValueError, "expected token ids", lambda: jk.embed(model, 5)),
        (ValueError, "expected token ids", lambda: jk.embed(model, [0.5])),
        (ValueError, "from 0 to 150", lambda: jk.embed(model, [151])),
        (NotImplementedError, "over 2", lambda: jk.extend(several, kv, start, x[:4])),
        (RuntimeError, "has been consumed", lambda: jk.extend(model, dead, start, x[:4])),
    ]
    for kind, message, call in refusals:
        with pytest.raises(kind, match=message):
            call()


class Two:
    size = 2
