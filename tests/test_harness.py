"""harness.py against lm-eval's own adapter for Hugging Face's models, on tasks made here."""

import json
import random
import sys

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval as eval_file
import harness
from bpe import SOURCES, save_bpe
from convert import to_hf
from errors import ConfigError
from harness import HarnessLM, mcnemar
from helpers import random_model
from model import GPT, PATHWAYS
from test_eval import save
from tokenizer import load_tokenizer

T = 48
WORDS = "depth site source query key value head block stream gate sum mean norm read \u00e9t\u00e9 \u65e5\u672c \U0001f600".split()


def text(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}     # theirs needs one
    return load_tokenizer(str(save_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json", edit=lambda spec: spec.update(decoder=decoder))))


def make(tokenizer, seed=0, **kw):
    return random_model(seed, vocab_size=tokenizer.n_vocab + 3, seq_len=T, n_layer=2, **{"residual": "add"} | kw).float().eval()


@pytest.fixture(scope="module")
def both(tokenizer, tmp_path_factory):
    """(ours, theirs) of one model, weights as transformers loads them."""
    folder = tmp_path_factory.mktemp("model")
    save(folder / "ckpt.pt", make(tokenizer), tokenizer)
    to_hf(folder / "ckpt.pt", folder / "hf")
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder / "hf"), tokenizer=AutoTokenizer.from_pretrained(folder / "hf"),
                  batch_size=4, device="cpu")
    return HarnessLM(GPT.from_checkpoint(folder / "ckpt.pt"), tokenizer), theirs


def ask(lm, kind, arguments):
    return getattr(lm, kind)([Instance(kind, {}, a, i) for i, a in enumerate(arguments)], disable_tqdm=True)


def pairs():
    """Contexts and continuations: empty, ending in spaces, longer than the context, and tokens that merge across the border."""
    rng, found = random.Random(0), [("", "depth"), ("", "\u65e5\u672c read"), ("key ", "value"), ("key  ", " value"), ("de", "pth"), ("x\n", "\ny")]
    for length in (1, 3, 10, 20, 40, 80):
        found += [(text(rng, length), " " + text(rng, n)) for n in (1, 2, 5)]
    return found


def test_loglikelihoods_are_theirs(both):
    ours, theirs = (ask(lm, "loglikelihood", pairs()) for lm in both)
    assert all(abs(a - b) < 1e-5 * max(1, abs(b)) for (a, _), (b, _) in zip(ours, theirs))
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs] and both[0].truncated["contexts"] > 0
    rng = random.Random(1)
    texts = [("x",), (text(rng, 10),), (text(rng, 300),), ("\n" * 100,)]
    ours, theirs = (ask(lm, "loglikelihood_rolling", texts) for lm in both)
    assert all(abs(a - b) < 1e-5 * abs(b) for a, b in zip(ours, theirs))


def test_greedy_answers_are_flagged(both):
    """A continuation that the model itself would write, which a random one hardly ever is."""
    ours, theirs = both
    contexts = [text(random.Random(seed), 5) for seed in range(6)]
    written = ask(ours, "generate_until", [(c, {"max_gen_toks": 4}) for c in contexts])
    asked = [(c, w) for c, w in zip(contexts, written) if ours.tok_encode(c + w)[-4:] == ours.tok_encode(w)[-4:] and "\ufffd" not in w]
    (scores, flags), (_, expected) = (zip(*ask(lm, "loglikelihood", asked)) for lm in both)
    assert flags == expected and any(flags) and len(asked) >= 2


def test_generated_texts_are_theirs(both):
    ours, theirs = both
    contexts = [text(random.Random(seed), seed) for seed in range(1, 40, 3)] + [""]
    plain = ask(ours, "generate_until", [(c, {"max_gen_toks": 20}) for c in contexts])
    common = max(set("".join(plain)) - {"\ufffd"}, key=lambda c: sum(c in p[2:] for p in plain))       # a stop string that does occur
    kinds = ({"max_gen_toks": 20}, {"max_gen_toks": 12, "until": [common, "never"]}, {"until": "zzz", "max_gen_toks": 5, "do_sample": False})
    asked = [(c, kind) for c in contexts[:-1] for kind in kinds]
    found = ask(ours, "generate_until", asked)
    expected = ask(theirs, "generate_until", asked)
    assert found == expected and any(common in p for p in plain) and not any(common in f for f in found[1::3])
    assert len(set(found)) > 10


