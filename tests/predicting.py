"""Tiny checkpoints with a layer that predicts the token after the next one, transformers' layers put
together to that layer, and the comparison of all that is proposed with it.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv.engine.speculation
import jaxkv.programs.speculation
from families import text_config
from jaxkv import LLM, SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.models.families import read_config, read_family
from jaxkv.models.families.predictor import DEEPSEEK, PREDICTING, read_predictor
from jaxkv.testing import engine_of
from poison import poisoned
from tiny import draw, draw_leaf, make_checkpoint, stored

ALLOWED = [5, 7, 9, 11]
"""With so few tokens some of what is proposed holds, though nobody has trained the layer."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=ALLOWED)
NUM_AHEAD = 3
LEAST_LEAD = 1e-3
"""Of a token over the next likeliest, below which float32 may choose the other one."""


def make_predicting(
    directory: Path, variant: str, *, own_head: bool = False, **changes: Any
) -> Path:
    """Writes a checkpoint whose layer behind the last predicts, with the copies of embeddings and
    head that published files have. own_head: the copy of the head is another head.
    """
    make_checkpoint(directory, text_config(variant) | {"num_nextn_predict_layers": 1} | changes)
    spec, layout = read_family(read_config(directory))
    rng, tensors = np.random.default_rng(7), load_file(directory / "model.safetensors")
    own = read_predictor(spec, layout)
    for name, leaf in stored(*own).items():
        tensors[name] = draw_leaf(rng, name, leaf)
    tensors[own[1].top["own_tokens"].source] = tensors["model.embed_tokens.weight"]
    if "own_head" in own[1].top:
        head = tensors["lm_head.weight"]
        head = draw(rng, "head", head.shape) if own_head else head
        tensors[own[1].top["own_head"].source] = head
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def with_deepseeks_names(directory: Path) -> Path:
    """Writes the checkpoint with the layer as one more of the model's, its other tensors by the
    names that DeepSeek's have.
    """
    spec, _ = read_family(read_config(directory))
    names, tensors = PREDICTING[spec.family], load_file(directory / "model.safetensors")
    if names is DEEPSEEK:
        return directory
    to = f"model.layers.{spec.num_layers}."
    renamed = {names.block: to} | {
        f"{names.prefix}{getattr(names, field)}.": f"{to}{getattr(DEEPSEEK, field)}."
        for field in ("token_norm", "hidden_norm", "join", "norm", "embed")
    }
    for old, new in renamed.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    tensors[f"{to}shared_head.head.weight"] = tensors["lm_head.weight"]
    made = directory.with_name(f"{directory.name}-renamed")
    made.mkdir()
    shutil.copy(directory / "config.json", made)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


class Reference:
    """The model and its layer that predicts in transformers, in float64, each over a whole sequence
    at once.
    """

    def __init__(self, torch: Any, directory: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        directory = with_deepseeks_names(directory)

        def load(config: Any) -> Any:
            made = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",
            )
            return made.eval()

        config = AutoConfig.from_pretrained(directory)
        self._torch, last = torch, config.num_hidden_layers
        self.model = load(config)
        config = AutoConfig.from_pretrained(directory)
        config.num_hidden_layers = last + 1
        for kinds in ("mlp_layer_types", "indexer_types", "layer_types"):
            if getattr(config, kinds, None):
                last_kind = "full" if kinds == "indexer_types" else getattr(config, kinds)[-1]
                setattr(config, kinds, [*getattr(config, kinds), last_kind])
        # Its block is in the place of one more layer.
        self._layer = load(config).model
        self._layer.layers = self._layer.layers[last:]
        self._own = {
            name.removeprefix(f"model.layers.{last}."): torch.from_numpy(x).double()
            for name, x in load_file(directory / "model.safetensors").items()
            if name.startswith(f"model.layers.{last}.")
        }
        self._layer.norm.weight.copy_(self._own["shared_head.norm.weight"])

    def _norm(self, x: Any, name: str) -> Any:
        # Norms of Qwen3-Next store what is added to 1.
        weight = self._own[name] + (self.model.config.model_type == "qwen3_next")
        eps = self.model.config.rms_norm_eps
        return self._torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def hidden(self, tokens: list[int]) -> Any:
        """[1, T, D]: of the tokens before each, zeros before the first."""
        found = self.model.model(self._torch.tensor([tokens]), use_cache=False).last_hidden_state
        return self._torch.cat([self._torch.zeros_like(found[:, :1]), found[:, :-1]], dim=1)

    def proposals(self, tokens: list[int], hidden: Any, allowed: list[int], count: int) -> list:
        """What is likeliest behind these tokens, and behind that and so on, each with its lead over
        the next likeliest.
        """
        tokens, found = list(tokens), []
        for _ in range(count):
            embedded = self.model.model.embed_tokens(self._torch.tensor([tokens]))
            joined = self._torch.cat(
                [self._norm(embedded, "enorm.weight"), self._norm(hidden, "hnorm.weight")], dim=-1
            )
            x = joined @ self._own["eh_proj.weight"].T
            x[:, 0] = 0
            last = self._layer(inputs_embeds=x, use_cache=False).last_hidden_state[:, -1:]
            logits = (last @ self._own["shared_head.head.weight"].T)[0, 0, allowed]
            best, second = logits.topk(2).values.tolist()
            tokens.append(allowed[int(logits.argmax())])
            found.append((tokens[-1], best - second))
            hidden = self._torch.cat([hidden, last], dim=1)
        return found


