"""
Start from a pretrained model of Hugging Face's, and end with one. Families: Qwen3 and Llama.

    python convert.py from_hf FOLDER_OR_ID[@REVISION] --out out/base.pt
    python convert.py from_hf FOLDER_OR_ID --out out/base.pt --residual delta --route_heads 8 --sites_per_block 8
    python convert.py to_hf CKPT --out FOLDER

from_hf writes a checkpoint that train.py --init_from, eval.py and analyze.py take. With --residual delta each site gets a
gate and a null source, both zero (MHAR, section 3.3): what the model computes stays the same, in fp32 bit for bit, until
training opens the gates. to_hf writes a folder that transformers loads; it knows the plain residual alone.

Only names change: every tensor keeps its values and its dtype, and from_hf followed by to_hf gives the same safetensors
files, if they are split alike. The tokenizer goes along. Weights are mapped from disk, so a conversion needs memory for
one copy of them.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch

from checkpoints import load_checkpoint, pack_tokenizer, tokenizer_of, write_atomically
from errors import ConfigError, DataError, nearest
from model import GPT, PATHWAYS, Add, ModelConfig
from tokenizer import byte_tokenizer_json, load_tokenizer

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}             # model_type: its class in transformers
FIELDS = {                                # of ModelConfig: the key of config.json
    "vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_dim": "head_dim", "d_model": "hidden_size",
    "d_ff": "intermediate_size", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
}
PLAIN = {                                 # what no other value of config.json can be used for here
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False, "pretraining_tp": 1,
    "quantization_config": None, "layer_types": "full_attention",          # of each layer
}
LLAMA3_ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHANGES = {                               # fields of ModelConfig that a conversion may choose
    "residual": "add (default) or delta", "route_heads": "heads of delta's reads (default: 1)",
    "sites_per_block": "sites, two a layer, whose outputs make one source (default: 1)",
    "delta_entries": "changes (default), or recursive as in the authors' code",
    "seq_len": "context length (default: max_position_embeddings)",
}
BESIDE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")    # taken along


# ----------------------------------------------------------------------------------------------------------------------
# what both directions agree on


def tensor_names(config):
    """{name here: name in transformers} of all weights, in the order of transformers."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for i in range(config.n_layer):
        attention, ffn, layer = f"sublayers.{2 * i}", f"sublayers.{2 * i + 1}", f"model.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj") + ("q_norm", "k_norm") * config.qk_norm:
            names[f"{attention}.{part}.weight"] = f"{layer}.self_attn.{part}.weight"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names[f"{ffn}.{part}.weight"] = f"{layer}.mlp.{part}.weight"
        names[f"{attention}.norm.weight"] = f"{layer}.input_layernorm.weight"
        names[f"{ffn}.norm.weight"] = f"{layer}.post_attention_layernorm.weight"
    names["norm.weight"] = "model.norm.weight"
    return names if config.tie_embeddings else names | {"lm_head.weight": "lm_head.weight"}


