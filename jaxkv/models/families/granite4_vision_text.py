"""The text part of Granite 4 Vision: Granite. Source: the model's card,
ibm-granite/granite-4.0-3b-vision.
"""

from jaxkv.models.families.granite import read

__all__ = ["read"]
