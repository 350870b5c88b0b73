"""Trains a tiny flax model by reinforcement, with its rollouts from an `LLM` in the same process.

    pip install -e ".[train]"
    python scripts/rl_demo.py

The policy is a small Llama in flax whose parameters have a checkpoint's names, so that
`llm.update_weights` takes them as they are. Each round hands them over, samples a group of
completions for every prompt and updates the policy with optax: a clipped ratio and advantages
within each group (GRPO, arXiv 2402.03300, without its reference model). The old logprobs of that
ratio are those that the engine has returned. What is printed shows how far they are from the
training forward's on the same tokens, and how many programs JAX has compiled so far.

The task: go on counting. The reward of a completion is the share of its tokens that are one more
than the token before, modulo the size of the vocabulary; chance is 1 in 32.

Shape suffixes: B samples, T tokens, N query heads, K KV heads, H head dim, D model dim, V vocab.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxkv import LLM, SamplingParams

VOCAB, LAYERS, MODEL_DIM, FFN_DIM, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 64, 128, 4, 2, 16
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": MODEL_DIM,
    "intermediate_size": FFN_DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": ROPE_THETA,
    "tie_word_embeddings": False,
}
PROMPT_LEN, OUTPUT_LEN = 4, 16
PROMPTS, SAMPLES = 16, 8  # of each round, and of each prompt
EPOCHS, LEARNING_RATE, CLIP = 4, 3e-3, 0.2


class Weight(nnx.Module):
    """Holds one tensor, a matrix as [out, in], which is how checkpoints have it."""

    def __init__(self, value: jax.Array) -> None:
        self.weight = nnx.Param(value)


def matrix(rngs: nnx.Rngs, num_out: int, num_in: int) -> Weight:
    return Weight(jax.random.normal(rngs.params(), (num_out, num_in)) / num_in**0.5)


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + epsilon) * weight, [B, T, D]."""
    mean = jnp.mean(x_BTD * x_BTD, -1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean + NORM_EPS) * weight_D[None, None]


def rope(x_BTNH: jax.Array) -> jax.Array:
    """Rotates the halves of each head by angles that grow with the position."""
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-jnp.arange(half) / half)
    angle = jnp.arange(x_BTNH.shape[1])[None, :, None, None] * frequency[None, None, None]
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    """Attends causally; several query heads share a KV head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj = matrix(rngs, HEADS * HEAD_DIM, MODEL_DIM)
        self.k_proj = matrix(rngs, KV_HEADS * HEAD_DIM, MODEL_DIM)
        self.v_proj = matrix(rngs, KV_HEADS * HEAD_DIM, MODEL_DIM)
        self.o_proj = matrix(rngs, MODEL_DIM, HEADS * HEAD_DIM)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        b, t, _ = x_BTD.shape
        q = rope((x_BTD @ self.q_proj.weight.T).reshape(b, t, HEADS, HEAD_DIM))
        k = rope((x_BTD @ self.k_proj.weight.T).reshape(b, t, KV_HEADS, HEAD_DIM))
        v = (x_BTD @ self.v_proj.weight.T).reshape(b, t, KV_HEADS, HEAD_DIM)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return out.reshape(b, t, HEADS * HEAD_DIM) @ self.o_proj.weight.T


class FeedForward(nnx.Module):
    """Is the gated feed-forward of Llama."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate_proj = matrix(rngs, FFN_DIM, MODEL_DIM)
        self.up_proj = matrix(rngs, FFN_DIM, MODEL_DIM)
        self.down_proj = matrix(rngs, MODEL_DIM, FFN_DIM)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate = jax.nn.silu(x_BTD @ self.gate_proj.weight.T)
        return (gate * (x_BTD @ self.up_proj.weight.T)) @ self.down_proj.weight.T


class Layer(nnx.Module):
    """Adds attention and feed-forward of the normalised residual to it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.input_layernorm = Weight(jnp.ones(MODEL_DIM))
        self.self_attn = Attention(rngs)
        self.post_attention_layernorm = Weight(jnp.ones(MODEL_DIM))
        self.mlp = FeedForward(rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.self_attn(rms_norm(x_BTD, self.input_layernorm.weight[...]))
        return x_BTD + self.mlp(rms_norm(x_BTD, self.post_attention_layernorm.weight[...]))


class Body(nnx.Module):
    """Makes hidden states of tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed_tokens = matrix(rngs, VOCAB, MODEL_DIM)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = Weight(jnp.ones(MODEL_DIM))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed_tokens.weight[tokens_BT]
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return rms_norm(x_BTD, self.norm.weight[...])


class Policy(nnx.Module):
    """Is a Llama: its attributes are the parts of the names of a checkpoint's tensors."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.model = Body(rngs)
        self.lm_head = matrix(rngs, VOCAB, MODEL_DIM)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, [B, T, V]."""
        return self.model(tokens_BT) @ self.lm_head.weight.T


def named(params: nnx.State) -> dict[str, jax.Array]:
    """Returns the parameters under a checkpoint's names, such as model.layers.0.mlp.up_proj.weight:
    what `update_weights` takes.
    """
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}


