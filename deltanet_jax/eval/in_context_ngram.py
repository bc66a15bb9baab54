"""In-context n-gram predictions: the baseline for in-context language learning.

Unlike the models of `ngram`, which are fitted to a corpus, these count in each sequence separately.
"""

import numpy as np


def ngram_predictions(tokens: np.ndarray, orders: int, never: tuple[int, ...]) -> np.ndarray:
  """Return `[orders B L]`: for n = 1, 2, .. the most frequent next token after the last n - 1.

  Backs off to the last n - 2 tokens, and so on, if a context has not occurred before. Ties go to
  the smallest id; 0 if there is no candidate.

  Args:
    tokens: `[B L]`.
    never: ids that are part of contexts but are never predicted.
  """
  predicted = np.zeros((orders, *tokens.shape), np.int32)
  for sequence, out in zip(tokens.tolist(), np.moveaxis(predicted, 1, 0)):
    counts: dict[tuple, int] = {}
    best: dict[tuple, tuple[int, int]] = {}  # context -> (count, -token)
    contexts: list[tuple] = [()]  # the last 0, 1, .. tokens
    for position, token in enumerate(sequence):
      if token not in never:
        for context in contexts:
          gram = (*context, token)
          counts[gram] = count = counts.get(gram, 0) + 1
          best[context] = max(best.get(context, (0, 0)), (count, -token))
      contexts = [(), *((*context, token) for context in contexts[: orders - 1])]
      answer = 0
      for size, context in enumerate(contexts):
        answer = -best[context][1] if context in best else answer
        out[size:, position] = answer
  return predicted
