"""N-grams counted in the context itself: what a model that learns a language there has to beat.

Unlike those of `ngram`, which are counted once in a corpus, these begin anew in every row.
"""

import numpy as np


def ngram_predictions(tokens: np.ndarray, orders: int, never: tuple[int, ...]) -> np.ndarray:
  """`[orders b L]`: for n = 1, 2, .. what came most often after the last n - 1 tokens of a row.

  Where these have not been followed by anything so far, the last n - 2 are asked, and so on. Of
  equally frequent tokens it is the smallest; 0 where there is none.

  Args:
    tokens: `[b L]`.
    never: ids that are part of contexts but no answer.
  """
  found = np.zeros((orders, *tokens.shape), np.int32)
  for row, of_row in zip(tokens.tolist(), np.moveaxis(found, 1, 0)):
    counts: dict[tuple, int] = {}
    best: dict[tuple, tuple[int, int]] = {}  # after a context: (how often, -which)
    contexts: list[tuple] = [()]  # of 0, 1, .. tokens before this one
    for place, token in enumerate(row):
      if token not in never:
        for context in contexts:
          gram = (*context, token)
          counts[gram] = count = counts.get(gram, 0) + 1
          best[context] = max(best.get(context, (0, 0)), (count, -token))
      contexts = [(), *((*context, token) for context in contexts[: orders - 1])]
      answer = 0
      for size, context in enumerate(contexts):
        answer = -best[context][1] if context in best else answer
        of_row[size:, place] = answer
  return found
