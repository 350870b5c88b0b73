"""Draws the pictures of docs/pictures.md, of the demo model at work.

    python scripts/draw_pictures.py docs/pictures

A pool of 36 pages is too small for what is asked for, so some requests are preempted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxkv import LLM, SamplingParams
from jaxkv.pictures import Picture, chrome_trace, latencies, page_map, timeline

HEAD = '"""Reads and writes files."""\n\nimport os\nimport sys\n\n\n'
BEGINNINGS = (
    *("def read(path):\n", "def write(path, text):\n", "class Reader:\n", "class Writer:\n"),
    *("def copy(source, target):\n", "def main(argv):\n", "def walk(top):\n", "import json\n"),
)
SIBLINGS = ('    """Return the text of a file."""\n', "    with open(path) as file:\n")


def draw(llm: LLM) -> dict[str, Picture | str]:
    """Runs requests, and returns files by name."""
    prompts = [HEAD * (1 + i % 3) + text for i, text in enumerate(BEGINNINGS * 2)]
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=60 + 12 * (i % 5), ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)  # what is compiled then is not drawn
    llm.reset_prefix_cache()
    with llm.record_pages() as pages:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    fullest = max(pages.frames, key=lambda frame: len(frame.references()))
    llm.reset_prefix_cache()
    first = llm.session(HEAD + BEGINNINGS[0])
    second = [first.extend(text) for text in SIBLINGS]
    third = [one.generate(each)[0] for one in second for each in params[:2]]
    stream = llm.stream(second[0].prompt, params[0])
    next(stream)
    tree = llm.prefix_tree()
    stream.close()
    return {
        "pages.svg": page_map(fullest),
        "pages.html": pages.picture(),
        "timeline.svg": timeline(outputs),
        "trace.json": chrome_trace(outputs),
        "latency.svg": latencies(outputs),
        "prefix_tree.svg": tree,
        "engine.html": Picture(llm._repr_html_()),
        "outputs.html": Picture(outputs._repr_html_()),
        "metrics.html": Picture(llm.get_metrics()._repr_html_()),
        "session.html": Picture(third[0]._repr_html_() or ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the SVG files go")
    parser.add_argument("--all", action="store_true", help="HTML and the trace too")
    options = parser.parse_args()
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 512}
    with LLM(block_size=16, num_gpu_blocks_override=36, **limits) as llm:
        llm.wait_until_compiled()
        files = draw(llm)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if options.all or name.endswith(".svg"):
            (options.folder / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