def read_config(hf, where, **changes):
    """config.json as a dict -> ModelConfig. ConfigError for whatever would make another model of it."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{where}: model_type={kind!r} cannot be converted; known: {', '.join(FAMILIES)}")
    for key, value in PLAIN.items():
        if any(found != value for found in (hf[key] if isinstance(hf.get(key), list) else [hf.get(key)]) if found is not None):
            raise ConfigError(f"{where}: {key}={hf[key]!r} cannot be converted, only {value!r}")
    if lacking := [key for key in FIELDS.values() if key not in hf and key not in ("head_dim", "num_key_value_heads",
                                                                                   "tie_word_embeddings")]:
        raise ConfigError(f"{where} lacks {', '.join(lacking)}")
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", hf.get("rope_theta", 1e4))
    kind_of_rope = rope.pop("rope_type", rope.pop("type", "default"))              # "type" in older files
    rope.pop("type", None)
    if kind_of_rope not in ("default", "llama3") or rope.keys() - (LLAMA3_ROPE if kind_of_rope == "llama3" else set()):
        raise ConfigError(f"{where}: rotary embeddings of type {kind_of_rope!r} with {rope} cannot be converted; known: "
                          f"default, llama3 with {', '.join(sorted(LLAMA3_ROPE))}")
    values = {name: hf[key] for name, key in FIELDS.items() if hf.get(key) is not None}
    values = {"n_kv_head": values["n_head"], "tie_embeddings": False} | values
    return ModelConfig(**values | dict(
        rope_theta=float(theta), rope_scaling={"rope_type": "llama3"} | rope if kind_of_rope == "llama3" else None,
        qk_norm=kind == "qwen3", init_std=hf.get("initializer_range", 0.02), residual="add") | changes)


def write_config(config, eot, dtype, origin):
    """ModelConfig -> config.json as a dict; what the model came from (`origin`, or None) keeps its other keys."""
    kind = "qwen3" if config.qk_norm else "llama"
    hf = {"architectures": [FAMILIES[kind]], "model_type": kind, "eos_token_id": eot, "bos_token_id": None,
          "initializer_range": config.init_std, "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling}
    hf = dict(origin["config"]) if origin else hf
    hf |= {key: getattr(config, name) for name, key in FIELDS.items() if name in ("seq_len", "vocab_size") or not origin}
    hf["torch_dtype" if "torch_dtype" in hf else "dtype"] = dtype
    made = read_config(hf, "config.json", dropout=config.dropout, init_std=config.init_std, query_init_std=config.query_init_std)
    assert made == config, (made, config)
    return hf


# ----------------------------------------------------------------------------------------------------------------------
# from Hugging Face


def find_folder(address):
    """The folder of a model: `address` itself, or what the hub has under ORG/NAME[@REVISION]; and its revision or None."""
    name, _, revision = address.partition("@")
    if Path(address).exists():
        return Path(address), None
    from_hub = extra("huggingface_hub", "a model of the hub")
    try:
        folder = Path(from_hub.snapshot_download(name, revision=revision or None, allow_patterns=[
            "*.json", "*.safetensors", *BESIDE]))
    except Exception as e:                                                 # of the network, the hub, or a name that is none
        raise ConfigError(f"{address} is no folder here and cannot be fetched from the hub ({type(e).__name__}: "
                          f"{(str(e).strip().splitlines() or ['?'])[0][:120]})") from None
    return folder, folder.name                                             # a snapshot's folder is named after its commit


def extra(module, what):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise ConfigError(f"{what} needs the package {module.partition('.')[0]}: pip install -e .[hf]") from None


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {path.name} in {path.parent}, which a model of Hugging Face's has") from None
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON ({e})") from None


def open_weights(folder):
    """{name: tensor} of all safetensors files of a model; the values stay on the disk until somebody looks at them."""
    safe_open = extra("safetensors", "reading a model").safe_open
    index = folder / "model.safetensors.index.json"
    if index.exists():
        stated = read_json(index).get("weight_map") or {}
        files = sorted(set(stated.values()))
    elif (folder / "model.safetensors").exists():
        stated, files = None, ["model.safetensors"]
    else:
        raise ConfigError(f"{folder} has neither model.safetensors nor {index.name} (weights in other formats are not read: "
                          "they can execute code)")
    tensors = {}
    for name in files:
        path = folder / name
        if not path.exists():
            raise ConfigError(f"{index} names the file {name}, which is not in {folder}")
        try:
            with safe_open(path, framework="pt") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}
        except Exception as e:                                             # of a library that names no kind
            raise ConfigError(f"{path} is not a safetensors file, or is cut short ({str(e)[:120]})") from None
        for key in found:
            if stated is not None and stated.get(key) != name:
                raise ConfigError(f"{path} holds {key}, which {index.name} says is in {stated.get(key, 'no file')}")
        tensors |= found
    if stated is not None and (lost := sorted(stated.keys() - tensors.keys())):
        raise ConfigError(f"{folder / stated[lost[0]]} lacks {lost[0]}, which {index.name} says is there")
    return tensors


def take_weights(tensors, config, folder):
    """{name in transformers: tensor} -> {name here: tensor}. ConfigError unless each is used once and has its shape."""
    with torch.device("meta"):
        own = GPT(config).state_dict()
    names = tensor_names(config)
    tensors = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}     # follows from the config
    if config.tie_embeddings and "lm_head.weight" in tensors:
        if not torch.equal(tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight", torch.empty(0))):
            raise ConfigError(f"{folder}: config.json says that lm_head is the embedding, but lm_head.weight differs from it")
    if missing := [name for name in names.values() if name not in tensors]:
        raise ConfigError(f"{folder} lacks the tensor {missing[0]}" + f" (and {len(missing) - 1} more)" * (len(missing) > 1))
    if unused := sorted(tensors.keys() - set(names.values())):
        raise ConfigError(f"{folder} has the tensor {unused[0]}, for which this model has no place"
                          + f" (and {len(unused) - 1} more)" * (len(unused) > 1))
    for name, theirs in names.items():
        t = tensors[theirs]
        if t.shape != own[name].shape:
            raise ConfigError(f"{folder}: {theirs} has the shape {tuple(t.shape)}, config.json makes it {tuple(own[name].shape)}")
        if t.dtype not in DTYPES.values():
            raise ConfigError(f"{folder}: {theirs} is {t.dtype}; known: {', '.join(DTYPES)}")
    taken = {name: tensors[theirs] for name, theirs in names.items()}
    return taken | {"lm_head.weight": taken["embed.weight"]} if config.tie_embeddings else taken


def from_hf(address, out, tokenizer=None, **changes):
    """
    Write the checkpoint `out` of a model in the layout of Hugging Face. `tokenizer` is a name or path for load_tokenizer, None
    = the model's tokenizer.json; `changes` are fields of ModelConfig. -> the path.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists: choose another --out")
    if out.suffix != ".pt":
        raise ConfigError(f"--out {out}: a checkpoint is a file NAME.pt")
    folder, revision = find_folder(address)
    hf = read_json(folder / "config.json")
    kind = changes.get("residual", "add")
    able = [name for name, pathway in PATHWAYS.items() if pathway.starts_as_add is not None]
    if kind not in able:
        raise ConfigError(f"residual={kind!r} would not start as the model it is made from{nearest(kind, able)}; "
                          f"known: {', '.join(able)}")
    if kind == "add" and (idle := sorted(changes.keys() - {"residual", "seq_len"})):
        raise ConfigError(f"--{idle[0]} says how depth is read, which residual='add' does not do: add --residual delta")
    config = read_config(hf, folder / "config.json", **changes | PATHWAYS[kind].starts_as_add)
    weights = take_weights(open_weights(folder), config, folder)
    pathway = config.pathway_class(config)
    pathway.init_weights(torch.Generator().manual_seed(0))
    weights |= {f"pathway.{name}": t.to(weights["embed.weight"].dtype) for name, t in pathway.state_dict().items()}
    tokenizer = find_tokenizer(folder, tokenizer)
    if tokenizer.n_vocab > config.vocab_size:
        raise ConfigError(f"the tokenizer {tokenizer.name} has {tokenizer.n_vocab} ids, the model vocab_size={config.vocab_size}")
    beside = {name: (folder / name).read_text(encoding="utf-8") for name in BESIDE if (folder / name).exists()}
    state = {"step": 0, "config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(tokenizer), "model": weights,
             "origin": {"name": address, "revision": revision, "config": hf, "beside": beside}}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda f: torch.save(state, f))
    with torch.device("meta"):
        print(GPT(config).describe().splitlines()[0])
    print(f"{out}: {address}{f' at {revision}' if revision else ''}, weights {weights['embed.weight'].dtype}, "
          f"tokenizer {tokenizer.name} with ids below {tokenizer.n_vocab:,}")


