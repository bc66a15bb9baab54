"""Generation equals repeated full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.generate import Sampling, generate, sample
from deltanet_jax.generate.loop import decode, left_pad, prefill
from deltanet_jax.models import preset
from tests.support.models import random_model

PROMPTS = [[5, 9, 2, 77, 31, 8, 8, 1, 60], [200], [17, 3, 3, 250]]


@functools.cache
def model_of(name):
  return random_model(preset(name, depth=2))


forward = jax.jit(lambda model, tokens: model(tokens))


def greedy_by_full_forward(model, prompt, count):
  tokens = list(prompt)
  # Padded to one shape, to compile once: later tokens do not change earlier logits.
  L = max(map(len, PROMPTS)) + count
  for _ in range(count):
    padded = jnp.asarray([tokens + [0] * (L - len(tokens))], jnp.int32)
    tokens.append(int(forward(model, padded)[0, len(tokens) - 1].argmax()))
  return tokens[len(prompt) :]


# The window of the sliding preset is 16: sequences become longer and the ring buffer wraps.
@pytest.mark.parametrize("name", ["deltanet-tiny", "deltanet-sliding-tiny"])
def test_prompts_of_different_lengths_equal_full_forward_passes(name):
  model = model_of(name)
  got = generate(model, PROMPTS, 24, block=8)
  for prompt, tokens in zip(PROMPTS, got):
    assert tokens == greedy_by_full_forward(model, prompt, 24)


def test_stop_tokens_end_a_sequence_and_are_included():
  model = model_of("deltanet-tiny")
  free = generate(model, PROMPTS, 12, block=4)
  stop = free[0][5]
  for tokens, full in zip(generate(model, PROMPTS, 12, stop=[stop], block=4), free):
    end = full.index(stop) + 1 if stop in full else len(full)
    assert tokens == full[:end]


def test_sampling_is_reproducible_and_within_top_k_and_top_p():
  model = model_of("deltanet-tiny")
  how = Sampling(temperature=1.0)
  a, b, c = (generate(model, PROMPTS, 8, sampling=how, seed=s, block=8) for s in (1, 1, 2))
  assert a == b != c
  p = np.array([0.5, 0.3, 0.15, 0.05])
  logits = jnp.log(jnp.asarray(p, jnp.float32))[None].repeat(2000, axis=0)
  draw = lambda **how: np.asarray(sample(logits, Sampling(**how), jax.random.key(0)))
  assert set(draw()) == {0}
  assert set(draw(temperature=1.0)) == {0, 1, 2, 3}
  assert set(draw(temperature=1.0, top_k=2)) == {0, 1}
  assert set(draw(temperature=1.0, top_p=0.79)) == {0, 1}
  assert set(draw(temperature=1.0, top_p=0.81)) == {0, 1, 2}
  assert set(draw(temperature=1.0, top_p=0.01)) == {0}
  frequencies = np.bincount(draw(temperature=1.0), minlength=4) / 2000
  np.testing.assert_allclose(frequencies, p, atol=0.04)


def test_arrays_and_a_single_prompt_are_accepted():
  model = model_of("deltanet-tiny")
  prompts = [[5, 9, 2], [17, 3, 3]]
  want = generate(model, prompts, 3)
  for array in (np.asarray, jnp.asarray):
    assert generate(model, array(prompts), 3) == want
    assert generate(model, [array(prompt) for prompt in prompts], 3) == want
    assert generate(model, array(prompts[0]), 3) == want[:1]
  assert generate(model, np.asarray(prompts, np.uint8), 3) == want
  assert generate(model, prompts[0], 3) == want[:1]


def test_memory_does_not_grow_with_the_generated_length():
  model = model_of("deltanet-tiny")
  tokens, segment_ids = left_pad(PROMPTS)
  stops, how = jnp.zeros((0,), jnp.int32), Sampling()

  def bytes_of(count):
    state = model.init_state(3, 9 + count)
    args = (model, tokens, segment_ids, state, stops, jax.random.key(0))
    carry = jax.eval_shape(lambda *args: prefill(*args, how), *args)
    memory = decode.lower(model, carry, stops, count, how).compile().memory_analysis()
    # Only the int32 tokens grow with the length.
    tokens_out = 3 * count * 4
    return memory.temp_size_in_bytes, memory.output_size_in_bytes - tokens_out

  (temp, out), (temp_long, out_long) = bytes_of(10), bytes_of(10_000)
  assert out == out_long
  # Only the loop's own copy of the tokens.
  assert temp_long - temp <= 2 * 3 * 10_000 * 4


def test_error_messages():
  model = model_of("deltanet-tiny")
  for arguments, message in (
    (dict(prompts=[[]], max_new=3), "prompts has an empty entry"),
    (dict(prompts=[[1]], max_new=0), "max_new is 0"),
    (dict(prompts=[[256]], max_new=1), "token id 256 is outside the vocabulary of 256"),
    (dict(prompts=[[2**40]], max_new=1), "outside the vocabulary of 256"),
    (dict(prompts=[[1]], max_new=1, stop=[-1]), "token id -1 is outside"),
    (dict(prompts=np.zeros((2, 0), int), max_new=1), "prompts has an empty entry"),
    (dict(prompts=np.zeros((0, 2), int), max_new=1), "prompts has an empty entry"),
    (dict(prompts=np.zeros((1, 2, 3), int), max_new=1), r"\[2, 3\] of int64, expected token ids"),
    (dict(prompts=np.ones(3), max_new=1), r"\[3\] of float64, expected token ids"),
    (dict(prompts=np.array(3), max_new=1), r"prompts is array\(3\), expected a list of prompts"),
    (dict(prompts="hello", max_new=1), "encode text with a tokenizer"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(top_p=2.0)), "top_p is 2.0"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(top_k=0)), "top_k is 0"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(temperature=-1.0)), "temperature is -1"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(temperature=np.nan)), "temperature is nan"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(top_k=9)), "top_k is 9, but temperature 0"),
    (dict(prompts=[[1]], max_new=1, sampling=Sampling(top_p=0.9)), "top_p is 0.9, but temperature"),
  ):
    with pytest.raises(ValueError, match=message):
      generate(model, **arguments)
