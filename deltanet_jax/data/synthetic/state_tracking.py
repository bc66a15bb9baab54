"""State tracking: tokens are permutations, the target at each is the product of all so far."""

import itertools

import numpy as np

from deltanet_jax.data.task import Task, sequences_per_host

# Name -> of how many things its tokens are permutations. Those of two compose as bits under XOR.
GROUPS = {"parity": 2, "s3": 3}
_TRAINING, _HELD_OUT = 0, 1  # streams of random numbers


def permutations(n: int) -> np.ndarray:
  """`[n! n]`, what stands at each place; sorted, so that number 0 changes nothing."""
  return np.asarray(list(itertools.permutations(range(n))))


def product_table(n: int) -> np.ndarray:
  """`[n! n!]`: the number of "first a, then b", which is b[a[i]] at place i."""
  elements = permutations(n)
  number = {tuple(element): i for i, element in enumerate(elements.tolist())}
  products = elements[:, elements].transpose(1, 0, 2)  # [a b i]
  return np.asarray([[number[tuple(x)] for x in row] for row in products.tolist()], np.int32)


def running_products(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Of every row `[b L]`, the product of the tokens up to each."""
  products, span = tokens, 1
  # Each holds the product of the last `span` tokens; doubled until that is all of them.
  while span < tokens.shape[1]:
    longer = table[products[:, :-span], products[:, span:]]
    products = np.concatenate([products[:, :span], longer], axis=1)
    span *= 2
  return products


class StateTracking(Task):
  """Running products of uniformly drawn permutations; every position counts."""

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
    return (self._draw(_HELD_OUT, number, host, hosts) for number in numbers)

  def _draw(self, stream, number, host, hosts):
    rows = sequences_per_host(self.shape[0], host, hosts)
    random = np.random.default_rng((self._seed, stream, number))
    tokens = random.integers(0, self.vocab, self.shape, np.int32)
    tokens = tokens[host * rows : (host + 1) * rows]
    return dict(
      tokens=tokens,
      targets=running_products(tokens, self._table),
      segment_ids=np.ones_like(tokens),
      mask=np.ones(tokens.shape, bool),
    )
