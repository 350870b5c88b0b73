"""Describes the experts of a family: their names, sizes and tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from jaxkv.models.config_reader import ConfigReader
from jaxkv.models.families.base import Leaf, Part, leaf
from jaxkv.ops.experts import Router

MAX_EXPERTS = 4096
ROUTED = "expert_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Says what a family's experts are called behind the layer's prefix, and how large they are.

    width: rows of an expert's gate. one: the prefix of one expert. router_transposed: it is stored
    [hidden, count]. bias: what is added to scores to choose by, the first numbers of a tensor of
    `bias_shape` if that is not a vector of its own. shared: the prefix of an MLP of
    `shared_width` for all tokens, which `shared_gate` weighs. fused: the names of two tensors that
    have the weights of all experts, gates in front of what they weigh in the first, [E, out, in],
    `transposed`, or `either_way`. shared_fused: those of the shared MLP behind `shared`. latent:
    experts take and give vectors of so many numbers, 0 for the stream's own, which two linear
    layers of these names, for all of them, make of the stream's and turn into them.
    """

    count: int
    width: int
    router: str = "mlp.gate"
    router_transposed: bool = False
    one: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    shared: str | None = None
    shared_width: int = 0
    shared_gate: str | None = None
    shared_fused: tuple[str, str] | None = None
    fused: tuple[str, str] | None = None
    transposed: bool = False
    either_way: bool = False
    latent: int = 0
    latent_names: tuple[str, str] = ("", "")

    def leaves(self, prefix: str, hidden: int) -> dict[str, Leaf]:
        """Describes the arrays of a layer's experts, those of all experts in one stack."""
        part = Part(shape=(hidden, self.count), transposed=True) if self.router_transposed else None
        source, axes = f"{prefix}{self.router}.weight", ("experts", "model")
        found = {"router": leaf(source, (self.count, hidden), axes, part=part)}
        if self.bias is not None:
            part = None
            if self.bias_shape:
                part = Part(shape=self.bias_shape, of_all=True, stop=self.count)
            bias = leaf(prefix + self.bias, (self.count,), ("experts",), part=part)
            found["router_bias"] = bias
        routed = self._routed(prefix, self.latent or hidden)
        found |= {f"{ROUTED}{name}": one for name, one in routed.items()}
        if self.latent:
            into, out_of = (f"{prefix}{name}.weight" for name in self.latent_names)
            found["latent_in"] = leaf(into, (self.latent, hidden), (None, "model"))
            found["latent_out"] = leaf(out_of, (hidden, self.latent), ("model", None))
        if self.shared is not None and self.shared_width:
            own = _mlp(prefix + self.shared, self.shared_width, hidden)
            if self.shared_fused is not None:
                own = _fused(own, prefix + self.shared, self.shared_fused)
            found |= {f"shared_{name}": one for name, one in own.items()}
            if self.shared_gate is not None:
                source = f"{prefix}{self.shared_gate}.weight"
                found["shared_weight"] = leaf(source, (1, hidden), ("experts", "model"))
        return found

    def _routed(self, prefix: str, hidden: int) -> dict[str, Leaf]:
        names = (self.gate, self.up, self.down)
        own = _mlp(prefix + self.one, self.width, hidden, names)
        if self.fused is not None:
            place = {"transposed": self.transposed, "either_way": self.either_way}
            own = _fused(own, prefix, self.fused, self.count, **place)
        return {name: replace(one, num_experts=self.count) for name, one in own.items()}


def in_other_form(leaves: Mapping[str, Leaf]) -> dict[str, Leaf] | None:
    """Describes the arrays of a layer whose experts are stored the other way: in two tensors for
    all, [E, out, in] or with its last axes swapped, where they have tensors of their own, and the
    other way round. None where names do not say what that would be.

    Publishers have both: transformers 5 writes one and loads both, and quantised exports have each
    expert's apart.
    """
    routed = {name: one for name, one in leaves.items() if name.startswith(ROUTED)}
    own = {name.removeprefix(ROUTED): one for name, one in routed.items()}
    if own.keys() != {"gate", "up", "down"}:
        return None
    stem, name = own["up"].source, "{expert}.up_proj.weight"
    if stem.endswith(name):
        stem = stem.removesuffix(name)
        names = (f"{stem}gate_up_proj", f"{stem}down_proj")
        found = _fused(own, "", names, own["up"].num_experts, either_way=True)
    elif stem.endswith(".gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        found = {
            name: replace(one, source=f"{stem}{{expert}}.{name}_proj.weight", part=None)
            for name, one in own.items()
        }
    else:
        return None
    return {**leaves, **{f"{ROUTED}{name}": one for name, one in found.items()}}