@dataclass
class Proposed:
    """Every row's newest token, its position, and what was proposed behind it, in order."""

    found: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def note(self, position_B, budget_B, token_BA, count_B, ahead_Bk) -> None:
        for row in np.flatnonzero((budget_B > 1) & (count_B > 0)):
            newest = int(token_BA[row, count_B[row] - 1])
            ahead = ahead_Bk[row, : budget_B[row] - 1].tolist()
            self.found.append((int(position_B[row]), newest, ahead))


PROPOSED = Proposed()


@pytest.fixture(autouse=True, scope="module")
def noted() -> Iterator[None]:
    """Notes what is proposed, and proposes wherever it may, whatever that costs."""
    predict_ahead = jaxkv.programs.speculation.predict_ahead

    def note(weights, kv, fresh, position_B, budget_B, *inputs, **options):
        kv, ahead_Bk = predict_ahead(weights, kv, fresh, position_B, budget_B, *inputs, **options)
        newest = (fresh.token_BA, fresh.count_B)
        jax.debug.callback(PROPOSED.note, position_B, budget_B, *newest, ahead_Bk)
        return kv, ahead_Bk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxkv.programs.speculation, "predict_ahead", note)
        patch.setattr(jaxkv.engine.speculation, "LEAST_GAIN", 0.0)
        yield


@contextmanager
def proposing_every_other_time(engine: Engine) -> Iterator[None]:
    """Has every second loop that would propose tokens propose none."""
    turns, wants = itertools.count(), engine._speculator.wants
    with pytest.MonkeyPatch.context() as patch:
        every_other = lambda requests: next(turns) % 2 == 0 and wants(requests)  # noqa: E731
        patch.setattr(engine._speculator, "wants", every_other)
        yield


def sequences(llm: LLM, prompts: list[dict], params: SamplingParams) -> list[list[int]]:
    with poisoned(engine_of(llm)):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    given = [output.prompt_token_ids for output in outputs]
    return [
        [*prompt, *one.token_ids]
        for prompt, output in zip(given, outputs, strict=True)
        for one in output.outputs
    ]


def check_proposals(reference: Any, llm: LLM, prompts: list[dict], **more) -> list[list[int]]:
    """Generates, and compares all that is proposed meanwhile."""
    jax.effects_barrier()
    PROPOSED.found.clear()
    whole = sequences(llm, prompts, replace(GREEDY, **more))
    jax.effects_barrier()
    hidden = [reference.hidden(tokens) for tokens in whole]
    compared, known = 0, {}
    for position, newest, ahead in PROPOSED.found:
        rows = [i for i, tokens in enumerate(whole) if tokens[position : position + 1] == [newest]]
        fits = []
        for i in rows:
            if (key := (tuple(whole[i][: position + 1]), len(ahead))) not in known:
                known[key] = reference.proposals(
                    whole[i][: position + 1],
                    hidden[i][:, : position + 1],
                    ALLOWED,
                    len(ahead[:NUM_AHEAD]),
                )
            sure = 0
            while sure < len(known[key]) and known[key][sure][1] > LEAST_LEAD:
                sure += 1
            compared += sure
            fits.append(ahead[:sure] == [token for token, _ in known[key][:sure]])
        assert any(fits), (position, newest, ahead)
    assert compared > 30
    return whole
