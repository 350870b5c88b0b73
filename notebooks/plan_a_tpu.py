# %% [markdown]
# # Plan a TPU that you do not have
#
# Before you rent a TPU, two questions: does the model fit, and do its programs compile? `jaxkv
# plan` answers the first in a second, from the model's `config.json` alone. `jaxkv check` answers
# the second with the TPU's own compiler, which needs no TPU. **Neither says how fast anything is**,
# and no TPU takes part. The notebook `quickstart` installs jaxkv.
#
# The example has the shape of Llama-3.1-8B, written down here so that no network is needed. For a
# model of your own put its hub id or directory in the place of `model`.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
folder = tempfile.TemporaryDirectory()  # gone when the notebook ends
model = Path(folder.name) / "config.json"
model.write_text(json.dumps(config))


def jaxkv(*arguments):
    """Runs the command `jaxkv` and prints what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxkv", *map(str, arguments)], capture_output=True, text=True
    )
    said = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    print(said.replace(f"{folder.name}/", ""))


# %% [markdown]
# ## Does it fit?
#
# A v5e chip has 16 GB, a v6e chip 32 GB. `v6e` is one chip, `v5e:2x4` are eight.

# %%
limits = ["--max-model-len", 8192, "--max-num-seqs", 16, "--context", 8192]
jaxkv("plan", model, "--target", "v5e", "v6e", *limits)

# %% [markdown]
# Weights come first; what they leave is the cache, so the last lines say how many sequences of
# 8,192 tokens run at once. On one v5e the weights alone are too large in bfloat16. Three ways out:
# smaller weights, a smaller cache, or more chips.

# %%
jaxkv("plan", model, "--target", "v5e", *limits, "--quantization", "int8")

# %%
jaxkv("plan", model, "--target", "v5e", *limits, "--quantization", "int8", "--kv-dtype", "int8")

# %%
jaxkv("plan", model, "--target", "v5e:2x2", *limits)

# %% [markdown]
# `--sequences 40` says of a number whether so many fit, `--json` gives the same in bytes, and
# `--svg` draws it.

# %%
from IPython.display import SVG, display

picture = Path(folder.name) / "plan.svg"
jaxkv("plan", model, "--target", "v6e", "v5e:2x2", "tpu7x", *limits, "--svg", picture)
display(SVG(picture.read_text().replace(f"{folder.name}/", "")))

# %% [markdown]
# ## Does it compile?
#
# `jaxkv check` compiles the attention kernels and, with a model, the engine's programs for each
# target. It fails where the compiler refuses something, where a program does not fit, and where one
# copies weights or cache. It needs `pip install "jaxkv[tpu]"` on Linux; without that this cell only
# says so. Here it compiles one kernel, which takes some seconds. For the whole engine run `jaxkv
# check MODEL --target v6e --max-model-len 8192`, which takes minutes.

# %%
from importlib.util import find_spec

if find_spec("libtpu") is None:
    print('not installed: pip install "jaxkv[tpu]"')
else:
    jaxkv("check", "--shape", "8b", "--kernel", "decode", "--target", "v6e")

# %% [markdown]
# What the columns mean is in `docs/check.md`; how the plan counts, and how far the compiler agrees,
# in `docs/benchmarks/plan.md`. On the TPU itself the arguments are the same ones: `LLM(MODEL,
# max_model_len=8192, max_num_seqs=16, quantization="int8")`.