def find_tokenizer(folder, name):
    """That called `name`, or the one of a model's folder."""
    path = folder / "tokenizer.json"
    if name is not None:
        return load_tokenizer(name)
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json: say which tokenizer with --tokenizer")
    try:
        tokenizer = load_tokenizer(str(path))
    except DataError as e:
        raise ConfigError(f"{e}; --tokenizer NAME_OR_FILE takes another one") from None
    own = load_tokenizer(path.name, file=byte_tokenizer_json())
    return load_tokenizer("byte") if tokenizer.sha256 == own.sha256 else tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# to Hugging Face


def to_hf(checkpoint, out, weights="model", dtype=None, max_shard_size="5GB"):
    """
    Write the folder `out` of a checkpoint. `weights` is "model" or "ema"; `dtype` a key of DTYPES, None = what the checkpoint
    has; `max_shard_size` as the hub's library understands it.
    """
    hub = extra("huggingface_hub", "writing a model")
    extra("safetensors", "writing a model")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: choose another --out")
    state = load_checkpoint(checkpoint)
    config = ModelConfig.of_checkpoint(state)
    if config.pathway_class is not Add or config.moe_n_expert:
        what = "a mixture of experts" if config.pathway_class is Add else f"residual={config.residual!r}"
        raise ConfigError(f"{checkpoint}: transformers has no class for {what}, only for residual='add' without experts; share the "
                          "checkpoint itself, which eval.py and GPT.from_checkpoint read")
    if weights not in state:
        raise ConfigError(f"{checkpoint} has no {weights!r} weights: train with --ema_decay")
    held, names = state["model"] | state[weights], tensor_names(config)
    kinds = {held[name].dtype for name in names}
    if dtype is None and len(kinds) > 1:
        raise ConfigError(f"{checkpoint} holds {', '.join(sorted(map(str, kinds)))}: choose one with --dtype")
    cast = DTYPES[dtype] if dtype else kinds.pop()
    tensors = {theirs: held[name].to(cast) for name, theirs in names.items()}
    tokenizer, origin = tokenizer_of(state), state.get("origin")
    hf = write_config(config, tokenizer.eot, str(cast).removeprefix("torch."), origin)
    beside = dict(origin["beside"]) if origin else {}
    file = byte_tokenizer_json() if tokenizer.name == "byte" else tokenizer.file if tokenizer.name == "tokenizer.json" else None
    if file is not None and "tokenizer_config.json" not in beside:
        end = next(t["content"] for t in json.loads(file)["added_tokens"] if t["id"] == tokenizer.eot)
        beside["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}, indent=2)

    partial = out.with_name(out.name + ".partial")                         # renamed to `out` when complete
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        hub.save_torch_state_dict(tensors, partial, max_shard_size=max_shard_size)
        (partial / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, text in beside.items():
            (partial / name).write_text(text, encoding="utf-8")
        if file is not None:
            (partial / "tokenizer.json").write_bytes(file)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: {hf['architectures'][0]}, {sum(t.numel() for t in tensors.values()):,} weights of {cast}")
    if file is None:
        print(f"no tokenizer.json: the tokenizer is {tokenizer.name}, which transformers does not read")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="from_hf|to_hf", dest="command")
    sub = commands.add_parser("from_hf", help="a model in the layout of Hugging Face -> a checkpoint")
    sub.add_argument("model", metavar="FOLDER_OR_ID[@REVISION]")
    sub.add_argument("--out", required=True, metavar="CKPT", help="the file to write, NAME.pt")
    sub.add_argument("--tokenizer", help="default: the model's tokenizer.json")
    for field in dataclasses.fields(ModelConfig):
        if field.name in CHANGES:
            sub.add_argument(f"--{field.name}", default=argparse.SUPPRESS, type=str if field.type is str else int,
                             help=CHANGES[field.name])
    sub = commands.add_parser("to_hf", help="a checkpoint -> a folder that transformers loads")
    sub.add_argument("checkpoint", metavar="CKPT")
    sub.add_argument("--out", required=True, metavar="FOLDER")
    sub.add_argument("--weights", default="model", choices=("model", "ema"))
    sub.add_argument("--dtype", choices=DTYPES, help="default: that of the checkpoint")
    sub.add_argument("--max_shard_size", default="5GB", help="of a file (default: 5GB)")
    args = parser.parse_args(argv)
    if args.command == "from_hf":
        return from_hf(args.model, args.out, args.tokenizer, **{key: vars(args)[key] for key in CHANGES if key in args})
    to_hf(args.checkpoint, args.out, args.weights, args.dtype, args.max_shard_size)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError, OSError) as e:
        sys.exit(f"convert.py: {e}")
