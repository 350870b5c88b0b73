"""Tiny EAGLE-3 draft layers in both forms that are published, and transformers' layers put together to
one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxkv.models.families import read_config, read_family
from jaxkv.models.families.eagle import BLOCK, read_eagle
from predicting import ALLOWED
from tiny import BASE, draw_leaf, stored

IDS = "eagle_aux_hidden_state_layer_ids"
NUM_HEAD = 60
"""Tokens that the layer may propose, of 151."""

BLOCKS = {
    "llama": {"model_type": "llama", "rope_theta": 1e4, "head_dim": 8},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "attention_bias": True},
}


def eagle_config(block: str = "llama", *, speculators: bool = False, **changes: Any) -> dict:
    """config.json of a layer for a model of three layers."""
    inner = BASE | BLOCKS[block] | {"num_hidden_layers": 1, "max_position_embeddings": 16}
    outer = {"draft_vocab_size": NUM_HEAD, IDS: [0, 1, 3]} | changes
    if not speculators:
        return inner | {"architectures": ["LlamaForCausalLMEagle3"]} | outer
    kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
    return {"transformer_layer_config": inner, **kind, **outer}


def make_eagle(
    directory: Path, model: Path, *, prefix: str = "", embed_factor: float = 0.0, **given: Any
) -> Path:
    """Writes a layer for the model. prefix: of the names of its tensors but the head's.
    embed_factor: it has the model's embeddings, multiplied by that.
    """
    directory.mkdir(parents=True)
    config = eagle_config(**given)
    (directory / "config.json").write_text(json.dumps(config))
    own = read_eagle(read_config(directory), *read_family(read_config(model)))
    rng = np.random.default_rng(5)
    tensors = {name: draw_leaf(rng, name, leaf) for name, leaf in stored(*own).items()}
    if "d2t" in tensors:
        tokens = [*ALLOWED[::2], *rng.permutation(np.arange(20, 151))[: NUM_HEAD - 2]]
        tensors["d2t"] = np.sort(tokens) - np.arange(NUM_HEAD)
        tensors["t2d"] = np.isin(np.arange(151), tokens)
    if embed_factor:
        embed = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = embed * np.float32(embed_factor)
    if "transformer_layer_config" in config:
        tensors = {name.replace(BLOCK, "layers.0."): x for name, x in tensors.items()}
    bare = ("lm_head.weight", "d2t", "t2d")
    tensors = {name if name in bare else prefix + name: x for name, x in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class EagleReference:
    """The model and its draft layer in transformers, in float64, each over a whole sequence at once.
    As `predicting.Reference` has them.
    """

    def __init__(self, torch: Any, directory: Path, draft: Path) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
        from transformers.models.llama import modeling_llama
        from transformers.models.qwen3 import modeling_qwen3

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        config = json.loads((draft / "config.json").read_text())
        inner = config.get("transformer_layer_config", config)
        self._config, self._is_speculators = config, inner is not config
        is_qwen = inner["model_type"] == "qwen3"
        kind, module = (Qwen3Config, modeling_qwen3) if is_qwen else (LlamaConfig, modeling_llama)
        made = kind(**{name: x for name, x in inner.items() if name != "architectures"})
        made._attn_implementation = "eager"
        name = "Qwen3" if is_qwen else "Llama"
        self._block = getattr(module, f"{name}DecoderLayer")(made, 0).double().eval()
        self._rotary = getattr(module, f"{name}RotaryEmbedding")(made)
        self._own = {
            name.removeprefix("model."): torch.from_numpy(x)
            for name, x in load_file(draft / "model.safetensors").items()
        }
        self._own = {
            name.replace("layers.0.", BLOCK): x.double() if x.is_floating_point() else x
            for name, x in self._own.items()
        }
        of_block = {x: self._own[x] for x in self._own if x.startswith(BLOCK)}
        self._hidden_norm = of_block.pop(f"{BLOCK}hidden_norm.weight")
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(self._block.self_attn, name)
            linear.weight = torch.nn.Parameter(torch.zeros(len(linear.weight), 2 * 48).double())
        self._block.load_state_dict({x.removeprefix(BLOCK): w for x, w in of_block.items()})
        self._block.requires_grad_(False)

    def _norm(self, x: Any, weight: Any) -> Any:
        return self._torch.nn.functional.rms_norm(x, x.shape[-1:], weight, BASE["rms_norm_eps"])

    def hidden(self, tokens: list[int]) -> Any:
        """[1, T, D]: what is made of the tokens before each, zeros before the first."""
        torch, own, model = self._torch, self._own, self.model.model
        # What comes out of the last layer is behind the norm in what transformers returns.
        last = []
        hook = model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
        with torch.no_grad():
            found = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        hook.remove()
        streams = [*found.hidden_states[:-1], last[0]]
        if self._config.get("eagle_config", {}).get("use_aux_hidden_state", True):
            joined = torch.cat([streams[i] for i in sorted(set(self._config[IDS]))], dim=-1)
            if self._config.get("norm_before_fc"):
                joined = self._norm(joined, own["input_norm.weight"])
            if self._config.get("fc_norm"):
                parts = enumerate(joined.split(48, dim=-1))
                parts = [self._norm(x, own[f"fc_norm.{i}.weight"]) for i, x in parts]
                joined = torch.cat(parts, dim=-1)
            made = joined @ own["fc.weight"].T
        else:
            made = found.last_hidden_state
        return torch.cat([torch.zeros_like(made[:, :1]), made[:, :-1]], dim=1)

    def _run(self, tokens: list[int], hidden: Any) -> Any:
        """[1, D]: what the block makes of the last token, before the norm."""
        torch, block = self._torch, self._block
        embed = self._own.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        embedded = block.input_layernorm(embed[torch.tensor([tokens])])
        embedded[:, 0] = 0
        normed = self._norm(hidden, self._hidden_norm)
        x = normed if self._config.get("norm_before_residual", self._is_speculators) else hidden
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).double().triu(1)[None, None]
        mixed, _ = block.self_attn(
            torch.cat([embedded, normed], dim=-1),
            position_embeddings=self._rotary(x, positions),
            attention_mask=mask,
        )
        x = x + mixed
        return (x + block.mlp(block.post_attention_layernorm(x)))[:, -1]

    def proposals(self, tokens: list[int], hidden: Any, allowed: list[int], count: int) -> list:
        """What is likeliest behind these tokens, and behind that and so on, each with its lead over
        the next likeliest.
        """
        torch, tokens, found = self._torch, list(tokens), []
        head = self._own.get("lm_head.weight", self.model.lm_head.weight)
        to = torch.arange(len(head)) + self._own.get("d2t", 0)
        for _ in range(count):
            x = self._run(tokens, hidden)
            last = self._norm(x, self._own["norm.weight"])
            logits = torch.full((151,), -torch.inf).double()
            logits[to] = (last @ head.T)[0]
            best, second = logits[allowed].topk(2).values.tolist()
            tokens.append(allowed[int(logits[allowed].argmax())])
            found.append((tokens[-1], best - second))
            x = last if self._config.get("norm_output") else x
            hidden = torch.cat([hidden, x[:, None]], dim=1)
        return found
