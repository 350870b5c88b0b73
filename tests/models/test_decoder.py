"""Layers of unlike KV groups run through one body, which costs little more to compile than that of
layers all alike.
"""

import re
from functools import cache

import pytest

from jaxkv import LLM
from jaxkv.testing import blueprint_of, engine_of
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)
LAYER_LOOPS = re.compile(r" while\(.*layers/while\"")
FULL = ["full_attention"]
MIXED = ["sliding_attention", "sliding_attention", *FULL]
TYPES = {"one group": FULL * 6, "two groups": MIXED * 2, "two groups, twice the layers": MIXED * 4}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The text of the largest step and of the largest decode loop of each model."""

    @cache
    def texts(name: str) -> list[str]:
        types = TYPES[name]
        config = tiny_config("qwen3-layer-types", num_hidden_layers=len(types), layer_types=types)
        directory = make_checkpoint(tmp_path_factory.mktemp("decoder"), config)
        llm = LLM(directory, **SMALL)
        engine = engine_of(llm)
        assert len({group.window for group in blueprint_of(llm).spec.groups}) == len(set(types))
        return [
            engine.programs.step(SMALL["max_num_batched_tokens"]).as_text(),
            engine.programs.loop(SMALL["max_num_seqs"]).as_text(),
        ]

    return texts


def num_instructions(text: str) -> int:
    return len(INSTRUCTION.findall(text))


def test_layers_of_two_kv_groups_are_one_loop(programs):
    for text in programs("two groups"):
        assert len(LAYER_LOOPS.findall(text)) == 1


@pytest.mark.slow
def test_programs_do_not_grow_with_the_layers(programs):
    more, fewer = programs("two groups, twice the layers"), programs("two groups")
    assert list(map(num_instructions, more)) == list(map(num_instructions, fewer))


@pytest.mark.slow
def test_a_second_kv_group_adds_next_to_nothing(programs):
    """Groups whose pages are alike differ in data: a layer picks its page table and its window."""
    step, loop = (
        num_instructions(two) / num_instructions(one)
        for one, two in zip(programs("one group"), programs("two groups"), strict=True)
    )
    assert step < 1.2
    assert loop < 1.2
