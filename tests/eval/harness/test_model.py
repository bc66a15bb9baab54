"""`HarnessLM` against direct computation."""

import pytest

from deltanet_jax.data import load_tokenizer
from deltanet_jax.eval.harness import HarnessLM, package
from deltanet_jax.generate import generate

BYTES = load_tokenizer("bytes")
MAX_LENGTH = 32


def request(*args, kind="loglikelihood"):
  instance = package.load("lm_eval.api.instance").Instance
  return instance(request_type=kind, doc={}, arguments=args, idx=0)


def make(model, **options):
  return HarnessLM(model, BYTES, **dict(batch=4, max_length=MAX_LENGTH, progress=False) | options)


PAIRS = [
  ("", "It is"),  # only bos before it
  ("It is a truth", " universally"),
  ("It is a truth", " acknowledged"),
  ("It is a truth ", "that"),  # the space belongs to the continuation
  ("A text that is longer than what the model is given", " at once"),
]


@pytest.mark.parametrize("bos", [True, False])
def test_loglikelihoods(model, direct, bos):
  lm = make(model, bos=bos)
  found = lm.loglikelihood([request(*pair) for pair in PAIRS])
  prefix = [BYTES.bos] if bos else []
  for (context, rest), (logprob, greedy) in zip(PAIRS, found):
    stripped = context.rstrip()
    rest = context[len(stripped) :] + rest
    context = [*(prefix if context else [BYTES.bos]), *BYTES.encode(stripped).tolist()]
    expected = direct(context, BYTES.encode(rest).tolist(), MAX_LENGTH)
    assert logprob == pytest.approx(expected[0], abs=1e-5) and greedy == expected[1]


def test_rolling_loglikelihoods(model, direct):
  texts = ["Short.", "A text of more than two windows of the model, so that each is one. " * 2, ""]
  lm = make(model)
  found = lm.loglikelihood_rolling([request(text) for text in texts])
  for text, total in zip(texts, found):
    ids, expected = [BYTES.bos, *BYTES.encode(text).tolist()], 0.0
    # Every token once; the first of a window is conditioned on the token before it.
    for start in range(0, len(ids) - 1, MAX_LENGTH):
      window = ids[start + 1 : start + 1 + MAX_LENGTH]
      # The last window is filled up with the tokens before it.
      size = min(MAX_LENGTH, len(ids) - 1)
      context = ids[max(start + len(window) - size, 0) : start + 1] or ids[:1]
      expected += direct(context, window, MAX_LENGTH)[0]
    assert total == pytest.approx(expected, abs=2e-5)
  assert found[2] == 0.0


def reference(model, text, new):
  (ids,) = generate(model, [[BYTES.bos, *BYTES.encode(text).tolist()]], new, stop=[BYTES.eos])
  return BYTES.decode([i for i in ids if i < 256])


def test_generation_ends_at_stop_strings(model):
  lm, new = make(model, max_length=64), 20
  texts = ["It is a truth", "An", "Emma"]
  options = lambda **more: dict(max_gen_toks=new, **more)
  ask = lambda **more: lm.generate_until(
    [request(text, options(**more), kind="generate_until") for text in texts]
  )
  free = ask(until=[])
  assert free == [reference(model, text, new) for text in texts]
  # A stop string of one character, and one of two.
  letter, pair = free[0][5], free[1][7:9]
  stopped = ask(until=[letter, pair])
  for text, cut in zip(free, stopped):
    ends = [at for stop in (letter, pair) if (at := text.find(stop)) >= 0]
    assert cut == text[: min(ends, default=None)]
  assert letter not in stopped[0] and len(stopped[0]) <= 5
  # One request at a time, with its own settings.
  alone = make(model, max_length=64, batch=1)
  short = alone.generate_until(
    [request(texts[0], dict(until=letter, max_gen_toks=3), kind="generate_until")]
  )
  assert short == [free[0][: min(3, free[0].find(letter))]]


def test_a_tokenizer_of_another_model_raises(model):
  with pytest.raises(ValueError, match="'mistral' has 32000 ids, more than the 260 of the model"):
    HarnessLM(model, load_tokenizer("mistral"))
