"""Property tests have no deadline: how long an example takes says nothing on a shared machine."""

from hypothesis import settings

settings.register_profile("swapper", deadline=None)
settings.load_profile("swapper")
