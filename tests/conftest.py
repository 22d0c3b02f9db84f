"""Property tests here have no deadline: what they check does not depend on how busy the machine is."""

try:
    from hypothesis import settings
except ImportError:  # the tests of `kernels` need torch, triton, numpy and pytest alone
    pass
else:
    settings.register_profile("no-deadline", deadline=None)
    settings.load_profile("no-deadline")
