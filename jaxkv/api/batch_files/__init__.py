"""Batch files: JSON lines in, one row per line out in order of finishing, and a restart that goes
on exactly there.

A line is of one of two forms, which its keys tell. The plain one (`forms`) is {"id": text or whole
number} with one of "prompt": text, "prompt_token_ids": [...] or "messages": [{"role": ...,
"content": ...}, ...], and where wanted "params": {fields of SamplingParams that override the
run's}. Its row is one of

    {"id", "text", "finish_reason", "num_prompt_tokens", "num_output_tokens"}
    {"id", "error"}                 a request that was refused
    {"id": null, "line", "error"}   a line (numbered from 1) without an id of its own

and has "token_ids" in place of "text" where the parameters or the model leave out detokenization.
The other form is OpenAI's (`openai`). A line that is no JSON object gets a row of the form of the
lines above it. Of several lines with one id the first one counts; each other one is a line without
an id of its own. Blank lines are skipped.

What the output is worth after a crash: each row is appended by one write, so however the process
ends (SIGKILL too) whole rows are left and at most one torn last line, which the next start cuts
off. Started again with the same arguments it does what has no row yet: nothing is lost, nothing is
there twice. Beside the output a manifest says which model and parameters its rows are of; with
others the start is refused. A power cut also takes what the system had not stored: rows are synced
at the end, and when one is written more than SYNC_S after the last time. Those lines are done again
where the file system lets a file grow only after its data (ext4 and XFS by default); elsewhere a
damaged row stops the next start with its line number.

A line without a seed draws with one made of the run's seed and its id. So its tokens do not depend
on what ran before, and a sampled run that was cut off ends like one that was not. An error row
counts as done; `retry_errors` does such lines again.
"""

from jaxkv.api.batch_files.journal import Rows, open_output
from jaxkv.api.batch_files.run import BatchCounts, run_batch
from jaxkv.api.batch_files.sources import open_lines
from jaxkv.api.batch_files.unanswered import Line, Unanswered

__all__ = ["BatchCounts", "Line", "Rows", "Unanswered", "open_lines", "open_output", "run_batch"]
