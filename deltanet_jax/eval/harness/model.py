"""`HarnessLM`: a model of this library for lm-evaluation-harness."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deltanet_jax.data import Tokenizer
from deltanet_jax.eval.harness import package
from deltanet_jax.eval.harness.scoring import ContinuationScorer, bucket
from deltanet_jax.generate.loop import decode, left_pad, prefill
from deltanet_jax.generate.sample import Sampling
from deltanet_jax.models import LM

_TemplateLM = package.load("lm_eval.api.model").TemplateLM
_utils = package.load("lm_eval.utils")
_BLOCK = 16  # tokens generated between searches for stop strings


class HarnessLM(_TemplateLM):
  """Log-likelihoods, rolling log-likelihoods (perplexity) and generation.

  Contexts start with bos, as documents do in training. A text longer than `max_length` is truncated
  on the left; for perplexities it is split into windows of that length that do not overlap.
  """

  def __init__(
    self,
    model: LM,
    tokenizer: Tokenizer,
    *,
    batch: int = 8,
    max_length: int = 2048,
    bos: bool = True,
    reuse: bool = True,
    progress: bool = True,
  ):
    """Initialize.

    Args:
      batch: batch size.
      max_length: maximum sequence length.
      bos: whether non-empty contexts start with bos too; the harness's own classes omit it by
        default.
      reuse: see `ContinuationScorer`.
      progress: whether to show a progress bar.
    """
    super().__init__()
    if tokenizer.vocab > model.cfg.vocab:
      raise ValueError(
        f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab} ids, more than the"
        f" {model.cfg.vocab} of the model: it is not the tokenizer of this model."
      )
    self.model, self.ids = model, tokenizer
    self.batch, self.max_length, self.bos, self._progress = batch, max_length, bos, progress
    self._scorer = ContinuationScorer(model, batch=batch, max_length=max_length, reuse=reuse)

  @property
  def eot_token_id(self) -> int:
    return self.ids.bos if self.ids.eos is None else self.ids.eos

  @property
  def prefix_token_id(self) -> int:
    return self.ids.bos

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
    """Return token ids; `add_special_tokens=None` adds bos if the model was built with it."""
    add_bos = self.bos if add_special_tokens is None else add_special_tokens
    return [self.ids.bos] * add_bos + self.ids.encode(string).tolist()

  def _bar(self, total: int, what: str, disable: bool) -> tqdm:
    return tqdm(total=total, desc=what, unit="request", disable=disable or not self._progress)

  def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """As in the harness, without its second progress bar for tokenization."""
    return super().loglikelihood(requests, disable_tqdm=True)

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_):
    del disable_tqdm  # only the bar of tokenization is disabled
    with self._bar(len(requests), "log-likelihoods", False) as bar:
      scores = self._scorer([(context, rest) for _, context, rest in requests], bar.update)
    found = [(score.logprob, score.greedy) for score in scores]
    for (text, _, _), answer in zip(requests, found):
      if text is not None:
        self.cache_hook.add_partial("loglikelihood", text, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Return log p of full texts; each window is conditioned on the token before it, or bos."""
    windows, owners = [], []
    for number, (text,) in enumerate(request.args for request in requests):
      tokens = self.tok_encode(text, add_special_tokens=False)
      rolled = _utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
      for window in rolled:
        windows.append(_utils.make_disjoint_window(window))
        owners.append(number)
    with self._bar(len(windows), "perplexities", disable_tqdm) as bar:
      scores = self._scorer(windows, bar.update)
    totals = [0.0] * len(requests)
    for owner, score in zip(owners, scores):
      totals[owner] += score.logprob
    for request, total in zip(requests, totals):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return totals

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Return continuations up to, and without, the first stop string of each request."""
    parsed = [(i, *_settings(*request.args, self.max_length)) for i, request in enumerate(requests)]
    # Batches have requests of the same settings, longest first.
    prompts = {i: self._prompt(text, self.max_length - new) for i, text, _, new, _ in parsed}
    groups: dict[tuple, list[int]] = {}
    for i, _, until, new, sampling in parsed:
      groups.setdefault((until, new, sampling), []).append(i)
    texts: dict[int, str] = {}
    with self._bar(len(requests), "generating", disable_tqdm) as bar:
      for (until, new, sampling), indices in groups.items():
        indices.sort(key=lambda i: -len(prompts[i]))
        for start in range(0, len(indices), self.batch):
          part = indices[start : start + self.batch]
          chosen = [prompts[i] for i in part]
          texts |= zip(part, self._continue(chosen, until, new, sampling))
          bar.update(len(part))
    for i, request in enumerate(requests):
      self.cache_hook.add_partial("generate_until", request.args, texts[i])
    return [texts[i] for i in range(len(requests))]

  def _prompt(self, text: str, most: int) -> list[int]:
    """Return the last tokens of a text, at least bos."""
    return self.tok_encode(text)[-most:] or [self.ids.bos]

  def _continue(self, prompts: Sequence[list[int]], until, new: int, sampling) -> list[str]:
    length = bucket(max(map(len, prompts)))
    padded = [*prompts, *[[self.ids.bos]] * (self.batch - len(prompts))]
    state = self.model.init_state(self.batch, length + -(-new // _BLOCK) * _BLOCK)
    stops = jnp.asarray([self.eot_token_id], jnp.int32)
    key = jax.random.key(0)
    now = prefill(self.model, *left_pad(padded, length), state, stops, key, sampling)
    tokens = np.asarray(now.token)[:, None]
    while tokens.shape[1] < new and not all(
      self._ended(ids, until) for ids in tokens[: len(prompts)]
    ):
      now, more = decode(self.model, now, stops, _BLOCK, sampling)
      tokens = np.concatenate([tokens, np.asarray(more)], axis=1)
    return [_truncate(self._text(ids[:new]), until) for ids in tokens[: len(prompts)]]

  def _text(self, ids: np.ndarray) -> str:
    """Decode the tokens before the end-of-text token."""
    ends = np.flatnonzero(ids == self.eot_token_id)
    ids = ids[: ends[0]] if len(ends) else ids
    # A padded vocabulary has ids without text.
    return self.ids.decode(ids[ids < self.ids.vocab])

  def _ended(self, ids: np.ndarray, until: Iterable[str]) -> bool:
    return self.eot_token_id in ids or any(stop in self._text(ids) for stop in until)


def _settings(text: str, options: dict, max_length: int) -> tuple:
  """Return text, stop strings, maximum number of new tokens and sampling of a request."""
  options = package.load("lm_eval.models.utils").normalize_gen_kwargs(options)
  new = min(options["max_gen_toks"], max_length - 1)
  sampling = Sampling(
    temperature=float(options["temperature"]) if options.get("do_sample") else 0.0,
    top_k=options.get("top_k") if options.get("do_sample") else None,
    top_p=options.get("top_p") if options.get("do_sample") else None,
  )
  # An empty string would stop at once.
  return text, tuple(stop for stop in options["until"] if stop), new, sampling


def _truncate(text: str, until: Iterable[str]) -> str:
  """Cut a text at its first stop string."""
  ends = [at for stop in until if (at := text.find(stop)) >= 0]
  return text[: min(ends)] if ends else text
