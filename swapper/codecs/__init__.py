"""Codes optimizer state in fewer bytes: pure arithmetic on tensors, which knows no pages. See docs/reference/codecs.md."""

from swapper.codecs.codec import CODECS, StateCodec
from swapper.codecs.coded_adamw import CodedState, adamw_
from swapper.codecs.reference import GROUP

__all__ = ["CODECS", "GROUP", "CodedState", "StateCodec", "adamw_"]
