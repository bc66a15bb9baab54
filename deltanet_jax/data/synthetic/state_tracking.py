"""State tracking: tokens are permutations, targets their running products (word problems)."""

import itertools

import numpy as np

from deltanet_jax.data.task import Task, sequences_per_host

# Name -> degree n of the symmetric group S_n; for n = 2 products are parity (XOR).
GROUPS = {"parity": 2, "s3": 3}
_TRAINING, _VALIDATION = 0, 1  # random streams


def permutations(n: int) -> np.ndarray:
  """Return all permutations `[n! n]` in lexicographic order; number 0 is the identity."""
  return np.asarray(list(itertools.permutations(range(n))))


def product_table(n: int) -> np.ndarray:
  """Return the composition table `[n! n!]`: entry (a, b) is "first a, then b", i -> b[a[i]]."""
  elements = permutations(n)
  number = {tuple(element): i for i, element in enumerate(elements.tolist())}
  products = elements[:, elements].transpose(1, 0, 2)  # [a b i]
  return np.asarray([[number[tuple(x)] for x in row] for row in products.tolist()], np.int32)


def running_products(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Compute the cumulative products of tokens `[b L]` along the sequence."""
  products, span = tokens, 1
  # products[t] covers the last `span` tokens up to t; the span doubles until it covers all.
  while span < tokens.shape[1]:
    longer = table[products[:, :-span], products[:, span:]]
    products = np.concatenate([products[:, :span], longer], axis=1)
    span *= 2
  return products


class StateTracking(Task):
  """Running products of uniformly drawn permutations; every position is scored."""

  def __init__(
    self, group: str, *, length: int, batch: int, seed: int = 0, validation_batches: int = 16
  ):
    if group not in GROUPS:
      raise ValueError(f"group is {group!r}, expected one of {list(GROUPS)}.")
    self.group, self.shape = group, (batch, length)
    self._table = product_table(GROUPS[group])
    self.vocab = len(self._table)
    self._seed, self._validation_batches = seed, validation_batches

  def identity(self):
    return dict(task=f"state tracking of {self.group}, seed {self._seed}")

  def batch(self, step, host, hosts):
    return self._draw(_TRAINING, step, host, hosts)

  def validation(self, host, hosts):
    numbers = range(self._validation_batches)
    return (self._draw(_VALIDATION, number, host, hosts) for number in numbers)

  def _draw(self, stream, number, host, hosts):
    count = sequences_per_host(self.shape[0], host, hosts)
    random = np.random.default_rng((self._seed, stream, number))
    tokens = random.integers(0, self.vocab, self.shape, np.int32)
    tokens = tokens[host * count : (host + 1) * count]
    return dict(
      tokens=tokens,
      targets=running_products(tokens, self._table),
      segment_ids=np.ones_like(tokens),
      mask=np.ones(tokens.shape, bool),
    )
