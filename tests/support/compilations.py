"""Record what JAX compiles."""

import contextlib

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def count_compilations():
  """Yield a list that receives one entry per program that XLA compiles."""
  found = []

  def listen(event, duration, **_):
    if event == _EVENT:
      found.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
