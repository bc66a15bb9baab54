"""A model of this library as lm-evaluation-harness wants it."""

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
_BLOCK = 16  # tokens that are drawn before texts are searched for where to stop


class HarnessLM(_TemplateLM):
  """Log-likelihoods, perplexities and continuations of text.

  Contexts begin with bos, as documents do in training. A text longer than `max_length` is cut at
  its beginning; for perplexities it is read in windows of that length that do not overlap.
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
    """Args:
    bos: whether contexts that are not empty begin with bos too; the harness's own classes leave it
      out unless they are told.
    reuse: see `ContinuationScorer`.
    progress: whether to show a bar.
    """
    super().__init__()
    if tokenizer.vocab > model.cfg.vocab:
      raise ValueError(
        f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab} ids, more than the"
        f" {model.cfg.vocab} of the model: it is not what made its tokens."
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
    """Token ids; None for `add_special_tokens` adds bos if the model was made so."""
    begin = self.bos if add_special_tokens is None else add_special_tokens
    return [self.ids.bos] * begin + self.ids.encode(string).tolist()

  def _bar(self, total: int, what: str, disable: bool) -> tqdm:
    return tqdm(total=total, desc=what, unit="request", disable=disable or not self._progress)

  def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """As the harness has it, with one bar, that of the work."""
    return super().loglikelihood(requests, disable_tqdm=True)

  def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_):
    del disable_tqdm  # only the bar of tokenizing is not shown
    with self._bar(len(requests), "log-likelihoods", False) as bar:
      scores = self._scorer([(context, rest) for _, context, rest in requests], bar.update)
    found = [(score.logprob, score.greedy) for score in scores]
    for (text, _, _), answer in zip(requests, found):
      if text is not None:
        self.cache_hook.add_partial("loglikelihood", text, answer)
    return found

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Of whole texts; the first token follows bos, the first of a later window the token before."""
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
    """Continuations up to the first of the request's stops, which is left out."""
    asked = [(i, *_settings(*request.args, self.max_length)) for i, request in enumerate(requests)]
    # Longest first, and only requests of the same settings together.
    prompts = {i: self._prompt(text, self.max_length - new) for i, text, _, new, _ in asked}
    groups: dict[tuple, list[int]] = {}
    for i, _, until, new, sampling in asked:
      groups.setdefault((until, new, sampling), []).append(i)
    texts: dict[int, str] = {}
    with self._bar(len(requests), "generating", disable_tqdm) as bar:
      for (until, new, sampling), members in groups.items():
        members.sort(key=lambda i: -len(prompts[i]))
        for start in range(0, len(members), self.batch):
          part = members[start : start + self.batch]
          rows = [prompts[i] for i in part]
          texts |= zip(part, self._continue(rows, until, new, sampling))
          bar.update(len(part))
    for i, request in enumerate(requests):
      self.cache_hook.add_partial("generate_until", request.args, texts[i])
    return [texts[i] for i in range(len(requests))]

  def _prompt(self, text: str, most: int) -> list[int]:
    """The last tokens of a text, at least bos."""
    return self.tok_encode(text)[-most:] or [self.ids.bos]

  def _continue(self, prompts: Sequence[list[int]], until, new: int, sampling) -> list[str]:
    length = bucket(max(map(len, prompts)))
    filled = [*prompts, *[[self.ids.bos]] * (self.batch - len(prompts))]
    state = self.model.init_state(self.batch, length + -(-new // _BLOCK) * _BLOCK)
    stops = jnp.asarray([self.eot_token_id], jnp.int32)
    key = jax.random.key(0)
    now = prefill(self.model, *left_pad(filled, length), state, stops, key, sampling)
    drawn = np.asarray(now.token)[:, None]
    while drawn.shape[1] < new and not all(
      self._ended(row, until) for row in drawn[: len(prompts)]
    ):
      now, more = decode(self.model, now, stops, _BLOCK, sampling)
      drawn = np.concatenate([drawn, np.asarray(more)], axis=1)
    return [_until(self._text(row[:new]), until) for row in drawn[: len(prompts)]]

  def _text(self, row: np.ndarray) -> str:
    """Of the tokens before the one that ends a text."""
    ends = np.flatnonzero(row == self.eot_token_id)
    row = row[: ends[0]] if len(ends) else row
    # A model's vocabulary may be padded: such ids stand for nothing.
    return self.ids.decode(row[row < self.ids.vocab])

  def _ended(self, row: np.ndarray, until: Iterable[str]) -> bool:
    return self.eot_token_id in row or any(stop in self._text(row) for stop in until)


def _settings(text: str, options: dict, max_length: int) -> tuple:
  """(text, where to stop, how many tokens at most, how to draw them) of a request."""
  options = package.load("lm_eval.models.utils").normalize_gen_kwargs(options)
  new = min(options["max_gen_toks"], max_length - 1)
  sampling = Sampling(
    temperature=float(options["temperature"]) if options.get("do_sample") else 0.0,
    top_k=options.get("top_k") if options.get("do_sample") else None,
    top_p=options.get("top_p") if options.get("do_sample") else None,
  )
  # An empty stop would stop everything.
  return text, tuple(stop for stop in options["until"] if stop), new, sampling


def _until(text: str, until: Iterable[str]) -> str:
  places = [at for stop in until if (at := text.find(stop)) >= 0]
  return text[: min(places)] if places else text
