"""Says which adapter a request is computed with, where vLLM has it: `jaxkv.lora.request`."""
