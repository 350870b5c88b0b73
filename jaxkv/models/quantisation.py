"""Reads what config.json says of quantised weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from jaxkv.config import is_int
from jaxkv.models.config_reader import ConfigReader

METHODS = (
    *("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"),
    *("modelopt", "mxfp4"),
)
OF_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""How AutoRound packs, and the method that packs so."""

GROUP_OF_FP4 = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *GROUP_OF_FP4)
"""Of compressed-tensors."""

NVFP4 = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
OF_MODELOPT = (*NVFP4, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
"""Algorithms of modelopt. The first two differ in activations only; the last is by blocks."""

SKIPPED = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"),
    "llm_int8_skip_modules",
)
"""Where libraries name what they do not quantise."""

IN_CONFIG = ("quantization_config", "compression_config")
"""Where config.json says it; the second is what compressed-tensors called it at first."""

NUMBER = re.compile(r"\.(\d+|\{\w+\})(?=\.)")
"""The number of a layer or an expert in a tensor's name, or what stands for it in a family's."""

WILD = re.compile(r"^re:|[*?[]")
"""What names of modules have that stand for more than one."""

BLOCK = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """Says how a checkpoint stores its quantised weights.

    kind: "scaled" (8 bits each); "packed" (compressed-tensors), "gptq" or "awq", which pack several
    values of `bits` into each int32; or pairs of floats of 4 bits: "mxfp4" (experts of gpt-oss),
    "fp4" (compressed-tensors), "pairs" (experts of DeepSeek V4), "modelopt" and "bitsandbytes".
    experts: how weights of routed experts are stored, None for as all others. block: how many
    [rows, columns] share a scale, 0 where that is not said, because all do. takes_one: GPTQ's
    stored zero points are one less than they mean. has_zeros: weights of compressed-tensors have
    zero points. is_ordered: which columns GPTQ put in a group
    only a tensor beside them says. skipped: names of modules that are not quantised, maybe with
    wildcards. mixed: how each module is stored where they differ, by names from "layers" on with 0
    for each number; None where that differs from layer to layer.
    """

    method: str
    kind: str
    bits: int = 8
    block: tuple[int, int] = BLOCK
    takes_one: bool = False
    has_zeros: bool = False
    is_ordered: bool = False
    skipped: tuple[str, ...] = ()
    experts: Quantisation | None = None
    mixed: tuple[tuple[str, Quantisation | None], ...] = ()

    def of(self, name: str) -> Quantisation:
        """Returns how the weight of this name is stored, which may have `{layer}` and its like in
        it.
        """
        if self.mixed:
            among = f".{NUMBER.sub('.0', name)}."
            found = next((how for one, how in self.mixed if f".{one}." in among), None)
            return replace(self, skipped=("*",), mixed=()) if found is None else found
        return self.experts if self.experts is not None and ".experts." in name else self

    def skips(self, module: str) -> bool:
        """Tells whether a module is one of those that the config says are not quantised, or in one.
        A checkpoint's tensors say so themselves; this is for planning without them.
        """
        # What has no wildcards fits only where it stands in the name, and may be one of thousands,
        # for which patterns take their time.
        return any(
            f".{name}." in f".{module}."
            or (WILD.search(name) is not None and fnmatchcase(f"{module}.", _wildcards(name)))
            for name in self.skipped
        )


def _wildcards(name: str) -> str:
    """Returns what a module's name and a dot fit if it is that of `skipped`, or in it. Wildcards
    stand for compressed-tensors' regular expressions, of which any could take for ever: these hold
    for all names that begin so, unless they end in "$".
    """
    if not name.startswith("re:"):
        return f"{name}.*"
    end = "." if name.endswith("$") else "*"
    name = name[3:].removeprefix("^").removesuffix("$")
    return name.replace(".*", "*").replace("\\.", ".") + end


def read_quantisation(config: ConfigReader) -> Quantisation | None:
    """Reads what is under a key of `IN_CONFIG`; None without any.

    Raises: CheckpointError for what is not built, by its name.
    """
    key = next((one for one in IN_CONFIG if config.get(one) is not None), None)
    if key is None:
        return None
    given = config.section(key)
    skipped: Any = next((given.values[key] for key in SKIPPED if given.values.get(key)), [])
    if not isinstance(skipped, list):
        raise given.fail("/".join(SKIPPED), "a list of names of modules")
    names = tuple(name for name in skipped if isinstance(name, str))
    found = _read(given)
    # In files of DeepSeek's beside the section, in those of transformers in it.
    key = "expert_dtype"
    where = given if given.get(key) is not None else config
    if found.method == "fp8" and where.choice(key, "fp8", ("fp8", "fp4")) == "fp4":
        method = "fp8 (experts: fp4)"
        experts = Quantisation(method=method, kind="pairs", bits=4, block=(0, 32))
        found = replace(found, method=method, experts=experts)
    return replace(found, skipped=names)


def read_beside(given: ConfigReader) -> dict[str, Any] | None:
    """Returns what hf_quant_config.json says in the words of config.json, which has it since
    modelopt 0.31; None where weights are not quantised (only a cache).
    """
    given.section("producer").choice("name", None, ("modelopt",))
    about = given.section("quantization")
    if about.get("quant_algo") is None:
        return None
    return {"quant_method": "modelopt", **about.values}


