import jaxtyping
import pytest


@pytest.fixture
def no_type_checks():
  """Disable the jaxtyping shape checks, which run only under pytest, as for a user's call."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
