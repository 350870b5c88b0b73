# %% [markdown]
# # jaxkv quickstart
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/#upload=true)
#
# jaxkv runs language models in JAX. Its KV cache is one immutable value made of fixed-size pages:
# every compiled step takes that value and returns its successor.
#
# In this notebook you install it, load the demo model and then **a checkpoint of your own**,
# generate, stream, and measure your device. A CPU is enough. If you know vLLM, you know the names.

# %% [markdown]
# ## 1. Install
#
# On Colab, choose a TPU or GPU first (*Runtime > Change runtime type*), and drop a wheel of jaxkv
# into the *Files* panel (`pip wheel --no-deps .` in a checkout makes one). `SOURCE` says where
# jaxkv comes from: that wheel, or else the package index; a git URL is possible too. The cell finds
# out which JAX the machine needs (a TPU, CUDA 12, CUDA 13 or none of them) and tells you whether to
# restart: Colab brings an older JAX and numpy, and what Python has imported already stays as it was
# until then. Where jaxkv is installed, the cell does nothing.

# %%
import ctypes
import subprocess
import sys
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec

SOURCE = max(glob("jaxkv-*.whl"), default="jaxkv")  # or "git+https://..."


def cuda_version():
    """Returns the newest CUDA that the GPU's driver runs: 12080 is 12.8. 0: no driver."""
    try:
        driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    driver.cuDriverGetVersion(ctypes.byref(found))
    return found.value


def extra():
    """Returns the extra of jaxkv that brings the JAX for this machine."""
    if glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"):
        return "[tpu]"
    if cuda := cuda_version():
        return "[cuda13]" if cuda >= 13000 else "[cuda12]"
    return ""


if find_spec("jaxkv") is not None:
    print("jaxkv is installed")
else:
    name = f"jaxkv{extra()} @ {SOURCE}" if SOURCE.startswith("git+") else SOURCE + extra()
    print("installing", name)
    command = [sys.executable, "-m", "pip", "install", "-q", name]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        raise RuntimeError(pip.stderr)
    loaded = [name for name in ("numpy", "jax", "transformers") if name in sys.modules]
    if old := [name for name in loaded if sys.modules[name].__version__ != version(name)]:
        print("Restart now (Runtime > Restart session), then go on:", *old, "were loaded before")
    else:
        print("installed; no restart is needed")

# %% [markdown]
# ## 2. Your device
#
# JAX takes the best device that it has a plugin for, and jaxkv takes JAX's first device. If you
# have chosen a TPU or GPU and this says `cpu`, restart the session; if it still does, run `%pip
# install "jaxkv[tpu]"` (or `[cuda12]`, `[cuda13]`) and restart. The programs for TPUs and GPUs are
# compiled in the project's tests, but as its README says, no TPU has run them yet: if
# you are the first, please tell us how it went.

# %%
import jax

print("jax", jax.__version__, "on", jax.default_backend())
print(*jax.devices(), sep="\n")

# %% [markdown]
# ## 3. The demo model
#
# Without a name, `LLM` loads the model that comes with jaxkv: 3.5 million parameters, trained on
# Python's standard library. It writes what looks like Python; it is there to try things on. The
# limits here are small so that its programs compile quickly; leave these arguments out and jaxkv
# chooses them for your device.

# %%
from jaxkv import LLM, SamplingParams

llm = LLM(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128)

params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=48, seed=1)
prompts = ["def read(self, size):", "class Stack:", "import os"]
for output in llm.generate(prompts, params, use_tqdm=False):
    print(output.prompt + output.outputs[0].text)
    print("-" * 80)

# %% [markdown]
# Prompts go through the model together; results come in the order of the prompts. Every prompt may
# have its own parameters: greedy, sampled with log-probabilities, or up to a stop string. What is
# not supported is refused by name, never ignored.

# %%
each = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(min_p=0.1, seed=7, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.7, seed=7, max_tokens=64, stop=["\n"]),
]
outputs = llm.generate(["for name in sorted("] * 3, each, use_tqdm=False)
for output in outputs:
    completion = output.outputs[0]
    print(f"{len(completion.token_ids):3} tokens, {completion.finish_reason:6} {completion.text!r}")

