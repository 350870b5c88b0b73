"""Is the program of `trial`: makes what llguidance needs of each grammar that comes, a line of JSON
with its text, and says so. A limit on its own time holds though whoever started it is gone.
"""

from __future__ import annotations

import json
import resource
import sys


def main() -> None:
    import llguidance

    cpu_s, memory_bytes = map(int, sys.argv[1:])
    if sys.platform == "linux":  # others do not keep to it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What takes long does so for any vocabulary.
    tokenizer = llguidance.LLTokenizer("byte")
    print("ready", flush=True)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + cpu_s + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        # What is wrong with a grammar is said where it is compiled.
        llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0).compute_bitmask()
        print("made", flush=True)


if __name__ == "__main__":
    main()
