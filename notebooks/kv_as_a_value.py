# %% [markdown]
# # The KV cache as a value
#
# While a language model writes, it keeps two vectors, a key and a value, of every token in every
# layer: the KV cache. In most runtimes it is a buffer inside of an engine. In jaxkv it is a value,
# as a tuple is one: a function takes it and returns its successor. So it can be forked, taken back,
# saved, and given to another process.
#
# This notebook shows that twice: in `jaxkv.functional`, which is the compiled programs and nothing
# else, and in sessions, which are the same idea on top of the engine that serves many requests at
# once. The notebook `quickstart` installs jaxkv.
#
# First a function that draws pages. The cache is made of *pages* of 16 tokens. A square is a page,
# its colour the row that holds it, the number its place in that row. Grey is free; two colours in
# one square are two rows that share the page.

# %%
import matplotlib.pyplot as plt


def draw(tables, num_pages=24):
    holders = list(dict.fromkeys(holder for table in tables.values() for holder in table))
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(9.5, 0.9 * len(tables)), squeeze=False, layout="constrained"
    )
    for axis, (title, table) in zip(axes.flat, tables.items(), strict=True):
        for page in range(num_pages):
            sharing = [holder for holder, pages in table.items() if page in pages]
            width = 0.9 / max(1, len(sharing))
            axis.barh(0, 0.9, 0.9, page, color="0.92")
            for i, holder in enumerate(sharing):
                colour = f"C{holders.index(holder)}"
                axis.barh(0, width, 0.9, page + width * i, color=colour)
            place = table[sharing[0]].index(page) if sharing else ""
            axis.text(page + 0.45, 0, place, color="white", weight="bold", ha="center", va="center")
        axis.set(aspect="equal", frame_on=False, xticks=[], yticks=[])
        axis.set_title(title, loc="left", size=11)
    swatches = [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(holders))]
    figure.legend(swatches, holders, loc="outside upper right", ncols=len(holders), frameon=False)
    plt.show()


# %% [markdown]
# ## Prefill and decode
#
# A state has room for some pages and rows, a row being one sequence. `prefill` computes prompts,
# `decode` generates tokens, on the device and without asking Python in between. Each takes the
# state and returns its successor. `kv.rows` says which row holds which pages: nothing is remembered
# elsewhere.

# %%
from jaxkv import SamplingParams
from jaxkv import functional as jk

model = jk.load()  # a directory or a hub id; nothing: the demo model, which writes Python
kv = jk.empty(model, num_pages=24, page_size=16, num_rows=2)

prompt = model.tokenizer.encode("import os\nimport sys\n\n\ndef main(")
drawn = SamplingParams(temperature=0.7, seed=3, ignore_eos=True)

kv, logits = jk.prefill(model, kv, {0: prompt})  # {row: tokens}
kv, tokens = jk.decode(model, kv, {0: logits[0].argmax()}, n=64, sampling=drawn)
print(model.tokenizer.decode([*prompt, *tokens[0].tolist()], skip_special_tokens=True))
print("row lengths:", kv.lengths)

# %% [markdown]
# ## Fork and rewind
#
# A fork copies a row's list of pages, not the pages, so it costs nothing. A page that several rows
# hold is never written to: the first row that needs to gets a copy of it. Rewinding shortens a
# row's list.


# %%
def rows(kv):
    return {f"row {i}": row.pages for i, row in enumerate(kv.rows) if row.pages}


seen = {"Row 0: a prompt and 64 tokens": rows(kv)}
kv = jk.fork(kv, 0, to=1)
seen["Row 1 is a fork of it: the same pages"] = rows(kv)
kv = jk.rewind(kv, 1, length=40)
seen["Row 1 goes back to 40 tokens"] = rows(kv)
kv, both = jk.decode(model, kv, {0: tokens[0, -1], 1: tokens[0, -1]}, n=64, sampling=drawn)
seen["Both go on: row 1 has a copy of the page in which it was cut"] = rows(kv)
draw(seen)

# %% [markdown]
# One thing is not as with a tuple. The programs write into the pages that they are given, because
# the cache is large and exists only once. So a state that was passed to `prefill` or `decode` is
# consumed, and using it again is an error instead of a wrong result. `fork` and `rewind` consume
# nothing. Whoever wants to keep a state copies it: it is a pytree.

# %%
import jax
import jax.numpy as jnp

before, kept = kv, jax.tree.map(jnp.copy, kv)
kv, one = jk.decode(model, kv, {0: 5}, n=8)
try:
    jk.decode(model, before, {0: 5}, n=8)
except RuntimeError as error:
    print("refused:", error)
kept, two = jk.decode(model, kept, {0: 5}, n=8)
print("the copy writes the same:", bool((one == two).all()))

# %% [markdown]
# ## Sessions
#
# `LLM` runs many requests at once and decides what runs when. A *session* is a sequence of tokens
# in it, as a value: every method leaves the session as it was and returns a new one. Here two
# continuations begin at the same place.

# %%
from jaxkv import LLM

llm = LLM(max_model_len=512, max_num_seqs=4, lazy_compile=True)

text = "import os\nimport shutil\n\n\ndef copy(source, target):\n    # Both are names of files"
start = llm.session(text + " or of directories that exist.\n")
careful, first = start.generate(SamplingParams(temperature=0, max_tokens=24))
daring, second = start.generate(SamplingParams(temperature=1, seed=1, max_tokens=24))
print(first.text)
print("-" * 40)
print(second.text)
print("-" * 40)
print(len(start), "tokens;", len(careful), "and", len(daring), "in the two that go on from it")
print("pages in common:", sorted(set(careful.pages) & set(daring.pages)))

# %% [markdown]
# `rewind` takes tokens back, `extend` puts others behind, and `logprobs` says how likely
# continuations are without generating any. All use the pages that are there already.

# %%
again = careful.rewind(to=start).extend('    """Copy a file')
print(again.text)
print("-" * 40)
choices = ['."""\n', " to another.\n", " + 1 == x\n"]
for choice, scores in zip(choices, again.logprobs(choices), strict=True):
    print(f"{sum(scores) / len(scores):6.2f} per token {choice!r}")

# %% [markdown]
# ## Save and restore
#
# A session can be written to a file, pages and all, and restored in another process, also with
# pages of another size. The restored session computes nothing that the file holds. The file knows
# the model, its weights and its vocabulary, and every page has a hash: a wrong or damaged file is
# refused.

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "careful.session"
    careful.save(path)
    print(f"{path.stat().st_size / 1024:.0f} KiB for {len(careful)} tokens")
    llm.shutdown()

    other = LLM(max_model_len=512, max_num_seqs=4, block_size=8, lazy_compile=True)
    restored = other.restore(path)
    print("the same tokens:", restored.tokens == careful.tokens)
    (output,) = other.generate([restored.prompt], SamplingParams(max_tokens=8), use_tqdm=False)
    print(output.num_cached_tokens, "of", len(restored), "tokens came from the file's pages")

    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # one bit
    bad = Path(folder) / "bad.session"
    bad.write_bytes(damaged)
    try:
        other.restore(bad)
    except ValueError as error:
        print("refused:", str(error).replace(folder, "..."))

# %% [markdown]
# ## Where to go next
#
# - `docs/functional.md`: every function, and continuations that `jax.vmap`, `lax.scan` and
#   `jax.grad` go through.
# - `docs/sessions.md`: tree of thought, best of n, self-consistency, an agent that takes back a
#   step.
# - `jaxkv/functional.py` is the file to read: the whole of it is shorter than this page's subject
#   sounds.
