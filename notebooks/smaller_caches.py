# %% [markdown]
# # Smaller KV caches: quality against bytes
#
# `LLM(kv_cache_dtype="int8")` stores keys and values in one byte instead of two, `"int4"` in half
# of one. Twice to four times the tokens fit into the same memory, and the model's numbers change a
# little. This notebook measures how little, on the demo model, with source files that it was not
# trained on. It measures memory and quality, not speed. The notebook `quickstart` installs jaxkv.

# %%
import calendar
import inspect
import json.encoder
import random

from jaxkv import LLM, SamplingParams

held_out = [calendar, random, json.encoder]  # not among the files that the demo model learned from
texts = [inspect.getsource(module)[:4500] for module in held_out]

# %% [markdown]
# ## How it is measured
#
# One engine for each kind of cache, with the same memory for it: 2 MiB. Weights and everything else
# are float32, so that only the cache differs. The model reads 1,000 tokens of each file, and says
# of each token how likely it was after those before it (`prompt_logprobs`). What it reads of the
# earlier tokens comes from the cache, as it is when it generates. The mean of minus these
# log-probabilities is the *nll*, in nats per token: lower is better.

# %%
KINDS = ["bfloat16", "int8", "int4", "turboquant3"]
score = SamplingParams(max_tokens=1, prompt_logprobs=0)


def measure(kind):
    """Returns (nats per token, tokens that fit in 2 MiB) with this kind of cache."""
    with LLM(
        dtype="float32",
        kv_cache_dtype=kind,
        kv_cache_memory_bytes=2 * 2**20,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        lazy_compile=True,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [{"prompt_token_ids": tokenizer.encode(text)[:1000]} for text in texts]
        scores = []
        for output in llm.generate(prompts, score, use_tqdm=False):
            for token, entries in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            ):
                scores.append(-entries[token].logprob)
        return sum(scores) / len(scores), llm.num_kv_tokens


measured = {kind: measure(kind) for kind in KINDS}

# %% [markdown]
# ## What it costs
#
# The change of nll is relative to the cache in bfloat16. Read it with care: three files are few,
# and changes of a few hundredths of a percent may have either sign. `docs/kv-lab.md` has the same
# with more text, intervals and recall.

# %%
base_nll, base_tokens = measured["bfloat16"]
print(f"{'cache':14} {'tokens in 2 MiB':>15} {'times':>6} {'nll':>7} {'change':>8}")
for kind, (nll, num_tokens) in measured.items():
    times, change = num_tokens / base_tokens, nll / base_nll - 1
    print(f"{kind:14} {num_tokens:15,} {times:6.2f} {nll:7.4f} {change:+8.2%}")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for kind, (nll, num_tokens) in measured.items():
    x, y = num_tokens / base_tokens, 100 * (nll / base_nll - 1)
    axis.plot(x, y, "o", color="C0")
    axis.annotate(kind, (x, y), textcoords="offset points", xytext=(6, 5))
axis.set(xlabel="tokens in the same memory, bfloat16 = 1", ylabel="change of nll, %")
axis.margins(x=0.25, y=0.15)
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Which one to take: int8 costs next to nothing, so it is what to try first. int4 is for when memory
# is what you lack. The TPU and GPU kernels take both. The turboquant codecs run on XLA only,
# and take more time to decode.
#
# ## Bounding the cache instead
#
# The other way to a smaller cache is to keep fewer pages. A `kv_policy` decides which pages stay
# when a request has more than `kv_budget` tokens' bytes. What it drops is gone; what it *demotes*
# is stored in a smaller codec. To see the difference, define a value, let 600 tokens of other code
# follow, and ask for the value.

# %%
limits = {
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "lazy_compile": True,
}


def answer(llm, **policy):
    """Returns what the model says the value is, under a policy."""
    encode = llm.get_tokenizer().encode
    ids = encode(texts[2][:300] + "\nKEY_x7f = 'q4m2'\n")
    ids += encode(texts[1], add_special_tokens=False)[:600]
    ids += encode("\nassert KEY_x7f == '", add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=8, stop=["'"], **policy)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return output.outputs[0].text


with LLM(**limits) as llm:
    print("everything stays      ", answer(llm))
with LLM(kv_policy="streaming:int4", kv_budget=384, **limits) as llm:
    print("the latest pages only ", answer(llm, kv_policy="streaming"))
    print("all, the older in int4", answer(llm, kv_policy="streaming:int4"))

# %% [markdown]
# With `streaming` the definition has been dropped, and the answer is made up. `streaming:int4` has
# the same bytes, and the definition is still there in 4 bits. Demote before you drop.
# `docs/kv-policies.md` compares all policies, `docs/kv-codecs.md` all codecs.
