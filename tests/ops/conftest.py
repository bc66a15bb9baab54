import jaxtyping
import pytest


@pytest.fixture
def no_type_checks():
  """As a user calls it: without the shape checks that run under pytest alone."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