@pytest.mark.parametrize("residual", [*PATHWAYS, "experts"])
def test_batches_change_nothing(tokenizer, residual):
    kw = dict(residual="mhar", moe_n_expert=4, moe_d_ff=16) if residual == "experts" else dict(residual=residual)
    model = make(tokenizer, **kw).double()
    contexts = [text(random.Random(seed), seed) for seed in (1, 9, 2, 30, 4, 5, 12)]
    sampled = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.0, "top_k": 20}
    answers = []
    for size in (1, 3, 7, None):
        lm = HarnessLM(model, tokenizer, batch_size=size)
        answers.append((ask(lm, "loglikelihood", pairs()), ask(lm, "loglikelihood_rolling", [(c,) for c in contexts]),
                        ask(lm, "generate_until", [(c, kind) for c in contexts for kind in ({"max_gen_toks": 10}, sampled)])))
    for scores, rolling, texts in answers[1:]:
        assert all(abs(a - b) < 1e-9 and x == y for (a, x), (b, y) in zip(scores, answers[0][0]))
        assert all(abs(a - b) < 1e-9 for a, b in zip(rolling, answers[0][1])) and texts == answers[0][2]


def test_memory_that_is_short_makes_batches_smaller(both, monkeypatch):
    ours, sizes = both[0], []
    score = ours.score

    def short(jobs):
        sizes.append(len(jobs))
        if len(jobs) > 5:
            raise torch.OutOfMemoryError("no")
        return score(jobs)
    expected = ask(ours, "loglikelihood", pairs())
    monkeypatch.setattr(ours, "score", short)
    assert [greedy for _, greedy in ask(ours, "loglikelihood", pairs())] == [greedy for _, greedy in expected]
    assert sizes[0] == len(pairs()) and sum(n for n in sizes if n <= 5) == len(pairs())
    monkeypatch.setattr(ours, "score", lambda jobs: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(ConfigError, match="log-likelihoods: .* tokens do not fit the memory of cpu"):
        ask(ours, "loglikelihood", pairs())


def test_what_does_not_fit(both):
    with pytest.raises(ConfigError, match=f"a continuation of .* tokens does not fit the context of {T}"):
        ask(both[0], "loglikelihood", [("x", " " + text(random.Random(0), 200))])
    with pytest.raises(ConfigError, match=f"max_gen_toks={T} leaves no room in the context of {T}"):
        ask(both[0], "generate_until", [("x", {"max_gen_toks": T})])


# ---- whole tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks: multiple choice, last words, perplexity and generation with two filters."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(3)

    def task(name, rows, **settings):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        settings = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
                    "test_split": "test", "metadata": {"version": 1.0}} | settings
        (folder / f"{name}.yaml").write_text(json.dumps(settings))        # JSON is YAML

    task("nd_choice", [{"q": text(rng, 6), "options": rng.sample("abcdefghijk", 3), "label": rng.randrange(3)} for _ in range(24)],
         output_type="multiple_choice", doc_to_text="Q: {{q}}\nA:", doc_to_choice="options", doc_to_target="label",
         fewshot_split="test", metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                                            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}])
    task("nd_last", [{"text": text(rng, 8)} for _ in range(12)], output_type="loglikelihood",
         doc_to_text="{{text.split(' ')[:-1]|join(' ')}}", doc_to_target="{{' '+text.split(' ')[-1]}}",
         metric_list=[{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                      {"metric": "acc", "aggregation": "mean", "higher_is_better": True}])
    task("nd_text", [{"page": text(rng, n)} for n in (3, 30, 120)], output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{page}}",
         metric_list=[{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")])
    task("nd_write", [{"q": text(rng, 5), "a": rng.choice(WORDS)} for _ in range(10)], output_type="generate_until", doc_to_text="{{q}}",
         doc_to_target="{{a}}", generation_kwargs={"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
         metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
         filter_list=[{"name": "whole", "filter": [{"function": "take_first"}]},
                      {"name": "word", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}, {"function": "take_first"}]}])
    return folder


NAMES = ["nd_choice", "nd_last", "nd_text", "nd_write"]


def test_whole_tasks_give_their_numbers(both, tasks):
    manager = TaskManager(include_path=str(tasks))
    ours, theirs = (lm_eval.simple_evaluate(model=lm, tasks=NAMES, task_manager=manager, num_fewshot=0, limit=20, bootstrap_iters=0)["results"]
                    for lm in both)
    assert ours.keys() == theirs.keys() == set(NAMES)
    for task in NAMES:
        numbers = {key: value for key, value in theirs[task].items() if isinstance(value, float)}
        assert len(numbers) >= 2
        for key, value in numbers.items():
            assert ours[task][key] == pytest.approx(value, rel=1e-4), (task, key)


def test_command(tokenizer, tasks, tmp_path, capsys):
    """Three checkpoints beside each other; the same one twice differs by nothing."""
    paths = [str(save(tmp_path / f"{name}.pt", make(tokenizer, seed, **kw), tokenizer)) for name, seed, kw in
             (("a", 0, {}), ("b", 1, {"residual": "mhar"}), ("c", 0, {}))]
    eval_file.main(["tasks", *paths, "--tasks", ",".join(NAMES), "--include_path", str(tasks), "--num_fewshot", "1", "--limit", "20",
                    "--json", str(tmp_path / "out.json")])
    printed, found = capsys.readouterr(), json.loads((tmp_path / "out.json").read_text())
    value = {(row["task"], row["metric"], row["checkpoint"]): row for row in found["results"]}
    assert len(value) == len(found["results"]) == 3 * 9 and value["nd_choice", "acc", paths[0]]["n"] == 20
    assert value["nd_write", "exact_match (word)", paths[0]] and value["nd_choice", "acc", paths[0]]["standard_error"] > 0
    pairs_found = {(row["task"], row["metric"], row["checkpoint"]): row for row in found["against_first"]}
    assert len(pairs_found) == 2 * 5                                      # of items: acc, acc_norm, acc, two of exact_match
    row = pairs_found["nd_choice", "acc", paths[1]]
    difference = value["nd_choice", "acc", paths[1]]["value"] - value["nd_choice", "acc", paths[0]]["value"]
    assert row["difference"] == pytest.approx(difference) and row["better"] + row["worse"] > 0
    assert row["difference"] == pytest.approx((row["better"] - row["worse"]) / 20) and row["p"] == mcnemar(row["better"], row["worse"])
    assert all(row["difference"] == row["better"] == row["worse"] == 0 and row["p"] == 1 for key, row in pairs_found.items() if key[2] == paths[2])
    assert "were cut on the left, by" in printed.err and "McNemar" not in printed.out and "nd_choice" in printed.out


def test_mcnemar():
    """The two that the MHAR paper reports (Table 3), and small ones by hand."""
    assert mcnemar(27, 13) == pytest.approx(0.0385, abs=5e-5) and mcnemar(123, 81) == pytest.approx(0.00399, abs=5e-6)
    assert mcnemar(0, 0) == 1 and mcnemar(3, 0) == 0.25 and mcnemar(1, 1) == 1 and mcnemar(5, 1) == mcnemar(1, 5) == 14 / 64


def test_refusals(tokenizer, tasks, tmp_path, monkeypatch):
    path = str(save(tmp_path / "a.pt", make(tokenizer), tokenizer))
    with pytest.raises(ConfigError, match=r"unknown task 'nd_chioce' \(did you mean nd_choice\?\)"):
        eval_file.main(["tasks", path, "--tasks", "nd_chioce", "--include_path", str(tasks)])
    (tasks / "nd_gone.yaml").write_text(json.dumps({"task": "nd_gone", "dataset_path": "json", "dataset_kwargs": {"data_files": {
        "test": str(tasks / "gone.jsonl")}}, "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "x", "doc_to_target": "y"}))
    with pytest.raises(ConfigError, match="nd_gone: the harness cannot go on") as e:
        eval_file.main(["tasks", path, "--tasks", "nd_gone", "--include_path", str(tasks)])
    assert "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "harness")
    with pytest.raises(ConfigError, match=r"the harness needs the package lm_eval: pip install -e .\[eval\]"):
        eval_file.main(["tasks", path, "--tasks", "nd_choice"])