print("\nthe second one's first token, and what else it could have been:")
for token_id, entry in outputs[1].outputs[0].logprobs[0].items():
    name = f"{entry.decoded_token!r} (token {token_id})"
    print(f"  rank {entry.rank}: {name}, log-probability {entry.logprob:.2f}")

# %% [markdown]
# ## 4. Your own checkpoint
#
# Set `MODEL` to a hub id, such as `"HuggingFaceTB/SmolLM2-135M"` (about 270 MB), or to a directory
# with a `config.json`, safetensors and a tokenizer.
#
# - **A public model** needs nothing else.
# - **A gated or private model** needs its licence accepted on its page, and a token: keep it as
#   `HF_TOKEN` in Colab's secrets (the key symbol on the left) or in the environment, where it is
#   found, or pass `hf_token="hf_..."`.
# - **If it does not fit**, `quantization="int8"` halves the weights and `kv_cache_dtype="int8"` the
#   cache; `jaxkv plan` says beforehand what fits (the notebook `plan_a_tpu`).
#
# With `None`, this notebook needs no network: it saves the demo model in a directory and loads
# that.

# %%
import shutil
import tempfile
from pathlib import Path

import jaxkv

MODEL = None  # "HuggingFaceTB/SmolLM2-135M", "/content/drive/MyDrive/my-model", ...
TOKEN = None  # HF_TOKEN or your login, if there is one; False: ask without a token

folder = tempfile.TemporaryDirectory()  # gone when the notebook ends
demo = Path(jaxkv.__file__).parent / "demo"
model = MODEL or shutil.copytree(demo, Path(folder.name) / "my-model")
own = LLM(model, hf_token=TOKEN, max_model_len=512, max_num_seqs=4, lazy_compile=True)
params = SamplingParams(temperature=0, max_tokens=16)
(output,) = own.generate("import sys", params, use_tqdm=False)
print(output.prompt + output.outputs[0].text)

# %% [markdown]
# `describe` says what was loaded, where memory goes, which programs there are, and which backend
# was chosen and why. (With `lazy_compile=True` a program is compiled when it is first needed, which
# is quicker for a first look.)

# %%
print(own.describe().replace(folder.name, "...").replace(str(Path.home()), "~"))

# %% [markdown]
# ## 5. Streaming and chat
#
# `stream` yields what is new, in whole characters, as it is made. A model with a chat template also
# has `own.chat([{"role": "user", "content": "..."}])`.

# %%
prompt = "import os\nimport sys\n\ndef main("
print(prompt, end="")
for piece in llm.stream(prompt, SamplingParams(temperature=0.7, seed=3, max_tokens=96)):
    print(piece.outputs[0].text, end="", flush=True)

# %% [markdown]
# ## 6. How fast is it here?
#
# Tokens per second on your device, one request alone and eight together. The demo model is so small
# that this is mostly the cost of starting each step; put `own` in the place of `llm` for a figure
# that says something about the device. The figure is yours: none is stored in this notebook.

# %% tags=["measures"]
import time

params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
for num_requests in (1, 8):
    llm.generate(["import sys"] * num_requests, params, use_tqdm=False)  # nothing compiles later
    started = time.perf_counter()
    outputs = llm.generate(["import os"] * num_requests, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_requests} at once: {num_tokens / elapsed_s:6.0f} tokens/s on {jax.devices()[0]}")

# %% [markdown]
# ## Where to go next
#
# - The notebooks beside this one: `kv_as_a_value` (fork, rewind and save a cache), `smaller_caches`
#   (what int8 or int4 costs in quality), `plan_a_tpu` (what fits on a chip that you do not have).
# - `jaxkv generate "def main("`, `jaxkv batch -i prompts.jsonl -o results.jsonl` and `jaxkv serve`
#   do the same from a shell.
# - `README.md`: which models, sampling parameters and devices work, what was measured, and the
#   limits.
