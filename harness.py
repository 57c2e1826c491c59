"""
EleutherAI's evaluation harness (lm-eval) on checkpoints: `HarnessLM` is its adapter, `run` what `eval.py tasks` does.

    from harness import HarnessLM
    lm_eval.simple_evaluate(model=HarnessLM(model, tokenizer), tasks=["hellaswag"])

Where the harness leaves room, this does as its adapter for Hugging Face's models: an empty context is an end of text; a context
that does not fit is cut on the left (counted and reported, the continuation never is); texts longer than the context are
scored in disjoint windows, the last one with a full context; generation leaves room for max_gen_toks.
"""

import math
from collections import defaultdict

import lm_eval
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from body import LOGITS_AT_ONCE
from errors import ConfigError, nearest
from eval import paired

TOKENS_AT_ONCE = 16_384                   # of a batch whose size nobody has set; less, if memory is short


class HarnessLM(TemplateLM):
    """
    model       GPT, in evaluation mode;  tokenizer  its Tokenizer
    batch_size  sequences at once; None = as many as TOKENS_AT_ONCE allows and memory holds
    truncated   {"contexts": how many were cut so far, "tokens": by how many tokens in all}
    """

    def __init__(self, model, tokenizer, device="cpu", batch_size=None):
        super().__init__()
        self.model, self.coder, self._device, self.batch_size = model, tokenizer, torch.device(device), batch_size
        self.max_length = model.config.seq_len
        self.truncated = {"contexts": 0, "tokens": 0}

    @property
    def eot_token_id(self):
        return self.coder.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.coder.encode(string).tolist()

    def in_batches(self, items, length, what, function):
        """function(list of items) -> list, for all items, the longest first; results in the order of `items`."""
        order, found = sorted(range(len(items)), key=lambda i: -length(items[i])), [None] * len(items)
        at, limit = 0, self.batch_size
        with tqdm(total=len(order), desc=what, disable=None, leave=False) as bar:
            while at < len(order):
                longest = length(items[order[at]])
                chosen = order[at:at + (limit or max(1, TOKENS_AT_ONCE // longest))]
                try:
                    values = function([items[i] for i in chosen])
                except torch.OutOfMemoryError:
                    if len(chosen) == 1:
                        raise ConfigError(f"{what}: {longest} tokens do not fit the memory of {self.device}") from None
                    limit = len(chosen) // 2
                    continue
                for i, value in zip(chosen, values, strict=True):
                    found[i] = value
                bar.update(len(chosen))
                at += len(chosen)
        return found

    def cut(self, ids, room):
        """The last `room` of ids, the loss noted."""
        if len(ids) > room:
            self.truncated["contexts"] += 1
            self.truncated["tokens"] += len(ids) - room
        return ids[-room:]

    # ---- what tasks ask for

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[((context, continuation), its ids, its ids)] -> [(log-likelihood of the continuation, is it what greedy would say)]."""
        jobs = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(f"a continuation of {len(continuation)} tokens does not fit the context of {self.max_length}")
            jobs.append((self.cut(context + continuation, self.max_length + 1), len(continuation)))
        found = self.in_batches(jobs, lambda job: len(job[0]), "log-likelihoods", self.score)
        for (text, *_), answer in zip(requests, found):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    @torch.no_grad()
    def score(self, jobs):
        """[(ids, how many at their end are scored)] -> [(sum of log-probabilities, all the likeliest)]."""
        x = torch.zeros(len(jobs), max(len(ids) for ids, _ in jobs) - 1, dtype=torch.long)
        for row, (ids, _) in zip(x, jobs):
            row[:len(ids) - 1] = torch.tensor(ids[:-1])                    # padded on the right, where nobody looks
        h = self.model.hidden(x.to(self.device))
        h = torch.cat([row[len(ids) - 1 - n:len(ids) - 1] for row, (ids, n) in zip(h, jobs)])
        targets = torch.tensor([i for ids, n in jobs for i in ids[len(ids) - n:]], device=self.device)
        logp, best = [], []
        rows = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for part, wanted in zip(h.split(rows), targets.split(rows)):
            logits = self.model.lm_head(part)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logp.append(-F.cross_entropy(logits, wanted, reduction="none"))
            best.append(logits.argmax(-1) == wanted)
        counts = [n for _, n in jobs]
        return [(p.double().sum().item(), b.all().item()) for p, b in
                zip(torch.cat(logp).split(counts), torch.cat(best).split(counts))]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-likelihood of whole texts, which follow an end of text."""
        windows, texts = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                texts.append(number)
        totals = [0.0] * len(requests)
        for number, (logp, _) in zip(texts, self._loglikelihood_tokens(windows)):
            totals[number] += logp
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Texts that follow contexts, up to a stop string, end of text or max_gen_toks."""
        groups, found = defaultdict(list), [None] * len(requests)
        for number, request in enumerate(requests):
            groups[repr(request.args[1])].append(number)
        for members in groups.values():                                    # of one kind of generation
            settings = normalize_gen_kwargs(requests[members[0]].args[1])
            room = self.max_length - settings["max_gen_toks"]
            if room < 1:
                raise ConfigError(f"max_gen_toks={settings['max_gen_toks']} leaves no room in the context of {self.max_length}")
            jobs = [(self.cut(self.tok_encode(requests[n].args[0]) or [self.prefix_token_id], room), n) for n in members]
            texts = self.in_batches(jobs, lambda job: len(job[0]) + settings["max_gen_toks"], "generation",
                                    lambda batch: self.complete(batch, settings))
            for n, text in zip(members, texts):
                found[n] = text
                self.cache_hook.add_partial("generate_until", requests[n].args, text)
        return found

    def complete(self, jobs, settings):
        """[(ids, number of the request)] -> the text that follows each."""
        prompts = [torch.tensor(ids, device=self.device) for ids, _ in jobs]
        temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
        generators = [torch.Generator(self.device).manual_seed(number) for _, number in jobs]
        new, texts = [[] for _ in jobs], [None] * len(jobs)
        for token in self.model.stream(prompts, settings["max_gen_toks"], temperature=temperature, top_k=settings.get("top_k"),
                                       top_p=settings.get("top_p"), n_vocab=self.coder.n_vocab, generator=generators):
            for row, t in enumerate(token.tolist()):
                if texts[row] is None:
                    new[row].append(t)
                    text = self.coder.decode(new[row])
                    if t == self.coder.eot or any(stop and stop in text for stop in settings["until"]):
                        texts[row] = text
            if None not in texts:
                break
        texts = [self.coder.decode(ids) if text is None else text for ids, text in zip(new, texts)]
        for stop in filter(None, settings["until"]):
            texts = [text.split(stop)[0] for text in texts]
        return texts


# ----------------------------------------------------------------------------------------------------------------------
# several checkpoints beside each other


def run(models, tasks, device="cpu", batch_size=None, limit=None, num_fewshot=None, include_path=None):
    """
    models  [(name, GPT, Tokenizer)]; the rest as in eval.py tasks
    Returns {"results": rows of task, metric, checkpoint, value, standard_error, n; "against_first": rows of what differs from the
    first model on the same items; "notes": lines for the user; "versions": of tasks}.
    """
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            raise ConfigError(f"unknown task {task!r}{nearest(task, manager.all_tasks)}; --include_path DIR adds those of a folder")
    found = {"results": [], "against_first": [], "notes": [], "versions": {}}
    items = []
    for name, model, tokenizer in models:
        lm = HarnessLM(model, tokenizer, device, batch_size)
        try:
            results = lm_eval.simple_evaluate(model=lm, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, bootstrap_iters=1000,
                                              task_manager=manager)
        except (OSError, ImportError) as e:                                # a data set that cannot be fetched, a missing package
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:150]
            raise ConfigError(f"{','.join(tasks)}: the harness cannot go on ({type(e).__name__}: {reason})") from None
        found["versions"] |= results["versions"]
        for task, values in results["results"].items():
            for key, value in values.items():
                metric, _, filtered = key.partition(",")
                if filtered and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                    error = values.get(f"{metric}_stderr,{filtered}")
                    found["results"].append({
                        "task": task, "metric": label(metric, filtered), "checkpoint": name, "value": value,
                        "standard_error": error if isinstance(error, float) else None,
                        "n": results.get("n-samples", {}).get(task, {}).get("effective")})
        if lm.truncated["contexts"]:
            found["notes"].append(f"{name}: {lm.truncated['contexts']} contexts did not fit {lm.max_length} tokens and were cut on the "
                                  f"left, by {lm.truncated['tokens']} tokens in all")
        items.append(values_of_items(results))
    for (name, *_), of_items in zip(models[1:], items[1:]):
        for (task, metric), values in of_items.items():
            first = items[0].get((task, metric), {})
            if values.keys() == first.keys():
                found["against_first"].append({"task": task, "metric": metric, "checkpoint": name}
                                              | compared([first[i] for i in values], list(values.values())))
    return found


def values_of_items(results):
    """{(task, metric): {item: its value}} of the metrics that are means over items."""
    found = defaultdict(dict)
    for task, rows in results["samples"].items():
        for row in rows:
            for metric in row["metrics"]:
                if isinstance(row.get(metric), (int, float)):
                    found[task, metric, row["filter"]][row["doc_id"]] = float(row[metric])
    return {(task, label(metric, filtered)): values for (task, metric, filtered), values in found.items()
            if math.isclose(sum(values.values()) / len(values), results["results"][task][f"{metric},{filtered}"], abs_tol=1e-9)}


def label(metric, filtered):
    return metric if filtered == "none" else f"{metric} ({filtered})"


def compared(first, other):
    """
    Of values of the same items: mean difference, standard error, 95 % interval; and where they are right or wrong (0 or 1), how
    many changed each way and the p-value of McNemar's exact test, as the MHAR paper reports.
    """
    found = paired(first, other)
    if set(first) | set(other) <= {0.0, 1.0}:
        better, worse = (sum(a == x and b == 1 - x for a, b in zip(first, other)) for x in (0, 1))
        return found | {"better": better, "worse": worse, "p": mcnemar(better, worse)}
    return found | {"better": None, "worse": None, "p": None}


def mcnemar(better, worse):
    """Two-sided p-value: how often fair coins would split better + worse changes at least as unevenly."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2 ** n)
