"""Writes down what transformers takes for keys that a config.json leaves out, for every family.

    python scripts/family_defaults.py

Needs transformers, and no weights. Of rotary embeddings only theta and the rotated part are
written, and all parameters where a family's own default is a scaled embedding.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxkv.models.families import DEFAULTS, FAMILIES, RENAMED

LEFT_OUT = re.compile(
    r"_.*|.*(_dropout|_pdrop|_token_id|_dropout_prob)|summary_.*|output_(?!multiplier).*|is_.*|return_dict|"
    r"architectures|chunk_size_feed_forward|dtype|initializer_range|layer_types|model_type|"
    r"no_rope_layers|pretraining_tp|problem_type|rope_parameters|transformers_version|use_cache"
)
"""Matches keys that mean nothing here, or are made of other keys."""

WHOLE = ("voxtral",)
"""Models of several parts that have defaults of their own for their text part."""


def defaults(model_type: str) -> dict[str, Any]:
    """Returns the keys of a default config that are numbers, flags, texts or null, its
    `rope_parameters` if they scale, and other names of keys.
    """
    kind = CONFIG_MAPPING[model_type]
    values = kind().to_dict()
    rope = values.get("rope_parameters") or {}
    # What a config makes of other keys is null in its class.
    own = {key: getattr(kind, key) for key in values if hasattr(kind, key)}
    made = values.keys() - own.keys() - set(kind.attribute_map.values())
    values |= {key: value for key, value in own.items() if not isinstance(value, property)}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            values[key] = rope[key]
    known = {
        key: value
        for key, value in sorted(values.items())
        if not isinstance(value, (dict, list)) and not LEFT_OUT.fullmatch(key) and key not in made
    }
    # What is made of other sizes, where a file has none.
    if "local_attention" in known:
        known.pop("sliding_window", None)
    if kind.attribute_map:
        known["aliases"] = kind.attribute_map
    if rope.get("rope_type", "default") == "default":
        return known
    known["rope_theta"] = kind.default_theta  # in a section of a file that has none
    if kind(rope_theta=7.0).rope_parameters["rope_theta"] == 7.0:  # a file's own theta counts
        del rope["rope_theta"]
    return known | {"rope_parameters": rope}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    others = {own: name for name, own in RENAMED.items()}
    names = {own: own if own in CONFIG_MAPPING else others.get(own) for own in FAMILIES}
    known = {own: defaults(name) for own, name in names.items() if name in CONFIG_MAPPING}
    of_parts = {
        name: CONFIG_MAPPING[name].sub_configs_defaults["text_config"].init_kwargs for name in WHOLE
    }
    DEFAULTS.write_text(json.dumps(known | of_parts, indent=1) + "\n")
    print(f"{DEFAULTS}: {len(known)} of {len(FAMILIES)} families")


if __name__ == "__main__":
    main()
