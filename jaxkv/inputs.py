"""Has the names of `vllm.inputs` that exist here."""

from jaxkv.requests.prompts import Prompt as PromptType
from jaxkv.requests.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
