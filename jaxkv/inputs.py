"""Has the names of `vllm.inputs` that exist here."""

from jaxkv.build.vllm_arguments import ABSENT_INPUTS, refuse_names
from jaxkv.requests.prompts import Prompt as PromptType
from jaxkv.requests.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

__getattr__ = refuse_names(__name__, ABSENT_INPUTS)
