"""Properties run on machines that are busy with other things: no deadline per example."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
