r"""Trains the demo model that ships in jaxkv/demo: a small Llama (GQA, head_dim 64, context 2048).

    # train; run again to resume after a stop
    python scripts/train_demo.py --work DIR --out jaxkv/demo
    # held-out bits per byte, recall by distance, samples
    python scripts/train_demo.py --evaluate jaxkv/demo
    # 8 layers
    python scripts/train_demo.py --deepen jaxkv/demo --steps 200 --lr 1e-3 --work DIR \
        --out DIR/model

Text: the source of the running Python's standard library (Python Software Foundation License
Version 2), with about one file in twenty held out by a hash of its path. Mixed in are two synthetic
kinds that teach attention to remember: random tokens repeated (they make induction appear early)
and recall documents, which define keys, go on with library code and ask for the values hundreds of
tokens later. A batch is a pure function of (seed, step).

Shape suffixes: B rows, T tokens, S keys of attention, N query heads, K KV heads, G = N/K, H head
dim, D model dim, F ffn dim, V vocab.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_data import BOS, EOS, PAD, VOCAB, Corpus, build_corpus, make_batch, recall_trial
from jax import Array
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

LAYERS, MODEL_DIM, HEADS, KV_HEADS, HEAD_DIM, FFN_DIM, CONTEXT = 4, 256, 4, 2, 64, 704, 2048
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
QUERY_BLOCK = 256
LOG_STEPS = 8
RECALL_DISTANCES = (100, 250, 500, 1000, 1500)
# Large temporaries otherwise page-fault on every step; glibc reads these only when a process
# starts.
MALLOC_ENV = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_ARENA_MAX": "1",
}


def init_params(seed: int) -> dict:
    """Fresh float32 parameters, every matrix as [out, in]; outputs of a residual branch start
    smaller.
    """
    rng, residual = np.random.default_rng(seed), (2 * LAYERS) ** -0.5
    q_dim, kv_dim = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def matrix(num_out: int, num_in: int, scale: float = 1.0) -> Array:
        return jnp.asarray(rng.normal(0, scale / math.sqrt(num_in), (num_out, num_in)), jnp.float32)

    layers = [
        {
            "q": matrix(q_dim, MODEL_DIM),
            "k": matrix(kv_dim, MODEL_DIM),
            "v": matrix(kv_dim, MODEL_DIM),
            "o": matrix(MODEL_DIM, q_dim, residual),
            "gate": matrix(FFN_DIM, MODEL_DIM),
            "up": matrix(FFN_DIM, MODEL_DIM),
            "down": matrix(MODEL_DIM, FFN_DIM, residual),
            "attn_norm": jnp.ones(MODEL_DIM),
            "mlp_norm": jnp.ones(MODEL_DIM),
        }
        for _ in range(LAYERS)
    ]
    return {"embed": matrix(VOCAB, MODEL_DIM, 0.5), "norm": jnp.ones(MODEL_DIM), "layers": layers}


def deepened(params: dict) -> dict:
    """Each layer twice at half its size, as one step of an integration is two of half the length:
    about the same function, and one that uses all of its layers from the start. Layers that begin
    silent have to be discovered.
    """
    halved = [
        layer | {name: layer[name] / 2 for name in ("o", "down")} for layer in params["layers"]
    ]
    return params | {
        "layers": [jax.tree.map(jnp.copy, layer) for layer in halved for _ in range(2)]
    }


def rms_norm(x_BTD: Array, weight_D: Array) -> Array:
    """Root-mean-square normalisation, computed in float32."""
    x32 = x_BTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + NORM_EPS)
    return (x32 * scale * weight_D.astype(jnp.float32)).astype(x_BTD.dtype)


def rope(x_BTNH: Array) -> Array:
    """Rotates the two halves of each head (the Hugging Face layout), positions 0..T-1, in
    float32.
    """
    freq = ROPE_THETA ** (-jnp.arange(HEAD_DIM // 2, dtype=jnp.float32) / (HEAD_DIM // 2))
    angle = jnp.arange(x_BTNH.shape[1], dtype=jnp.float32)[:, None, None] * freq
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def attend(q_BKGTH: Array, k_BKSH: Array, v_BKSH: Array, first: int) -> Array:
    """Causal softmax attention of the queries at positions first..first+T-1 to keys 0..S-1, softmax
    in float32.

    Dividing the output instead of the probabilities saves passes over [T, S]: 2.0 instead of 4.0 s
    per step at 2048.
    """
    scores = jnp.einsum(
        "bkgth,bksh->bkgts",
        q_BKGTH / math.sqrt(HEAD_DIM),
        k_BKSH,
        preferred_element_type=jnp.float32,
    )
    visible = first + jnp.arange(q_BKGTH.shape[3])[:, None] >= jnp.arange(k_BKSH.shape[2])
    scores = jnp.where(visible, scores, -1e30)
    unnormalised = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    out = jnp.einsum(
        "bkgts,bksh->bkgth",
        unnormalised.astype(v_BKSH.dtype),
        v_BKSH,
        preferred_element_type=jnp.float32,
    )
    return (out / jnp.sum(unnormalised, -1, keepdims=True)).astype(v_BKSH.dtype)


def attention(layer: dict, x_BTD: Array) -> Array:
    """Grouped-query self-attention; query blocks see only their prefix, which halves the work at
    2048.
    """
    b, t, _ = x_BTD.shape
    q = rope((x_BTD @ layer["q"].T).reshape(b, t, HEADS, HEAD_DIM))
    k = rope((x_BTD @ layer["k"].T).reshape(b, t, KV_HEADS, HEAD_DIM)).swapaxes(1, 2)
    v = (x_BTD @ layer["v"].T).reshape(b, t, KV_HEADS, HEAD_DIM).swapaxes(1, 2)
    q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).transpose(0, 2, 3, 1, 4)
    blocks = [
        attend(
            q[:, :, :, i : i + QUERY_BLOCK],
            k[:, :, : i + QUERY_BLOCK],
            v[:, :, : i + QUERY_BLOCK],
            i,
        )
        for i in range(0, t, QUERY_BLOCK)
    ]
    return (
        jnp.concatenate(blocks, 3).transpose(0, 3, 1, 2, 4).reshape(b, t, HEADS * HEAD_DIM)
        @ layer["o"].T
    )


def forward(params: dict, tokens_BT: Array, dtype: jnp.dtype) -> Array:
    """Returns float32 logits_BTV; matmuls run in `dtype`, norms, RoPE, softmax and logits in
    float32.
    """
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    x = params["embed"][tokens_BT]
    for layer in params["layers"]:
        x = x + attention(layer, rms_norm(x, layer["attn_norm"]))
        h = rms_norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(h @ layer["gate"].T) * (h @ layer["up"].T)) @ layer["down"].T
    return jnp.einsum(
        "btd,vd->btv",
        rms_norm(x, params["norm"]),
        params["embed"],
        preferred_element_type=jnp.float32,
    )


def token_losses(params: dict, tokens_BT: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Returns (nll_B(T-1) in nats, whether the argmax was right) of predicting tokens 1..T-1."""
    logits, target = forward(params, tokens_BT, dtype)[:, :-1], tokens_BT[:, 1:]
    chosen = jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen, jnp.argmax(logits, -1) == target


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """Muon for the layer matrices, AdamW for embedding and norms; warm-up, stable, then linear
    decay to zero.

    The decay starts at 75% of `steps`; until there runs of different lengths are identical.
    """
    warm_up, decay_at = min(100, steps // 8), int(0.75 * steps)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warm_up),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, steps - decay_at),
        ],
        [warm_up, decay_at],
    )
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def dimension_numbers(params: dict) -> dict:
        layers = [
            {k: None if k.endswith("_norm") else matrix for k in layer}
            for layer in params["layers"]
        ]
        return {"embed": None, "norm": None, "layers": layers}

    muon = optax.contrib.muon(
        schedule,
        weight_decay=0.1,
        consistent_rms=0.2,
        adam_b2=0.98,
        muon_weight_dimension_numbers=dimension_numbers,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def make_train_step(optimizer: optax.GradientTransformation):
    """Returns jitted ((params, opt_state), tokens_BT, weights_BT) -> ((params, opt_state),
    loss).
    """

    def loss_fn(params: dict, tokens_BT: Array, weights_BT: Array) -> Array:
        nll, _ = token_losses(
            params, tokens_BT, jnp.bfloat16
        )  # twice as fast as float32 with AVX512-BF16
        return jnp.sum(nll * weights_BT[:, 1:]) / jnp.sum(weights_BT[:, 1:])

    def train_step(state: tuple, tokens_BT: Array, weights_BT: Array) -> tuple[tuple, Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BT, weights_BT)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(train_step, donate_argnums=0)


def save_checkpoint(path: Path, state: tuple, step: int) -> None:
    """Writes every leaf of (params, opt_state) in tree order, atomically."""
    temporary = path.with_suffix(".tmp")
    save_file(
        {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))},
        temporary,
        metadata={"step": str(step)},
    )
    os.replace(temporary, path)


