"""The tiny training run of the tests, as a config file for `--config`."""

from tests.support.training import tiny


def get_config():
  return tiny()