def logprobs_of(graph: Any, params: nnx.State, tokens_BT: jax.Array) -> jax.Array:
    """Returns the training forward's logprobs of the tokens of the outputs, [B, OUTPUT_LEN]."""
    logits = nnx.merge(graph, params)(tokens_BT)[:, PROMPT_LEN - 1 : -1]
    all_logprobs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(all_logprobs, tokens_BT[:, PROMPT_LEN:, None], -1)[..., 0]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Holds what a round has sampled, the samples of a prompt after one another."""

    tokens_BT: np.ndarray  # prompts and outputs
    logprobs_BT: np.ndarray  # of the outputs' tokens, as the engine has drawn them
    rewards_B: np.ndarray

    @property
    def advantages_B(self) -> np.ndarray:
        """Tells how much better each sample is than its group, in the group's deviations."""
        groups = self.rewards_B.reshape(-1, SAMPLES)
        centred = groups - groups.mean(1, keepdims=True)
        return (centred / (groups.std(1, keepdims=True) + 1e-3)).reshape(-1)


def roll_out(llm: LLM, seed: int) -> Rollout:
    """Samples a group of completions for each of some prompts."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, VOCAB, (PROMPTS, 1))
    prompts = (first + np.arange(PROMPT_LEN)) % VOCAB
    params = SamplingParams(
        n=SAMPLES,
        temperature=1.0,
        max_tokens=OUTPUT_LEN,
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        seed=seed,
    )
    outputs = llm.generate(prompts.tolist(), params, use_tqdm=False)
    tokens, logprobs = [], []
    for output in outputs:
        for sample in output.outputs:
            tokens.append([*output.prompt_token_ids, *sample.token_ids])
            pairs = zip(sample.token_ids, sample.logprobs, strict=True)
            logprobs.append([found[token].logprob for token, found in pairs])
    tokens_BT = np.array(tokens, np.int32)
    counts_on = (tokens_BT[:, :-1] + 1) % VOCAB == tokens_BT[:, 1:]
    return Rollout(
        tokens_BT=tokens_BT,
        logprobs_BT=np.array(logprobs, np.float32),
        rewards_B=counts_on[:, PROMPT_LEN - 1 :].mean(1),
    )


class Trainer:
    """Has the policy's parameters and improves them. Mutable."""

    def __init__(self, seed: int) -> None:
        self.graph, self.params = nnx.split(Policy(nnx.Rngs(params=seed)))
        self.optimizer = optax.adam(LEARNING_RATE)
        self.state = self.optimizer.init(self.params)
        self.logprobs = jax.jit(partial(logprobs_of, self.graph))
        self._step = jax.jit(self._make_step())

    def _make_step(self) -> Any:
        def loss(params: Any, tokens_BT: Any, old_BT: Any, advantages_B: Any) -> jax.Array:
            ratio_BT = jnp.exp(logprobs_of(self.graph, params, tokens_BT) - old_BT)
            clipped_BT = jnp.clip(ratio_BT, 1 - CLIP, 1 + CLIP)
            gain_B1 = advantages_B[:, None]
            return -jnp.minimum(ratio_BT * gain_B1, clipped_BT * gain_B1).mean()

        def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
            updates, state = self.optimizer.update(jax.grad(loss)(params, *batch), state)
            return optax.apply_updates(params, updates), state

        return step

    def improve(self, rollout: Rollout) -> None:
        """Takes a few steps with what was sampled."""
        batch = rollout.tokens_BT, rollout.logprobs_BT, rollout.advantages_B
        for _ in range(EPOCHS):
            self.params, self.state = self._step(self.params, self.state, *batch)


class Compilations:
    """Counts the programs that JAX has compiled, the engine's and all others, since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_s: float, **about: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def make_engine(dtype: str) -> LLM:
    """Makes an engine of the policy's shape. It needs no checkpoint: the weights come later."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            lazy_compile=True,
            max_num_seqs=64,
            max_num_batched_tokens=128,
            max_model_len=PROMPT_LEN + OUTPUT_LEN,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Holds what a round has shown; `num_compiled` is of all rounds so far."""

    reward: float
    apart: float  # the largest |logprob of the engine - logprob of the training forward|
    num_compiled: int


def train(seed: int, dtype: str) -> Iterator[Round]:
    """Trains for as many rounds as are taken."""
    compilations = Compilations()
    trainer, llm = Trainer(seed), make_engine(dtype)
    for number in itertools.count():
        llm.update_weights(named(trainer.params))
        rollout = roll_out(llm, seed + number)
        training_BT = trainer.logprobs(trainer.params, rollout.tokens_BT)
        apart = np.abs(rollout.logprobs_BT - np.asarray(training_BT)).max()
        trainer.improve(rollout)
        yield Round(float(rollout.rewards_B.mean()), float(apart), compilations.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtype", default="float32", help="of the engine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    rounds = train(args.seed, args.dtype)
    print("round  reward  rollout - training logprobs, at most  compiled so far  seconds")
    for number, one in enumerate(itertools.islice(rounds, args.rounds)):
        if number % 5 == 0 or number in (1, args.rounds - 1):
            seconds = time.monotonic() - started
            print(
                f"{number:5}  {one.reward:6.3f}  {one.apart:36.1e}  {one.num_compiled:15}  "
                f"{seconds:7.1f}"
            )


if __name__ == "__main__":
    main()