def _fused(
    own: Mapping[str, Leaf],
    prefix: str,
    names: tuple[str, str],
    count: int | None = None,
    *,
    transposed: bool = False,
    either_way: bool = False,
) -> dict[str, Leaf]:
    """Describes an MLP's weights as parts of two tensors, which may be those of `count` MLPs."""
    width, hidden = own["gate"].info.shape
    of_all = () if count is None else (count,)
    place = {"transposed": transposed, "either_way": either_way, "of_all": count is not None}
    both, down = (
        (*of_all, *(shape[::-1] if transposed else shape))
        for shape in ((2 * width, hidden), (hidden, width))
    )
    gate, up = (
        Part(shape=both, num_blocks=count or 1, start=start, stop=start + width, **place)
        for start in (0, width)
    )
    parts = {"gate": gate, "up": up, "down": Part(shape=down, **place)}
    sources = {"gate": names[0], "up": names[0], "down": names[1]}
    return {
        name: replace(one, source=prefix + sources[name], part=parts[name])
        for name, one in own.items()
    }


def _mlp(
    prefix: str,
    width: int,
    hidden: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Leaf]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {
        "gate": leaf(gate, (width, hidden), ("ffn", "model")),
        "up": leaf(up, (width, hidden), ("ffn", "model")),
        "down": leaf(down, (hidden, width), ("model", "ffn")),
    }


def read_router(config: ConfigReader, count: int, *, used: str, **router: object) -> Router:
    """Reads how many of `count` experts a token uses. router: what else is known of the router."""
    num_used = config.size(used)
    if num_used > count:
        raise config.fail(used, f"at most the {count} experts that there are")
    made: Router = replace(Router(num_used=num_used), **router)  # type: ignore[arg-type]
    allowed = count // made.num_groups * made.num_groups_used
    if num_used > allowed:
        expected = f"at most the {allowed} experts of the groups that a token chooses from"
        raise config.fail(used, expected)
    return made


def read_mixtral(config: ConfigReader, *, bias: str | None = None) -> Experts:
    """Reads experts that are called as Mixtral's are."""
    return Experts(
        count=config.size("num_local_experts", at_most=MAX_EXPERTS),
        width=config.size("intermediate_size"),
        router="block_sparse_moe.gate",
        one="block_sparse_moe.experts.{expert}.",
        gate="w1",
        up="w3",
        down="w2",
        bias=bias,
    )


def qwen_dense(config: ConfigReader) -> list[int]:
    """Lists the layers without experts, as Qwen's configs say it: `mlp_only_layers`, and all but
    every `decoder_sparse_step`th.
    """
    step = config.size("decoder_sparse_step", 1)
    listed = config.whole_numbers("mlp_only_layers", [])
    return [i for i in range(config.num_layers) if i in listed or (i + 1) % step]


def first_dense(config: ConfigReader, key: str = "first_k_dense_replace") -> range:
    """Reads how many layers from the first on have no experts."""
    return range(config.size(key, 0, at_least=0, at_most=config.num_layers))


def listed_dense(config: ConfigReader, otherwise: Collection[int] = ()) -> Collection[int]:
    """Lists the layers without experts, those that are "dense" in `mlp_layer_types`."""
    if config.get("mlp_layer_types") is None:
        return otherwise
    kinds = config.kinds("mlp_layer_types", config.num_layers, ("dense", "sparse"))
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def read_grouped(config: ConfigReader) -> tuple[Experts, Router]:
    """Reads experts as DeepSeek V3's configs say them: chosen by sigmoid scores and a bias, within
    groups, beside shared ones. Source: arXiv 2412.19437, section 2.1.2.
    """
    count = config.size("n_routed_experts", at_most=MAX_EXPERTS)
    width = config.size("moe_intermediate_size")
    num_shared = config.size("n_shared_experts", 0, at_least=0)
    groups = config.size("n_group", 1)
    if count % groups or count // groups < 2:
        raise config.fail("n_group", f"groups of two or more of the {count} experts")
    used = config.size("topk_group", 1, at_most=groups)
    experts = Experts(
        count=count,
        width=width,
        bias="mlp.gate.e_score_correction_bias",
        shared="mlp.shared_experts.",
        shared_width=num_shared * width,
    )
    router = read_router(
        config,
        count,
        used="num_experts_per_tok",
        score="sigmoid",
        is_normalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        num_groups_used=used,
    )
    return experts, router
