"""Codes optimizer state in fewer bytes: pure arithmetic on tensors, which knows no pages. See docs/reference/codecs.md."""

from swapper.codecs.codec import CODECS, GROUP, StateCodec
from swapper.codecs.coded_adamw import CodedState, adamw_

__all__ = ["CODECS", "GROUP", "CodedState", "StateCodec", "adamw_"]
