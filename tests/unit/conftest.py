"""Property tests have no deadline: how long an example takes says nothing on a shared machine."""

from hypothesis import settings
from sampling import examples

settings.register_profile("swapper", deadline=None, max_examples=examples(100))
settings.load_profile("swapper")