def _read(given: ConfigReader) -> Quantisation:
    method = given.choice("quant_method", None, METHODS)
    if method in ("fp8", "fbgemm_fp8"):
        block = _block(given, "weight_block_size")
        return Quantisation(method=method, kind="scaled", block=block)
    if method == "mxfp4":
        return Quantisation(method=method, kind="mxfp4", bits=4, block=(0, 32))
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "modelopt":
        algorithm = given.choice("quant_algo", None, (*OF_MODELOPT, MIXED))
        if algorithm != MIXED:
            return of_modelopt(algorithm, algorithm)
        if not (mixed := _mixed(given.section("quantized_layers"))):
            raise given.fail("quantized_layers", "modules, each with a quant_algo")
        return replace(of_modelopt("FP8", MIXED), mixed=mixed)
    if method == "bitsandbytes":
        if not given.flag("load_in_4bit", False):
            raise given.fail("load_in_4bit", "true (8 bits: not built)")
        method = f"bitsandbytes, {given.choice('bnb_4bit_quant_type', 'fp4', ('fp4', 'nf4'))}"
        return Quantisation(method=method, kind="bitsandbytes", bits=4, block=(0, 64))
    kind = method
    if method == "auto-round":
        given.choice("data_type", "int", ("int",))
        packing = given.choice("packing_format", "auto_round:auto_gptq", OF_AUTO_ROUND)
        kind, method = OF_AUTO_ROUND[packing], f"auto-round, {OF_AUTO_ROUND[packing]}"
    group = given.get("group_size", -1)
    columns = 0 if group == -1 else given.size("group_size")
    bits = given.size("bits")
    if bits not in ((4, 8) if kind == "gptq" else (4,)):
        raise given.fail("bits", "4 or 8" if kind == "gptq" else "4")
    if kind == "awq":
        given.choice("version", "gemm", ("gemm", "GEMM"))
        return Quantisation(method=method, kind="awq", bits=bits, block=(0, columns))
    takes_one = given.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2")) == "gptq"
    return Quantisation(
        method=method,
        kind="gptq",
        bits=bits,
        block=(0, columns),
        takes_one=takes_one,
        is_ordered=given.flag("desc_act", False),
    )


def of_modelopt(algorithm: str, called: str) -> Quantisation:
    """Returns how one of `OF_MODELOPT` stores weights, in a checkpoint of the algorithm `called`
    so.
    """
    method = f"modelopt, {called}"
    if algorithm in NVFP4:
        return Quantisation(method=method, kind="modelopt", bits=4, block=(0, 16))
    block = (128, 128) if algorithm == "FP8_PB_WO" else BLOCK
    return Quantisation(method=method, kind="scaled", block=block)


def _mixed(given: ConfigReader) -> tuple[tuple[str, Quantisation | None], ...]:
    """Reads how modelopt has stored each module."""
    found: dict[str, set[Quantisation]] = {}
    for name in given.values:
        how = of_modelopt(given.section(name).choice("quant_algo", None, OF_MODELOPT), MIXED)
        # Layers that predict later tokens have numbers of their own.
        if not name.startswith("mtp."):
            own = NUMBER.sub(".0", name[max(name.find("layers."), 0) :])
            found.setdefault(own, set()).add(how)
    return tuple((name, x.pop() if len(x) == 1 else None) for name, x in found.items())


def _compressed(given: ConfigReader) -> Quantisation:
    """Reads what compressed-tensors says: all groups of layers must be stored alike."""
    form = given.choice("format", None, FORMATS)
    # Of what is sparse, other formats leave the zeros out.
    given.section("sparsity_config").choice("format", "dense", ("dense",))
    groups, found = given.section("config_groups"), set()
    for name in groups.values:
        weights = groups.section(name).section("weights")
        if weights.get("actorder") not in (None, "weight", "static"):
            raise weights.fail("actorder", "none, static or weight (by group: not built)")
        block = _block(weights, "block_structure")
        if weights.get("group_size") not in (None, -1):  # -1: a scale for each row
            block = (0, weights.size("group_size"))
        bits, group = weights.size("num_bits"), GROUP_OF_FP4.get(form)
        known = (4,) if group else (4, 8) if form == "pack-quantized" else (8,)
        if bits not in known:
            raise weights.fail("num_bits", f"{' or '.join(map(str, known))} in {form}")
        if group and block != (0, group):
            raise weights.fail("group_size", f"{group} in {form}")
        has_zeros = form == "pack-quantized" and not weights.flag("symmetric", True)
        found.add((bits, block, has_zeros))
    if len(found) != 1:
        raise given.fail("config_groups", "one or more groups that are stored alike")
    if given.get("transform_config") is not None:
        _check_transforms(given.section("transform_config"))
    ((bits, block, has_zeros),) = found
    kind = "packed" if form == "pack-quantized" else "fp4" if form in GROUP_OF_FP4 else "scaled"
    method = f"compressed-tensors, {form}"
    return Quantisation(method=method, kind=kind, bits=bits, block=block, has_zeros=has_zeros)


def _check_transforms(given: ConfigReader) -> None:
    """Raises CheckpointError for a transform of activations, which a model would have to compute:
    those of weights are in what is stored.
    """
    groups = given.section("config_groups")
    for name in groups.values:
        applied = groups.section(name).get("apply", [])
        listed = applied if isinstance(applied, list) else [applied]
        for one in listed:
            where = one.get("location") if isinstance(one, dict) else None
            if where not in ("weight_input", "weight_output"):
                expected = "transforms at weight_input and weight_output only"
                raise given.fail("config_groups", expected)


def _block(given: ConfigReader, key: str) -> tuple[int, int]:
    size = given.get(key)
    if size is None:
        return BLOCK
    if not isinstance(size, list) or len(size) != 2 or not all(is_int(n) and n > 0 for n in size):
        raise given.fail(key, "two whole numbers from 1 on")
    return size[0], size[1]
