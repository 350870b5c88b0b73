"""IQuest-Coder: Llama. Source: the model's card, IQuestLab/IQuest-Coder-V1-40B-Instruct."""

from jaxkv.models.families.llama import read

__all__ = ["read"]
