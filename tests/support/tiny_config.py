"""The tests' tiny run as a configuration file for the command line."""

from tests.support.training import tiny


def get_config():
  return tiny()