def load_checkpoint(path: Path, state: tuple) -> tuple[tuple, int]:
    """Returns (state, step) with the saved leaves in the structure of the freshly initialised
    `state`.
    """
    with safe_open(path, "numpy") as file:
        step, leaves = (
            int(file.metadata()["step"]),
            [jnp.asarray(file.get_tensor(key)) for key in sorted(file.keys())],
        )
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in jax.tree.leaves(state)]:
        raise ValueError(
            f"{path} is of another model or optimiser: start again with a fresh --work"
        )
    return jax.tree.unflatten(jax.tree.structure(state), leaves), step


def train(args: argparse.Namespace) -> None:
    """Trains from the checkpoint in --work, or from scratch, to --steps; exports on the way and at
    the end.
    """
    args.work.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(args.steps, args.lr)
    if args.deepen:
        corpus = build_corpus(Tokenizer.from_file(str(args.deepen / "tokenizer.json")))
        params = deepened(load_exported(args.deepen))
    else:
        corpus, params = build_corpus(), init_params(args.seed)
    state, step, checkpoint = (
        (params, optimizer.init(params)),
        0,
        args.work / "checkpoint.safetensors",
    )
    if checkpoint.exists():
        state, step = load_checkpoint(checkpoint, state)
    print(
        f"{len(corpus.tokens)} training tokens, {len(corpus.held_out)} files held out, from step "
        f"{step}",
        flush=True,
    )
    train_step, stop, losses = make_train_step(optimizer), [], []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    saved = started = time.monotonic()
    while step < args.steps and not stop:
        state, loss = train_step(state, *make_batch(corpus, args.seed, step))
        losses.append(float(loss))
        step += 1
        if step % LOG_STEPS == 0:
            record = {
                "step": step,
                "loss": round(float(np.mean(losses)), 4),
                "s_per_step": round((time.monotonic() - started) / len(losses), 3),
            }
            with open(args.work / "log.jsonl", "a") as log:
                log.write(json.dumps(record) + "\n")
            losses, started = [], time.monotonic()
        if time.monotonic() - saved > 60 * args.export_minutes or step == args.steps or stop:
            save_checkpoint(checkpoint, state, step)
            export(state[0], corpus.tokenizer, args.out)
            saved = time.monotonic()
    print(f"stopped at step {step} of {args.steps}", flush=True)


LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
CONFIGS = {  # what transformers expects beside the weights and tokenizer.json
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": MODEL_DIM,
        "intermediate_size": FFN_DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "initializer_range": 0.02,
        **IDS,
    },
    "generation_config.json": {"do_sample": True, "temperature": 0.8, "min_p": 0.05, **IDS},
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    },
}


def export(params: dict, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the Hugging Face directory (bfloat16, transformers' names; both sides hold matrices as
    [out, in]).

    Each file is replaced atomically and only the weights ever change, so a reader never sees half a
    model.
    """
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for i, layer in enumerate(params["layers"]):
        tensors |= {f"model.layers.{i}.{LAYER_NAMES[name]}.weight": w for name, w in layer.items()}
    configs = CONFIGS | {
        "config.json": CONFIGS["config.json"] | {"num_hidden_layers": len(params["layers"])}
    }
    texts = {name: json.dumps(config, indent=2) + "\n" for name, config in configs.items()}
    texts["tokenizer.json"] = tokenizer.to_str()
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / f".{name}.tmp").write_text(text, encoding="utf-8")
    weights = out / ".model.safetensors.tmp"
    save_file(
        {k: np.asarray(w.astype(jnp.bfloat16)) for k, w in tensors.items()},
        weights,
        metadata={"format": "pt"},
    )
    weights.chmod(0o644)  # safetensors creates it readable by its owner only
    for name in [*texts, "model.safetensors"]:
        os.replace(out / f".{name}.tmp", out / name)


def load_exported(directory: Path) -> dict:
    """The inverse of export, in float32."""
    tensors = {
        k: jnp.asarray(w, jnp.float32)
        for k, w in load_file(directory / "model.safetensors").items()
    }
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    layers = [
        {name: tensors[f"model.layers.{i}.{hf}.weight"] for name, hf in LAYER_NAMES.items()}
        for i in range(num_layers)
    ]
    return {
        "embed": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "layers": layers,
    }


def pad_rows(rows: list[list[int]], num_rows: int, length: int) -> np.ndarray:
    """Returns int32 tokens_BT of a fixed shape, so that one compilation serves; padding comes last,
    unseen.
    """
    tokens = np.full((num_rows, length), PAD, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens


def recall_accuracy(params: dict, corpus: Corpus, distance: int, trials: int) -> float:
    """Share of trials where greedy decoding gives the whole value and its closing quote."""
    rng, correct, batch = random.Random(f"recall/{distance}"), 0, 16
    is_right = jax.jit(lambda p, t: token_losses(p, t, jnp.float32)[1])
    length = -(-(distance + 220) // QUERY_BLOCK) * QUERY_BLOCK
    for _ in range(0, trials, batch):
        group = [recall_trial(rng, corpus, distance) for _ in range(batch)]
        right = np.asarray(is_right(params, pad_rows([ids for ids, _ in group], batch, length)))
        correct += sum(
            right[row, start - 1 : len(ids) - 1].all() for row, (ids, start) in enumerate(group)
        )
    return correct / (-(-trials // batch) * batch)


def bits_per_byte(params: dict, corpus: Corpus) -> tuple[float, float]:
    """Returns (bits per UTF-8 byte, bytes per token) of the held-out files in windows of <s> and
    2,047 tokens.
    """
    rows, num_bytes = [], sum(len(text.encode()) for text in corpus.held_out)
    for text in corpus.held_out:
        ids = corpus.tokenizer.encode(text, add_special_tokens=False).ids
        rows += [[BOS, *ids[i : i + CONTEXT - 1]] for i in range(0, len(ids), CONTEXT - 1)]
    nll, nats = jax.jit(lambda p, t: token_losses(p, t, jnp.float32)[0]), 0.0
    for i in range(0, len(rows), 8):
        tokens = pad_rows(rows[i : i + 8], 8, CONTEXT)
        nats += float(
            np.sum(np.asarray(nll(params, tokens)), where=tokens[:, 1:] != PAD, dtype=np.float64)
        )
    return nats / math.log(2) / num_bytes, num_bytes / sum(len(ids) - 1 for ids in rows)


def sample(params: dict, tokenizer: Tokenizer, prompt: str, temperature: float) -> str:
    """Continues `prompt` to 128 tokens without a cache (temperature 0 is greedy)."""
    ids, rng = tokenizer.encode(prompt).ids, np.random.default_rng(0)
    next_logits = jax.jit(lambda p, t, n: forward(p, t, jnp.float32)[0, n - 1])
    while len(ids) < 128 and ids[-1] != EOS:
        logits = np.asarray(next_logits(params, pad_rows([ids], 1, 128), len(ids)))
        ids.append(int(np.argmax(logits + temperature * rng.gumbel(size=logits.shape))))
    return tokenizer.decode(ids)


def evaluate(directory: Path, trials: int) -> None:
    """Prints bits per byte, recall by distance and two samples of an exported model as JSON
    lines.
    """
    corpus = build_corpus(Tokenizer.from_file(str(directory / "tokenizer.json")))
    params = load_exported(directory)
    bpb, bytes_per_token = bits_per_byte(params, corpus)
    print(
        json.dumps(
            {"held_out_bits_per_byte": round(bpb, 4), "bytes_per_token": round(bytes_per_token, 3)}
        )
    )
    for distance in RECALL_DISTANCES:
        accuracy = round(recall_accuracy(params, corpus, distance, trials), 4)
        print(json.dumps({"recall_distance": distance, "accuracy": accuracy}), flush=True)
    for temperature in (0.0, 0.7):
        text = sample(params, corpus.tokenizer, "def fibonacci(n):", temperature)
        print(json.dumps({"temperature": temperature, "sample": text}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--work", type=Path, default=Path.home() / "demo_work", help="checkpoint and log"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("jaxkv/demo"), help="Hugging Face directory to write"
    )
    parser.add_argument("--steps", type=int, default=2120)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--deepen", type=Path, metavar="DIR", help="begin with this exported model, twice as deep"
    )
    parser.add_argument("--export-minutes", type=float, default=10.0)
    parser.add_argument(
        "--evaluate", type=Path, metavar="DIR", help="measure an exported model instead of training"
    )
    parser.add_argument("--trials", type=int, default=208, help="recall trials per distance")
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC_ENV.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_ENV})
    os.nice(19 - os.nice(0))
    evaluate(args.evaluate, args.trials) if args.evaluate else train(args)


if __name__ == "__main__":
    main()
